"""Evaluations that are released: a mean and a histogram over clients, with noise, and charged.

Each client sends its own metric, clipped, through the Gaussian mechanism with full participation.
So a time to stop, or a choice among runs, that reads these releases alone is covered by ε.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks, keys
from fedjaxsim.engine.checks import described
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.metrics import Metric, larger_is_better, metric
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.in_loop import allows
from fedjaxsim.privacy.entries import Entry, SamplingScheme, check_noise_multiplier
from fedjaxsim.privacy.events import Gaussian, PrivacySpend
from fedjaxsim.privacy.mechanisms import gaussian, release_once

_PLACES = 1


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """The evaluations that a run releases.

    Attributes:
      noise_multiplier: z > 0, the noise on a sum over clients divided by the norm that one client's
        contribution can have.
      metric: name of a client metric, computed of that client's rows alone.
      largest: the public bound of the metric; client metrics are clipped to [0, `largest`].
      bins: number of bins of the histogram; 0 for none.
    """

    noise_multiplier: float
    metric: str
    largest: float = 1.0
    bins: int = 0

    def __post_init__(self):
        check_noise_multiplier(self.noise_multiplier)
        if metric(self.metric).pooled:
            raise ValueError(
                f"the metric must be of one client alone, but {self.metric} divides by the "
                "variance of all clients' targets: release squared_error"
            )
        checks.positive(largest=self.largest)
        checks.count(0, bins=self.bins)

    @property
    def norm(self) -> float:
        """The largest norm of what a client sends: its share of `largest`, and a bin."""
        return 2.0**0.5 if self.bins else 1.0

    def spend(self, num_clients: int, evaluations: int = 1) -> PrivacySpend:
        """Return the charges of some evaluations.

        What one client sends is in [0, 1] and one of the bins, so replacing it moves the sum by at
        most 1 and √2: together √3, which is √1.5 times the norm.
        """
        scheme = SamplingScheme("full", num_clients, num_clients)
        event = Gaussian(replace=1.5**0.5 if self.bins else 1.0)
        entry = Entry(float(np.float32(self.noise_multiplier)), 1.0, evaluations)
        return PrivacySpend(scheme, event, (entry,))


class PrivateMetric(NamedTuple):
    """A released evaluation.

    Attributes:
      name: of the metric.
      mean: the mean over all m clients, with noise; clients without a value count as the worst.
      histogram: (bins,) fractions of the m clients, with noise; None without bins.
      larger_is_better: direction of the metric.
    """

    name: str
    mean: float
    histogram: np.ndarray | None = None
    larger_is_better: bool = True


@functools.cache
def _released(plan: EvaluationPlan, better: bool):
    """Return `(values, key) -> sums / m` of a plan, compiled."""
    noise = {"clip_norm": plan.norm, "noise_multiplier": plan.noise_multiplier}

    def release(values, key):
        # A client without a finite value sends nothing, which counts as the worst value: a model
        # that diverged must not look good.
        has = jnp.isfinite(values)
        share = jnp.clip(jnp.where(has, values, 0.0) / plan.largest, 0.0, 1.0)
        share = share if better else 1.0 - share
        # Bin index; the last bin includes its upper edge.
        place = jnp.minimum(jnp.clip(values / plan.largest, 0, 1) * plan.bins, plan.bins - 1)
        bins = jax.nn.one_hot(place.astype(jnp.int32), plan.bins)
        sent = {"mean": share, "histogram": jnp.where(has[:, None], bins, 0.0)}
        return release_once(gaussian(), sent, has, key, **noise)

    return jax.jit(release)


@functools.partial(jax.jit, static_argnames=("place", "spend"))
def _charged(
    privacy: ledger.Ledger, key: jax.Array, number: jax.Array, place: int, spend: PrivacySpend
) -> ledger.Ledger:
    """Enter an evaluation; compiled, as some seventy operations would be one by one."""
    z = spend.entries[0].noise_multiplier
    return ledger.update(
        ledger.drew(privacy, key, number, place),
        spend.scheme,
        spend.event,
        lambda charges: ledger.charge(charges, z, 1.0, number),
    )


def evaluate(
    state: SimulationState, evaluation: Evaluation, plan: EvaluationPlan
) -> tuple[SimulationState, PrivateMetric | None]:
    """Release an evaluation, and charge the state for it.

    Noise comes from a key of its own, derived from the run's, the evaluation's number in the ledger
    and its round: a run that is killed and goes on to another round draws other noise there.

    Args:
      state: of one run.
      evaluation: of its models.
      plan: the metric and the noise.

    Returns:
      The charged state, and the release; the state as it was and None where the budget of the state
      does not allow the release.
    """
    checks.one_of(evaluation.values, metric=plan.metric)
    values, better = evaluation.values[plan.metric], evaluation.direction(plan.metric)
    (m,) = values.shape
    privacy, spend, key = state.privacy, plan.spend(m), key_of(state)
    place = ledger.stream_of(privacy, key)
    assert place is not None, "`prepared` makes the record"
    number = int(privacy.draws[place].next_round)
    privacy = _charged(privacy, key, number, place, spend)
    if privacy.limit is not None and not allows(privacy.limit, privacy):
        return state, None
    own = jax.random.fold_in(jax.random.fold_in(key, number), state.round)
    found = _released(plan, better)(jnp.asarray(values, float), own)
    histogram = np.asarray(found["histogram"], np.float64) if plan.bins else None
    share = float(found["mean"])
    mean = plan.largest * (share if better else 1 - share)
    released = PrivateMetric(plan.metric, mean, histogram, better)
    return dataclasses.replace(state, privacy=privacy), released


def prepared(
    state: SimulationState,
    plan: EvaluationPlan,
    num_clients: int,
    records: Mapping[str, Metric] = MappingProxyType({}),
) -> SimulationState:
    """Return the state with an account and a record of draws for its evaluations."""
    if not isinstance(plan, EvaluationPlan):
        raise ValueError(f"evaluate_privately must be an EvaluationPlan, got {described(plan)}")
    larger_is_better(plan.metric, records)
    spend = plan.spend(num_clients)
    noise = np.array(plan.noise_multiplier, np.float32)
    privacy = ledger.with_account(state.privacy, spend.scheme, spend.event, _PLACES)
    privacy = ledger.with_room(privacy, spend.scheme, spend.event, noise, 1.0)
    return dataclasses.replace(state, privacy=ledger.with_stream(privacy, key_of(state)))


def key_of(state: SimulationState) -> jax.Array:
    """Return the key of a state's evaluations, distinct from every key of its rounds."""
    return jax.random.fold_in(state.key, keys.EVALUATION)
