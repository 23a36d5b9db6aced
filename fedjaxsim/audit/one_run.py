"""An audit inside one run: canary clients beside the real ones bound its ε from below.

Each of n canaries is in the run with probability 1/2: then it sends one fixed direction, else zero.
Afterwards the releases tell which were in, with abstentions; too many right guesses refute an ε
(Steinke, Nasr and Jagielski 2023). Messages of canaries pass the mechanism like all others. The
real clients' update is undisturbed but for the canaries' messages, which act as further noise.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjaxsim import keys
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.audit.attacks import Directions, canary_norm, shapes_of, watched
from fedjaxsim.data.population import Population
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import threefry
from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.entries import MOST_ROUNDS
from fedjaxsim.privacy.events import Gaussian
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.simulation import Simulation, SimulationState

PyTree = Any
CONFIDENCE = 0.95
"""Confidence of the lower bound."""
REFUTING = 0.9999
"""Confidence with which a reported guarantee is called refuted."""
_SHARES = (1.0, 0.25, 0.0625)
"""Shares of the canaries on which an audit guesses; each has its part of the significance."""
_LARGEST = 60.0
"""Largest lower bound on ε that is looked for."""


class _Notes(NamedTuple):
    """The sum of all releases with alternating signs, (p,), and the canaries' coins, (n,) bool."""

    directions: Directions
    observed: jax.Array
    sent: jax.Array


@dataclasses.dataclass(frozen=True)
class OneRunResult:
    """The result of an audit inside one run.

    Attributes:
      epsilon: lower bound on ε in nats (zero-out, joint DP) at `delta`, with `CONFIDENCE`.
      delta: δ.
      reported: the run's ε at δ; None if it reports none.
      advantage: lower bound, with confidence `REFUTING`, on the advantage 2 q − 1 of guesses that
        are right with probability q.
      allowed: the largest advantage that the reported guarantee allows, its δ at ε = 0; None if it
        reports none, or guesses on several canaries need not be independent.
      canaries: n.
      guesses: the number of guesses behind `epsilon`.
      correct: the number of right ones among them.
    """

    epsilon: float
    delta: float
    reported: float | None
    advantage: float
    allowed: float | None
    canaries: int
    guesses: int
    correct: int

    @property
    def refuted(self) -> bool:
        """Return whether the reported guarantee is refuted."""
        return self.allowed is not None and self.advantage > self.allowed

    def __str__(self) -> str:
        """Return one sentence, as in `one-run audit: ε ≥ 0.8 at δ = 0.001 with 95 % confidence`."""
        verdict = "the reported guarantee does NOT hold" if self.refuted else "not refuted"
        if self.allowed is None:
            verdict = "no ε is reported" if self.reported is None else "no verdict"
        return (
            f"one-run audit: ε ≥ {self.epsilon:.3g} zero-out at δ = {self.delta:.3g} with "
            f"{100 * CONFIDENCE:g} % confidence ({self.canaries} canaries, {self.correct} of "
            f"{self.guesses} guesses right); {verdict}"
        )


def with_canaries(simulation: Simulation, hparams: Hyperparameters, canaries: int) -> Simulation:
    """Return the simulation with `canaries` more clients; `result` reads the state of its run.

    Canaries have ids from m on, one row of no meaning, no test rows, and a personal state that is
    nobody's. Releases are divided by the expected cohort of real clients, so that these train as
    without canaries. A canary that is in sends 10·C in its direction, with a sign that alternates
    from one participation to the next: so the drift of the model cancels, as does noise that is
    drawn twice. (With correlated noise canaries keep their sign.)

    Raises:
      ValueError: if `canaries` lies outside [1, p], the algorithm sends nothing, a release has
        another shape than a message, clients have hyperparameters of their own, or canaries would
        take the places of real clients.
    """
    scheme = simulation.sampler.scheme
    if scheme.kind not in ("poisson", "full", "groups"):
        raise ValueError(
            "audit_canaries needs poisson, full or groups sampling: in cohorts of a fixed size "
            f"canaries take the places of clients, got {scheme.kind} sampling"
        )
    if simulation.assumed_of(hparams):
        raise ValueError("audit_canaries needs hyperparameters with one value for all clients")
    simulation.check_in_memory()
    message, size, release = shapes_of(simulation, hparams)
    if not 1 <= canaries <= size:
        raise ValueError(
            f"audit_canaries must lie in [1, {size}], the number of parameters in a message, got "
            f"{canaries}"
        )
    sent, released = ([leaf.shape for leaf in jax.tree.leaves(t)] for t in (message, release))
    if sent != released:
        raise ValueError(
            f"audit_canaries needs releases of the shapes of a message, {sent}, got {released}"
        )
    # Correlated noise cancels best in plain sums, so canaries keep their sign.
    same = simulation.mechanism.event.of_whole_run
    period = MOST_ROUNDS if same else scheme.groups or 1
    algorithm = _with_canaries(simulation.algorithm, simulation.num_clients, canaries, size, period)
    population = _extended(simulation.population, canaries)
    return dataclasses.replace(simulation, algorithm=algorithm, population=population)


def _extended(population: Population, canaries: int) -> Population:
    """Return the population with one row, each value the field's smallest, for each canary."""
    fields = {
        name: np.concatenate([v, np.full((canaries, *v.shape[1:]), v.min(), v.dtype)])
        for name, v in population.fields.items()
    }
    counts = np.concatenate([population.counts, [[1, 0, 0]] * canaries])
    names = [*map(str, population.names), *(f"canary {k}" for k in range(canaries))]
    return dataclasses.replace(population, fields=fields, counts=counts, names=np.asarray(names))


def _with_canaries(
    algorithm: Algorithm, num_clients: int, canaries: int, size: int, period: int
) -> Algorithm:
    share = (num_clients + canaries) / num_clients

    def alternating(round_):
        return 1.0 - 2.0 * (round_ // period % 2)

    def client(shared, personal, data, hparams, context):
        context = context._replace(num_clients=num_clients)
        personal, message, metrics = algorithm.client(shared, personal, data, hparams, context)
        real = context.client_id < num_clients  # means over the cohort are means over real clients
        return personal, message, jax.tree.map(lambda x: jnp.where(real, share * x, 0), metrics)

    def server(shared, release, hparams, round_):
        release = jax.tree.map(lambda leaf: share * leaf, release)
        return algorithm.server(shared, release, hparams, round_)

    def begin(key):
        coins = threefry.bits(threefry.fold_in(key, keys.COINS), (canaries,))
        directions = Directions.draw(canaries, size)
        return _Notes(directions, jnp.zeros(size), (coins & 1).astype(bool))

    def send(notes, message, hparams, context):
        number, directions = context.client_id - num_clients, notes.directions
        norm = canary_norm(hparams) * notes.sent[number] * alternating(context.round)
        own = jnp.where(directions.owner == number, directions.sign, 0)
        crafted = norm / jnp.sqrt(directions.size[number]) * own
        return jnp.where(number < 0, message, crafted.astype(message.dtype))

    def note(notes, release, round_):
        flat, _ = ravel_pytree(release)
        more = alternating(round_) * flat.astype(notes.observed.dtype)
        return notes._replace(observed=notes.observed + more)

    return watched(algorithm._replace(client=client, server=server), begin, send, note)


def result(state: SimulationState, report: Report) -> OneRunResult:
    """Guess the canaries' coins from a run's releases, and bound its ε from below.

    Given the releases, the coins of canaries are independent if Gaussian noise of one scale is
    added to a sum: each direction then sees noise of its own, and what other clients send depends
    on earlier releases alone. An adaptive clip norm, or noise with another density, couples them.

    Args:
      state: of one run of the simulation with canaries.
      report: the guarantee of the run, at its δ.
    """
    notes = state.shared.notes
    scores = notes.directions.along(np.asarray(notes.observed, np.float64))
    reported, sent = report.find("zero_out").epsilon, np.asarray(notes.sent)
    adapts = jax.tree.leaves(state.mechanism)
    independent = not adapts and all(isinstance(c.event, Gaussian) for c in report.charges)
    allowed = None
    if reported is not None and independent:
        allowed = composition.profile(report.charges, "zero_out").delta(0.0)
    return of_scores(scores, sent, report.delta, reported, allowed)


def of_scores(
    scores: np.ndarray,
    sent: np.ndarray,
    delta: float,
    reported: float | None = None,
    allowed: float | None = None,
) -> OneRunResult:
    """Bound ε from scores (n,), higher if a canary more likely `sent`, (n,) bool.

    The highest r/2 scores are guessed as in, the lowest r/2 as out, for some r ≤ n.
    """
    from scipy.stats import beta  # slow to import

    n, order = len(scores), np.argsort(scores)

    def right(half):
        return int(sent[order[n - half :]].sum() + (~sent[order[:half]]).sum())

    best = (0.0, 0, 0)
    for share in _SHARES:
        half = int(share * n / 2)
        bound = lower_bound(n, 2 * half, right(half), delta, (1 - CONFIDENCE) / len(_SHARES))
        best = max(best, (bound, 2 * half, right(half)))
    correct, guesses = right(n // 2), n // 2 * 2
    rate = beta.ppf(1 - REFUTING, correct, guesses - correct + 1) if correct else 0.0
    return OneRunResult(best[0], delta, reported, float(2 * rate - 1), allowed, n, *best[1:])


def lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, significance: float
) -> float:
    """Compute the largest ε ≥ 0 that is refuted (Steinke, Nasr, Jagielski 2023, Theorem 5.2).

    Under (ε, δ)-DP at least `correct` of `guesses` guesses are right with probability at most
    P(W ≥ v) + 2 n δ max_i P(v > W ≥ v − i)/i, where W ~ Bin(r, e^ε/(1 + e^ε)).
    """
    from scipy.stats import binom  # slow to import

    steps = np.arange(1, correct + 1)

    def p_value(epsilon):
        at_least = binom.sf(np.arange(correct, -1, -1) - 1, guesses, 1 / (1 + math.exp(-epsilon)))
        near = np.max((at_least[1:] - at_least[0]) / steps, initial=0.0)
        return at_least[0] + 2 * canaries * delta * near

    if p_value(0.0) > significance:
        return 0.0
    low, high = 0.0, _LARGEST
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) <= significance else (low, middle)
    return low
