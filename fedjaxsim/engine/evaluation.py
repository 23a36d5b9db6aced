"""Evaluation: per-client metrics of the models that the clients predict with.

Metrics are averages over private data, for the researcher, and have no guarantee. They never reach
the training state. What is released is a mean over clients, with noise, and charged as a round of
full participation: a time to stop, or a choice among runs, that reads it alone is covered by ε.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks, keys
from fedjaxsim.checks import Name, SettingError, described
from fedjaxsim.data.minibatches import ClientData
from fedjaxsim.data.population import Population
from fedjaxsim.engine.processes import to_host
from fedjaxsim.engine.program import ClientMetrics
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.keys import Stream
from fedjaxsim.metrics import (
    METRICS,
    SAMPLED,
    MetricRecords,
    find_metric,
    require_direction,
)
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.in_loop import allows
from fedjaxsim.privacy.entries import Entry, SamplingScheme, check_noise_multiplier
from fedjaxsim.privacy.events import Gaussian, PrivacySpend
from fedjaxsim.privacy.mechanisms import release_once
from fedjaxsim.privacy.messages import wide_type
from fedjaxsim.tasks.in_source import TaskInSource
from fedjaxsim.tasks.task import Task

PyTree = Any
PERCENTILES = (10, 50, 90)
SAMPLE = 1000
"""Clients whom evaluations before the last one sample by default."""


class Pool(NamedTuple):
    """Statistics of clients, (m, k, ...) or, of S runs, (m, S, k, ...); see `StreamingMetric`."""

    statistics: np.ndarray
    pool: Callable[[np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Per-client metrics on one split, and their summaries.

    With S runs, values are (m, S) and every summary is (S,). Summaries leave out clients without
    rows and those for whom a streaming metric is undefined. They are NaN if no client is left or
    one has failed: its model predicts NaN, which is no prediction and has no value.

    Attributes:
      split: "train", "validation" or "test".
      count: (m,) int, each client's number of rows in the split, or of tokens: see `targets_of`.
      values: a dict of (m,) float64: means over rows or tokens, and streaming metrics; NaN for a
        client without rows.
      streaming: the names of metrics that may be NaN for clients with rows, too: streaming ones,
        and "nmse" if all targets are one number.
      records: the record of each metric, decided once by `resolve_metrics`.
      clients: the sorted ids of a sample of k clients, who alone were evaluated: `count` and
        `values` are then (k,); None for all clients.
      pools: a dict of clients' statistics, from which a metric of all their rows is made.

    Example:
      >>> evaluation = history[-1].evaluation  # `history` as in `Simulation`
      >>> evaluation.values["loss"].shape  # of two clients
      (2,)
    """

    split: str
    count: np.ndarray
    values: Mapping[str, np.ndarray]
    streaming: Collection[str] = ()
    records: MetricRecords = dataclasses.field(default_factory=lambda: METRICS)
    clients: np.ndarray | None = None
    pools: Mapping[str, Pool] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def failed(self) -> np.ndarray:
        """Clients with rows and NaN in a metric that is a sum over rows, (m,) or (m, S) bool."""
        shape = next(iter(self.values.values()), self.count).shape
        sums = [np.isnan(v) for name, v in self.values.items() if name not in self.streaming]
        return (np.any([np.zeros(shape, bool), *sums], axis=0).T & (self.count > 0)).T

    def mean(self, name: str) -> Any:
        """Return the unweighted mean over clients."""
        return self._over_clients(name, lambda values, _: np.mean(values, axis=0))

    def weighted_mean(self, name: str) -> Any:
        """Return the mean over clients weighted by their counts of rows or tokens.

        For a mean over rows this is the mean over examples, for nMSE the pooled nMSE.
        """
        return self._over_clients(name, lambda v, rows: np.average(v, weights=rows, axis=0))

    def pooled(self, name: str) -> Any:
        """Return a metric of the rows of all clients together; NaN if a client has failed.

        Without statistics it is the mean weighted by rows.
        """
        if name not in self.pools:
            return self.weighted_mean(name)
        statistics, pool = self.pools[name]
        statistics, values = np.asarray(statistics)[self.count > 0], self.values[name]
        of_runs = [statistics] if values.ndim == 1 else [*np.moveaxis(statistics, 1, 0)]
        values_of_runs = [float(pool(of_run)) if len(of_run) else np.nan for of_run in of_runs]
        pooled = np.where(np.any(self.failed, axis=0), np.nan, np.array(values_of_runs))
        return pooled[0] if values.ndim == 1 else pooled

    def worst_tenth(self, name: str) -> Any:
        """Return the mean over the worst ⌈k/10⌉ of k clients; ValueError without a direction."""
        sign = 1 if require_direction(name, self.records) else -1

        def worst(values, _):
            size = -(-len(values) // 10)
            mean = sign * np.mean(np.partition(sign * values, size - 1, axis=0)[:size], axis=0)
            return np.where(np.isnan(values).any(axis=0), np.nan, mean)[()]

        return self._over_clients(name, worst)

    def by_group(self, groups: Any) -> dict[str, "Evaluation"]:
        """Return the evaluation of each group of clients, by the group's name in sorted order.

        Args:
          groups: the group of each evaluated client, (k,): names or numbers.

        Raises:
          ValueError: if there is not one group for each client.
        """
        names = np.asarray(groups)
        if names.shape != self.count.shape[:1]:
            raise ValueError(
                f"groups must have one entry for each of the {len(self.count)} clients, got shape "
                f"{names.shape}"
            )
        ids = np.arange(len(self.count)) if self.clients is None else self.clients
        by_name = {}
        for name in np.unique(names):
            inside = names == name
            values = {metric: column[inside] for metric, column in self.values.items()}
            pools = {n: Pool(p.statistics[inside], p.pool) for n, p in self.pools.items()}
            by_name[str(name)] = dataclasses.replace(
                self, count=self.count[inside], values=values, clients=ids[inside], pools=pools
            )
        return by_name

    def summary(self) -> dict[str, Any]:
        """Return all metrics as flat numbers, such as `test_accuracy_p10`.

        A name is the split, the metric and an ending. Each is over the clients that have rows in
        the split and a value of the metric:

        * no ending: the mean, each client counting once. Pooled metrics, such as `nmse`, take all
          rows together: total squared error over the variance of all targets.
        * `_weighted`: the mean, clients counting by their rows.
        * `_unweighted`: of a pooled metric, the mean with each client counting once.
        * `_p10`, `_p50`, `_p90`, `_std`: percentiles, and the standard deviation of a population.
        * `_worst_tenth`: the mean over the worst ⌈k/10⌉ of k clients.
        * `_undefined`: the number of clients without a value, which are left out; a client with one
          class has no `auc`.

        `test_failed` counts the clients whose model predicts NaN, which makes means and percentiles
        NaN. `sampled_clients` is the size of the sample, if it is one.
        """
        result: dict[str, Any] = {}
        for name, values in self.values.items():
            key = f"{self.split}_{name}"
            record = find_metric(name, self.records)
            mean = self.mean(name)
            if record.pooled:
                result |= {key: self.pooled(name), f"{key}_unweighted": mean}
            else:
                result |= {key: mean, f"{key}_weighted": self.weighted_mean(name)}
            percentiles = self._over_clients(
                name, lambda v, _: np.percentile(v, PERCENTILES, axis=0)
            )
            percentiles = np.broadcast_to(percentiles, (len(PERCENTILES), *values.shape[1:]))
            result |= {f"{key}_p{q}": percentiles[place] for place, q in enumerate(PERCENTILES)}
            result[f"{key}_std"] = self._over_clients(name, lambda v, _: np.std(v, axis=0))
            if record.larger_is_better is not None:
                result[f"{key}_worst_tenth"] = self.worst_tenth(name)
            if name in self.streaming:
                without = np.isnan(values) & ~self.failed
                result[f"{key}_undefined"] = np.sum(without[self.count > 0], axis=0)
        if np.any(self.failed):
            result[f"{self.split}_failed"] = np.sum(self.failed, axis=0)
        if self.clients is not None:
            result[SAMPLED] = len(self.clients)
        return result

    def __repr__(self) -> str:
        """Show clients and split, and a line for each metric."""

        def short(value):
            extremes = (value,) if np.ndim(value) == 0 else (np.min(value), np.max(value))
            return " to ".join(f"{end:.4g}" for end in extremes)

        shape = next(iter(self.values.values()), self.count).shape[1:]
        of_runs = f", {shape[0]} runs" if shape else ""
        clients = "clients" if self.clients is None else "sampled clients"
        clients = f"{int(np.sum(self.count > 0)):,} of {len(self.count):,} {clients}"
        failed = int(np.sum(np.any(self.failed.reshape(len(self.count), -1), axis=1)))
        of_failed = f", {failed:,} failed" if failed else ""
        lines = [f"Evaluation on {self.split} rows of {clients}{of_runs}{of_failed}"]
        summary = self.summary()
        for name in self.values:
            suffixes = ("", "_p10", "_p90")
            mean, low, high = (short(summary[f"{self.split}_{name}{end}"]) for end in suffixes)
            lines.append(f"  {name}: {mean}, p10 {low}, p90 {high}")
        return "\n".join(lines)

    def _over_clients(self, name: str, summary: Callable[[np.ndarray, np.ndarray], Any]) -> Any:
        """Summarize the values (k, ...) and rows (k,) of the clients that have a value."""
        values, has = self.values[name], self.count > 0
        if name in self.streaming:
            has = (has & (~np.isnan(values) | self.failed).T).T
        if has.ndim > 1 and np.any(has != has[:, :1]):
            of_runs = [self._over(*column, summary) for column in zip(values.T, has.T, strict=True)]
            return np.stack(np.broadcast_arrays(*of_runs), axis=-1)
        return self._over(values, has[:, 0] if has.ndim > 1 else has, summary)

    def _over(self, values: np.ndarray, has: np.ndarray, summary: Callable[..., Any]) -> Any:
        if not np.any(has):
            return np.full(values.shape[1:], np.nan)[()]
        # Interpolation between infinities gives NaN, here without a warning.
        with np.errstate(invalid="ignore"):
            return summary(values[has], self.count[has])


def summary_of(
    population: Population, split: str, reported: TaskInSource, metrics: Collection[str]
) -> Callable[[ClientMetrics, np.ndarray | None], Evaluation]:
    """Return the function that makes an evaluation of metrics of all clients or of a sample (k,).

    They are numpy arrays (m,) or (m, S). "squared_error" divided by the variance of all targets "y"
    is also reported as "nmse", as in the experiments of MP-MTL; of several targets it is the mean
    of each one's, whatever their units. Warns if the split has no rows.
    """
    task, y = reported.task, population.fields.get("y")
    count = targets_of(population, split, task)
    if not np.any(count):
        warnings.warn(
            f"no client has {split} rows, so {split} metrics are nan: set some aside by "
            f"fjs.data.split(population, {split}=0.2)",
            stacklevel=2,
        )
    records = reported.metric_records(metrics)
    variances = None
    if y is not None and "squared_error" in metrics and np.any(count > 0):
        targets = y[population.splits[split].all_rows()]
        variances = reported.variances(targets)
        if not np.all(variances):
            constant = np.atleast_1d(targets[0])[variances == 0]
            values = ", ".join(f"{value:g}" for value in constant)
            warnings.warn(
                f"nmse is undefined: the targets of all {len(targets)} {split} rows are {values}",
                stacklevel=2,
            )

    def summarize(measured, clients):
        chosen = count if clients is None else count[clients]
        rows = np.where(chosen > 0, chosen, np.nan)

        def over(divisor, totals):
            return {name: (np.asarray(v, np.float64).T / divisor).T for name, v in totals.items()}

        values, streaming = over(rows, measured.sums), over(rows / rows, measured.values)
        names, per_client = [*streaming], reported.in_units(values | streaming, records)
        if "squared_error" in per_client and variances is not None:
            # Without variance it is undefined, which is no failure of a client.
            names += [] if np.all(variances) else ["nmse"]
            parts = records["squared_error"].mean_of
            by_error = {part: variances[records[part].target] for part in parts}
            by_error = by_error or {"squared_error": np.mean(variances)}
            ratios = [per_client[name] / (value or np.nan) for name, value in by_error.items()]
            per_client["nmse"] = np.mean(ratios, axis=0)
        pools = {
            name: Pool(statistics, functools.partial(_scaled, pool, reported.factor(records[name])))
            for name, statistics in measured.statistics.items()
            if (pool := task.streaming_metrics[name].pool) is not None
        }
        return Evaluation(split, chosen, per_client, tuple(names), records, clients, pools)

    return summarize


def _scaled(pool: Callable[[np.ndarray], Any], factor: float, statistics: np.ndarray) -> Any:
    """Return a pooled metric in the units of the target's source."""
    return factor * pool(statistics)


def targets_of(population: Population, split: str, task: Task) -> np.ndarray:
    """Return each client's number of targets, (m,): rows, or tokens if the task counts these."""
    ranges = population.splits[split]
    if task.targets is None:
        return ranges.count
    count_one = task.targets

    def of_row(row):
        return count_one(jax.tree.map(lambda leaf: leaf[None], row))[0]

    with jax.ensure_compile_time_eval():  # also while a run is being traced
        # Each row by itself, or a client's number would follow from the rows of all.
        of_rows = np.asarray(jax.jit(jax.vmap(of_row))(dict(population.fields)))
    before = np.concatenate([[0], np.cumsum(of_rows, dtype=np.int64)])
    return before[ranges.start + ranges.count] - before[ranges.start]


def sample_of(key: jax.Array, num_clients: int, size: int | None) -> np.ndarray | None:
    """Draw a run's evaluated clients, (size,) int32 sorted ids; None for all.

    They follow from the run's key, so they are the same in every placement.
    """
    if size is None or size >= num_clients:
        return None
    seed = np.asarray(to_host(jax.random.key_data(keys.stream(key, Stream.EVALUATED))))
    chosen = np.random.default_rng(seed).choice(num_clients, size, replace=False)
    return np.sort(chosen).astype(np.int32)


def measure_with(task: Task) -> Callable[[PyTree, ClientData], ClientMetrics]:
    """Return the `measure` of a `Program`: the task's metrics in one pass over a client's rows."""
    streaming = task.streaming_metrics

    def measure(params, data):
        def add(carry, batch):
            sums, carries = carry
            # Streaming metrics call the model again on the batch; the compiler merges the calls.
            values = task.metrics(params, batch)
            return (
                {n: sums[n] + batch.sum(values[n].astype(sums[n].dtype)) for n in sums},
                {name: streaming[name].add(carries[name], params, batch) for name in carries},
            )

        shapes = jax.eval_shape(task.metrics, params, data.batch_shapes())
        sums = {name: jnp.zeros((), wide_type(leaf)) for name, leaf in shapes.items()}
        carries = {name: metric.start(data.most_rows) for name, metric in streaming.items()}
        sums, carries = data.full_pass(add, (sums, carries))
        values = {name: streaming[name].value(carries[name]) for name in carries}
        makers = {
            name: metric.statistics for name, metric in streaming.items() if metric.statistics
        }
        return ClientMetrics(sums, values, {n: make(carries[n]) for n, make in makers.items()})

    return measure


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """The evaluations that a run releases.

    Attributes:
      noise_multiplier: z > 0, the noise on a sum over clients divided by the largest norm of one
        client's contribution.
      metric: name of a client metric, computed of that client's rows alone.
      largest: the public bound of the metric; client metrics are clipped to [0, `largest`].

    Example:
      >>> plan = fjs.EvaluationPlan(2.0, metric="accuracy")
      >>> fjs.privacy.tight_epsilon([plan.spend(100, evaluations=4)], 1e-5) > 0
      True
    """

    noise_multiplier: float
    metric: str
    largest: float = 1.0

    def __post_init__(self):
        check_noise_multiplier(self.noise_multiplier)
        checks.positive(largest=self.largest)

    def spend(self, num_clients: int, evaluations: int = 1) -> PrivacySpend:
        """Return the charges of some evaluations.

        What one client sends is in [0, 1], so replacing it moves the sum by at most 1.
        """
        scheme = SamplingScheme("full", num_clients, num_clients)
        entry = Entry(float(np.float32(self.noise_multiplier)), 1.0, evaluations)
        return PrivacySpend(scheme, Gaussian(replace=1.0), (entry,))


class PrivateMetric(NamedTuple):
    """A metric's released mean over all m clients; those without a value count as the worst."""

    name: str
    mean: float
    larger_is_better: bool = True


@functools.cache
def _released(plan: EvaluationPlan, better: bool):
    """Return `(values, key) -> mean share of the largest value` of a plan, compiled."""

    def release(values, key):
        # A client without a finite value sends nothing, which counts as the worst value: a model
        # that diverged must not look good.
        has = jnp.isfinite(values)
        share = jnp.clip(jnp.where(has, values, 0.0) / plan.largest, 0.0, 1.0)
        share, z = share if better else 1.0 - share, plan.noise_multiplier
        return release_once(share, has, key, clip=1.0, noise_multiplier=z)

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


def release_evaluation(
    state: SimulationState, evaluation: Evaluation, plan: EvaluationPlan
) -> tuple[SimulationState, PrivateMetric | None]:
    """Release an evaluation of one run's models; return the charged state, and the release.

    If the budget of the state does not allow it, the state stays as it is, and None is released.
    Noise is a stream of the evaluation's number in the ledger and its round: a run that is killed
    and goes on to another round draws other noise there.
    """
    checks.one_of(evaluation.values, metric=plan.metric)
    values = evaluation.values[plan.metric]
    better = require_direction(plan.metric, evaluation.records)
    (m,) = values.shape
    privacy, spend, key = state.privacy, plan.spend(m), _key_of(state)
    place = ledger.stream_of(privacy, key)
    assert place is not None, "`prepare_release` makes the record"
    number = int(privacy.draws[place].next_round)
    privacy = _charged(privacy, key, number, place, spend)
    if privacy.limit is not None and not allows(privacy):
        return state, None
    noise = noise_key(state, number)
    share = float(_released(plan, better)(jnp.asarray(values, float), noise))
    released = PrivateMetric(plan.metric, plan.largest * (share if better else 1 - share), better)
    return dataclasses.replace(state, privacy=privacy), released


def check_released(plan: EvaluationPlan, records: MetricRecords) -> None:
    """Check that a plan's metric has a direction and describes one client."""
    require_direction(plan.metric, records)
    if plan.metric == "nmse":
        raise ValueError(
            "the metric must be of one client alone, but nmse divides by the variance of all "
            "clients' targets: release squared_error"
        )


def prepare_release(
    state: SimulationState,
    plan: EvaluationPlan,
    num_clients: int,
    records: MetricRecords = MappingProxyType({}),
) -> SimulationState:
    """Return the state with an account and a record of draws for its evaluations."""
    if type(plan) is not EvaluationPlan:  # a subclass could charge another noise than it draws
        raise SettingError(
            Name("evaluate_privately"), f" must be an EvaluationPlan, got {described(plan)}"
        )
    check_released(plan, records)
    return state.announce([plan.spend(num_clients)], stream=_key_of(state))


def _key_of(state: SimulationState) -> jax.Array:
    """Return the key of a state's released evaluations."""
    return keys.stream(state.key, Stream.RELEASED)


def noise_key(state: SimulationState, number: jax.typing.ArrayLike) -> jax.Array:
    """Return the key of the noise of a released evaluation; a ledger has its `number`."""
    return keys.stream(_key_of(state), Stream.ROUND_NOISE, number, state.round)
