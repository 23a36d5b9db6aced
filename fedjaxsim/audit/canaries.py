"""Audits: an empirical lower bound on ε, from canaries in real runs.

A canary is a client that sends a crafted message, or zero, by a fair coin. A test on the published
releases that separates senders from the others better than (ε, δ) allows refutes that (ε, δ).
Algorithm, population, sampler, mechanism, loop and ledger are those of the audited simulation.

A bound below the reported ε proves nothing: other attacks may be stronger. A bound above it means
that some part of the simulation differs from its accountant's model. The same runs test the noise
itself, and whether the canaries' data reach the messages of other clients.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.audit.attacks import (
    EXACT,
    Attack,
    Directions,
    Evidence,
    NoiseTest,
    canary_norm,
    likelihood_ratio,
    noise_of,
    noise_tests,
    shapes_of,
    watched,
)
from fedjaxsim.data.population import with_other_rows
from fedjaxsim.extras import importing
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.privacy.entries import check_delta
from fedjaxsim.simulation import Simulation

with importing("audit"):
    from jax_privacy.auditing import CanaryScoreAuditor, Split

PyTree = Any

DELTAS = (0.01, 0.1, 0.2, 0.3)
"""Values of δ, besides the reported one, at which the profile δ ↦ ε(δ) is tested: a test
with n canaries sees little of events with probability below 1/n.
"""
FEWEST = 40
"""Least number of canaries in all runs; fewer prove nothing, and might all have the same coin."""


class _Notes(NamedTuple):
    """The canaries' directions (n, p), results of `observe` (T, …), and the coins (n,) bool."""

    directions: jax.Array
    observed: PyTree
    sent: jax.Array


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound on ε at one δ, next to the ε that is reported there.

    Attributes:
      delta: δ.
      epsilon: lower bound on ε in nats, at the audit's confidence.
      reported: the simulation's ε for zero-out and joint DP; None if it reports none.
      most: the bound that an attack without errors would have proven.
    """

    delta: float
    epsilon: float
    reported: float | None
    most: float

    @property
    def violated(self) -> bool:
        """Return whether the report is refuted at this δ."""
        return self.reported is not None and self.epsilon > self.reported

    def __str__(self) -> str:
        """Return the bound, as in `δ = 0.1: ε ≥ 0.5, at most 3 could be shown, reported 1`."""
        reported = "none" if self.reported is None else f"{self.reported:.4g}"
        return (
            f"δ = {self.delta:.3g}: ε ≥ {self.epsilon:.4g}, at most {self.most:.3g} could be "
            f"shown, reported {reported}"
        )


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes:
      bounds: one per δ, increasing; all of them hold together at the stated confidence.
      confidence: least probability that no bound exceeds the true ε, over coins, sampling and
        noise: a sound simulation is accused with probability at most 1 − confidence.
      canaries: n, canaries in each run.
      runs: the number of runs.
      rounds: T, rounds of each run.
      sent: the number of canaries that sent their message, in all runs.
      noise: tests of the noise; empty for mechanisms whose releases are no sums with Gaussian noise
        of a fixed scale. They share the confidence with the bounds.
      cross_talk: whether other data of the canaries, in an otherwise equal run, changed anything
        that the server published. Their own messages do not depend on their data.
    """

    bounds: tuple[Bound, ...]
    confidence: float
    canaries: int
    runs: int
    rounds: int
    sent: int
    noise: tuple[NoiseTest, ...] = ()
    cross_talk: bool = False

    @property
    def violated(self) -> bool:
        """Return whether the report is refuted: at some δ, by the noise, or by cross-talk."""
        return self.cross_talk or any(each.violated for each in (*self.bounds, *self.noise))

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries."""
        bounds, noise = (
            [{**dataclasses.asdict(each), "violated": each.violated} for each in several]
            for several in (self.bounds, self.noise)
        )
        return {
            **dataclasses.asdict(self),
            "bounds": bounds,
            "noise": noise,
            "adjacency": "zero_out",
            "view": "joint_dp",
            "violated": self.violated,
        }

    def __str__(self) -> str:
        """Return the bounds and their meaning."""
        lines = [
            f"Privacy audit: {self.canaries * self.runs} canaries ({self.sent} sent) in "
            f"{self.runs} runs of {self.rounds} rounds; zero_out, joint_dp; "
            f"confidence {self.confidence:.10g}"
        ]
        said = [(str(each), each.violated) for each in (*self.bounds, *self.noise)]
        said += (
            []
            if self.noise
            else [("the noise was not tested: this attack does not know its law", False)]
        )
        heard = "changed" if self.cross_talk else "changed no bit of"
        said += [(f"other data of the canaries {heard} what the server published", self.cross_talk)]
        lines += [f"  {text}" + ("  VIOLATED" if violated else "") for text, violated in said]
        if self.violated:
            lines.append("  The reported guarantee does not hold.")
        elif all(bound.reported is None for bound in self.bounds):
            lines.append("  No ε is reported, so there is nothing to refute.")
        else:
            lines.append("  Not refuted. That is no proof: other attacks may be stronger.")
        return "\n".join(lines)


def audit(
    simulation: Simulation,
    hparams: Hyperparameters,
    rounds: int,
    *,
    canaries: int | Sequence[int] | None = None,
    runs: int = 20,
    confidence: float = 0.99,
    delta: float | None = None,
    seed: int = 0,
    attack: Attack | None = None,
    reported: Callable[[float], float | None] | None = None,
    on_run: Callable[[int, int], None] | None = None,
) -> AuditResult:
    """Bound ε from below for zero-out adjacency, by attacking real runs of a simulation.

    Each run has n canaries, worth n attacks (as in Steinke, Nasr, Jagielski 2023, and Andrew et al.
    2023), with random orthonormal directions, the same in all runs, and fresh fair coins. A
    threshold on the score separates senders from the others. It is chosen on half of the canaries;
    on the other half Clopper–Pearson intervals of its error rates bound ε (Jagielski, Ullman, Oprea
    2020, by `jax_privacy.auditing`). The values of δ share the confidence.

    Args:
      simulation: the audited simulation. With z = 0 or an unprotected mechanism there is no ε to
        refute, and the bounds describe the attack alone.
      hparams: hyperparameters.
      rounds: T.
      canaries: n ≤ min(m, p), or the ids of n clients; by default half of the most, so that other
        clients are left to train. A number selects random clients.
      runs: number of runs; time grows with it, and the bounds with n times it.
      confidence: in (0, 1).
      delta: δ of the report, in (0, 1); by default `default_delta(m)`. Larger ones are added.
      seed: of all random numbers.
      attack: by default `likelihood_ratio()`.
      reported: `(δ) -> ε`, or None if none is stated; by default the simulation's report.
      on_run: called after each run with the runs done and their number.

    Raises:
      ValueError: if a number is out of range, there are fewer than 40 canaries in all, the
        algorithm sends nothing, or the simulation refuses the hyperparameters.
    """
    checks.in_range("(0, 1)", confidence=confidence)
    delta = default_delta(simulation.num_clients) if delta is None else delta
    check_delta(delta)
    checks.count(runs=runs, rounds=rounds)
    attack = likelihood_ratio() if attack is None else attack
    _, size, release = shapes_of(simulation, hparams)
    if size == 0:
        raise ValueError("the algorithm sends nothing, so there is nothing to audit")
    ids = _chosen(canaries, simulation.num_clients, size, np.random.default_rng((seed, 0)))
    directions = Directions.draw(len(ids), size).dense()
    along = jnp.asarray(directions, dtype=float)
    tape = jax.eval_shape(attack.observe, release, along)

    def begin(key):
        del key
        empty = jax.tree.map(lambda leaf: jnp.zeros((rounds, *leaf.shape), leaf.dtype), tape)
        return _Notes(along, empty, jnp.zeros(len(ids), bool))

    def send(notes, message, hparams, context):
        """Send 10·C·d or zero from a canary; others' messages lose their part along all d."""
        basis = notes.directions.astype(message.dtype)
        mine = jnp.asarray(ids) == context.client_id
        norm = jnp.where(jnp.any(mine & notes.sent), canary_norm(hparams), 0)
        parts = jnp.matmul(basis, message, precision=EXACT)
        others = message - jnp.matmul(parts, basis, precision=EXACT)  # DP holds for any messages
        return jnp.where(jnp.any(mine), norm * basis[jnp.argmax(mine)], others)

    def note(notes, release, round_):
        seen = attack.observe(release, notes.directions)
        observed = jax.tree.map(lambda tape, one: tape.at[round_].set(one), notes.observed, seen)
        return notes._replace(observed=observed)

    algorithm = watched(simulation.algorithm, begin, send, note)
    audited = dataclasses.replace(simulation, algorithm=algorithm)
    if len(ids) * runs < FEWEST:
        raise ValueError(
            f"canaries times runs must be at least {FEWEST}, got {len(ids)} times {runs}"
        )

    arrays = hparams.as_arrays()
    rate = float(audited.sampler.rate(arrays))
    m, root = audited.num_clients, jax.random.key(seed, impl="threefry2x32")

    def one_run(simulation, run):
        """Return the last state of a run, and the coins of its canaries."""
        coins = np.random.default_rng((seed, 1, run)).random(len(ids)) < 0.5
        state = simulation.init(jax.random.fold_in(root, run), hparams)
        notes = state.shared.notes._replace(sent=jnp.asarray(coins))
        state = dataclasses.replace(state, shared=state.shared._replace(notes=notes))
        return simulation.run(state, hparams, rounds)[0], coins

    @jax.jit
    def cohorts(state):
        """Return who took part, (T, m) bool: rounds are drawn from the key of a run alone."""

        def one(round_):
            drawn = audited.program.draw(dataclasses.replace(state, round=round_), arrays).cohort
            return jnp.zeros(m, bool).at[drawn.ids].set(drawn.mask, mode="drop")

        return jax.lax.map(one, jnp.arange(rounds, dtype=jnp.int32))

    evidences, sends, first = [], [], None
    for run in range(runs):
        state, coins = one_run(audited, run)
        observed = jax.tree.map(lambda a: np.asarray(a, np.float64), state.shared.notes.observed)
        took_part = np.asarray(cohorts(state)).T
        evidences.append(Evidence(observed, took_part, ids, directions, hparams, rate, m))
        sends.append(coins)
        first = jax.tree.map(np.asarray, state.shared) if run == 0 else first
        if on_run is not None:
            on_run(run + 1, runs)
    score = np.concatenate([np.asarray(attack.score(each)) for each in evidences])
    sent = np.concatenate(sends)
    other = audited.with_population(with_other_rows(audited.population, ids.tolist(), seed))
    again, _ = one_run(other, 0)
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again.shared), strict=True)
    cross_talk = any(one.tobytes() != np.asarray(two).tobytes() for one, two in pairs)

    noise, share = (), confidence
    z, event = noise_of(hparams, rounds), audited.mechanism.event
    adapts = jax.tree.leaves(jax.eval_shape(audited.mechanism.init, arrays))
    # The noise has a known deviation, z C with C constant.
    if attack.signal and event.kind == "gaussian" and not adapts and np.all(z > 0):
        share = (1 + confidence) / 2
        signal = np.stack([attack.signal(each) for each in evidences])
        present = np.stack([
            each.took_part[ids].T & coins for each, coins in zip(evidences, sends, strict=True)
        ])  # fmt: skip
        noise = noise_tests(signal, present, z, share)

    def by_simulation(delta):
        return audited.guarantee(again, delta).find("zero_out").epsilon

    reported = by_simulation if reported is None else reported
    deltas = sorted({delta, *(value for value in DELTAS if value > delta)})
    epsilons = lower_bounds(score[sent], score[~sent], deltas, share, seed)
    perfect = lower_bounds(np.ones(sent.sum()), np.zeros((~sent).sum()), deltas, share, seed)
    bounds = tuple(
        Bound(d, e, reported(d), most) for d, e, most in zip(deltas, epsilons, perfect, strict=True)
    )
    return AuditResult(
        bounds, confidence, len(ids), runs, rounds, int(sent.sum()), noise, cross_talk
    )


def lower_bounds(
    sent: np.ndarray, kept: np.ndarray, deltas: Sequence[float], confidence: float, seed: int
) -> list[float]:
    """Compute lower bounds on ε, one per δ (increasing), valid together at the confidence.

    The scores of canaries that `sent` (a,) or `kept` their message (b,) must be independent. `seed`
    splits them into canaries that choose a threshold and canaries that test it.
    """
    # All thresholds on all canaries, corrected for their number on the convex hull of the error
    # rates, would be stronger, but that number depends on the scores.
    auditor = CanaryScoreAuditor(sent, kept)
    significance = (1 - confidence) / len(deltas)
    bounds = [
        auditor.epsilon_clopper_pearson(
            significance, delta, one_sided=False, threshold_strategy=Split(seed=seed)
        )
        for delta in deltas
    ]
    # ε(δ) does not increase, so a bound at one δ holds at every smaller one.
    return np.maximum.accumulate(bounds[::-1])[::-1].tolist()


def _chosen(
    canaries: int | Sequence[int] | None, num_clients: int, size: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the canaries' clients, (n,) int32."""
    most = min(num_clients, size)
    if canaries is None:
        canaries = max(1, most // 2)
    number = canaries if isinstance(canaries, int) else len(canaries)
    if not 1 <= number <= most:
        raise ValueError(
            f"canaries must lie in [1, {most}], at most the number of clients and of parameters "
            f"in a message, got {number}"
        )
    if isinstance(canaries, int):
        return np.sort(rng.choice(num_clients, canaries, replace=False)).astype(np.int32)
    ids = np.asarray(canaries, np.int32)
    if len(np.unique(ids)) < number or ids.min() < 0 or ids.max() >= num_clients:
        raise ValueError(
            f"canaries must be distinct client ids in [0, {num_clients}), got {list(canaries)}"
        )
    return ids
