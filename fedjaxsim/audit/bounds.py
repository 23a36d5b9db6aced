"""Lower bounds on ε, from guesses which canaries were in real runs.

The releases tell which canaries were in, with abstentions; too many right guesses refute an ε
(Steinke, Nasr and Jagielski 2023). The theorem takes one run with n canaries, or R independent ones
with n/R each: every coin is in one run alone, so it is as private in all of them as in that one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from scipy.special import betainc, betaincinv, ndtri

from fedjaxsim import checks, keys
from fedjaxsim.audit.canaries import with_canaries
from fedjaxsim.engine.part_checks import require_key
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.keys import Stream
from fedjaxsim.privacy.accounting import composition, gaussian
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.privacy.entries import check_delta
from fedjaxsim.privacy.events import Gaussian
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.simulation import Simulation, SimulationState

CONFIDENCE = 0.95
"""Confidence of the lower bound."""
REFUTING = 0.9999
"""Confidence with which a reported guarantee is called refuted."""
_SHARES = (1.0, 0.25, 0.0625)
"""Shares of the canaries on which an audit guesses; each has its part of the significance."""
_LARGEST = 60.0
"""Largest lower bound on ε that is looked for."""


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes:
      epsilon: lower bound on ε in nats (zero-out, joint DP) at `delta`, with `CONFIDENCE`.
      reported: ε that is reported at δ; None if none is.
      advantage: lower bound, with confidence `REFUTING`, on the advantage 2 q − 1 of guesses that
        are right with probability q.
      allowed: the largest advantage that the reported guarantee allows, its δ at ε = 0; None if it
        reports none, or guesses on several canaries need not be independent.
      guesses: the number of guesses behind `epsilon`; `correct` of them were right.
      gaussian: lower bound on ε, with `CONFIDENCE`, if all releases together are one Gaussian
        release, as their charges say; None if they are not, or guesses need not be independent.
    """

    epsilon: float
    delta: float
    reported: float | None
    advantage: float
    allowed: float | None
    canaries: int
    guesses: int
    correct: int
    gaussian: float | None = None

    @property
    def refuted(self) -> bool:
        """Return whether the reported guarantee is refuted."""
        return self.allowed is not None and self.advantage > self.allowed

    def __str__(self) -> str:
        """Return one sentence, as in `audit: ε ≥ 0.8 at δ = 0.001 with 95 % confidence`."""
        verdict = "the reported guarantee does NOT hold" if self.refuted else "not refuted"
        if self.allowed is None:
            verdict = "no ε is reported" if self.reported is None else "no verdict"
        noise = "" if self.gaussian is None else f", {self.gaussian:.3g} if noise is Gaussian"
        return (
            f"audit: ε ≥ {self.epsilon:.3g} zero-out at δ = {self.delta:.3g} with "
            f"{100 * CONFIDENCE:g} % confidence ({self.canaries} canaries, {self.correct} of "
            f"{self.guesses} guesses right){noise}; {verdict}"
        )


def audit(
    simulation: Simulation,
    hparams: Hyperparameters,
    rounds: int,
    *,
    canaries: int = 100,
    runs: int = 20,
    delta: float | None = None,
    seed: int = 0,
    on_run: Callable[[int, int], None] | None = None,
) -> AuditResult:
    """Bound ε from below for zero-out adjacency, by attacking several runs of a simulation.

    Algorithm, population, sampler, mechanism, loop and ledger are the simulation's. A bound below
    the reported ε proves nothing: other attacks may be stronger. One above it means that some part
    differs from its accountant's model.

    `canaries`, n in number, join the clients of each run. Time grows with the number of `runs`, and
    power with n times it. With z = 0 there is no ε to refute. `on_run` is called after each run
    with the runs done and their number; δ is by default `default_delta(m)`.

    Raises:
      ValueError: if a number is out of range, or `with_canaries` refuses the simulation.
    """
    checks.count(runs=runs, rounds=rounds)
    delta = default_delta(simulation.num_clients) if delta is None else delta
    check_delta(delta)
    audited = with_canaries(simulation, hparams, canaries)
    root, states = require_key(seed), []
    for run in range(runs):
        state = audited.init(keys.stream(root, Stream.AUDIT, run), hparams)
        state, _ = audited.run(state, hparams, rounds)
        states.append(dataclasses.replace(state, personal=()))  # clients' models tell nothing here
        if on_run is not None:
            on_run(run + 1, runs)
    return result(states, audited.guarantee(states[0], delta))


def result(states: Sequence[SimulationState], report: Report) -> AuditResult:
    """Guess the canaries' coins from the releases of runs, and bound ε from below.

    Given the releases, the coins of canaries are independent if Gaussian noise of one scale is
    added to a sum: each direction then sees its own noise, and what other clients send depends
    on earlier releases alone. An adaptive clip norm, or noise with another density, couples them.

    `states` are the last ones of independent runs of one simulation; each has the same `report`.
    """
    watched = [state.shared for state in states]
    charges = [charge for charge in report.charges if charge.event.unit == "client"]
    scores = [
        observer.directions.along(np.asarray(observer.observed, np.float64)) for observer in watched
    ]
    reported, sent = (
        report.find("zero_out").epsilon,
        [np.asarray(observer.sent) for observer in watched],
    )
    adapts = jax.tree.leaves(states[0].mechanism)
    independent = not adapts and all(isinstance(charge.event, Gaussian) for charge in charges)
    allowed, is_gaussian = None, False
    if reported is not None and independent:
        allowed = composition.profile(charges, "zero_out").delta(0.0)
        is_gaussian = composition.profiles(charges, "zero_out")[0].keys() == {"gaussian"}
    together = np.concatenate(scores), np.concatenate(sent)
    return of_scores(*together, report.delta, reported, allowed, is_gaussian)


def of_scores(
    scores: np.ndarray,
    sent: np.ndarray,
    delta: float,
    reported: float | None = None,
    allowed: float | None = None,
    is_gaussian: bool = False,
) -> AuditResult:
    """Bound ε from scores (n,), higher if a canary more likely `sent`, (n,) bool.

    The highest r/2 scores are guessed as in, the lowest r/2 as out, for some r ≤ n. With an
    `allowed` advantage canaries are independent, and (ε, δ)-DP lets guesses on all of them be right
    with probability (e^ε + δ)/(e^ε + 1) at most. If their releases are one Gaussian release
    (`is_gaussian`), with some μ, that probability is Φ(μ/2), which says more of ε at a small δ.
    """
    n, order = len(scores), np.argsort(scores)

    def right(half):
        return int(sent[order[n - half :]].sum() + (~sent[order[:half]]).sum())

    # To leave out the guess in the middle would favour the others, so it counts as a wrong one.
    correct = right(n // 2)

    def least_rate(significance):
        """Return a lower bound on the rate of right guesses (Clopper and Pearson)."""
        return float(betaincinv(correct, n - correct + 1, significance)) if correct else 0.0

    independent = allowed is not None
    significance = (1 - CONFIDENCE) / (len(_SHARES) + independent)
    best = (0.0, 0, 0)
    if independent:
        rate = least_rate(significance)
        best = (math.log(max(1.0, (rate - delta) / (1 - rate))), n, correct)
    for share in _SHARES:
        half = int(share * n / 2)
        bound = lower_bound(n, 2 * half, right(half), delta, significance)
        best = max(best, (bound, 2 * half, right(half)))
    advantage = 2 * least_rate(1 - REFUTING) - 1
    of_gaussian = None
    if is_gaussian:
        mu = 2 * float(ndtri(max(0.5, least_rate(1 - CONFIDENCE))))
        of_gaussian = gaussian.epsilon(delta, mu)
    return AuditResult(best[0], delta, reported, advantage, allowed, n, *best[1:], of_gaussian)


def lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, significance: float
) -> float:
    """Compute the largest ε ≥ 0 that is refuted (Steinke, Nasr, Jagielski 2023, Theorem 5.2).

    Under (ε, δ)-DP at least `correct` of `guesses` guesses are right with probability at most
    P(W ≥ v) + 2 n δ max_i P(v > W ≥ v − i)/i, where W ~ Bin(r, e^ε/(1 + e^ε)).
    """
    steps = np.arange(1, correct + 1)
    right = steps[::-1]

    def p_value(epsilon):
        # P(W ≥ k) = I_q(k, r − k + 1), and 1 at k = 0.
        q = 1 / (1 + math.exp(-epsilon))
        at_least = np.append(betainc(right, guesses - right + 1, q), 1.0)
        near = np.max((at_least[1:] - at_least[0]) / steps, initial=0.0)
        return at_least[0] + 2 * canaries * delta * near

    if p_value(0.0) > significance:
        return 0.0
    low, high = 0.0, _LARGEST
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) <= significance else (low, middle)
    return low
