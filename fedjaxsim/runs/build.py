"""Check a run, and build it from its settings: a simulation that is ready to start."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjaxsim import __version__
from fedjaxsim.audit.canaries import with_canaries
from fedjaxsim.clock import Axis
from fedjaxsim.data.arrays import SPLITS
from fedjaxsim.data.population import Population
from fedjaxsim.data.readers import DataSpec
from fedjaxsim.data.variance_components import variance_ratios
from fedjaxsim.divergence import Record
from fedjaxsim.engine.checkpoint import has_x64
from fedjaxsim.engine.evaluation import EvaluationPlan, check_released
from fedjaxsim.engine.part_checks import require_key
from fedjaxsim.engine.processes import is_first
from fedjaxsim.engine.program import ClientMetrics, run_key
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.factories import is_user_code
from fedjaxsim.hyperparameters import Default, Hyperparameters
from fedjaxsim.kernels import backend
from fedjaxsim.metrics import MetricRecords, metrics_to_tables, require_direction
from fedjaxsim.own_code import own_modules
from fedjaxsim.privacy import filter as filters
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.privacy.entries import Drawn, epsilon_text
from fedjaxsim.privacy.events import PrivacyLimit, PrivacySpend
from fedjaxsim.privacy.guarantee import tight_epsilon
from fedjaxsim.privacy.ledger import charged, hex_digest, key_digest
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.privacy.schedule import equally_costly
from fedjaxsim.report.labels import short_name
from fedjaxsim.report.progress import bytes_text, doing
from fedjaxsim.runs.assemble import check_data, parts_of, population_of, simulation_of
from fedjaxsim.runs.directory import settings_digest
from fedjaxsim.runs.memory import host_bytes
from fedjaxsim.runs.settings import RunConfig, flag
from fedjaxsim.simulation import Simulation
from fedjaxsim.testing import NothingTestedError, check_billboard

_PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "scipy")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run that has been checked and is ready to start.

    Attributes:
      config: the settings as asked for.
      hparams: hyperparameters, with z resolved.
      delta: δ of the guarantee.
    """

    config: RunConfig
    simulation: Simulation
    hparams: Hyperparameters
    delta: float
    load_seconds: float = 0.0

    @property
    def title(self) -> str:
        """The algorithm, the model and the data, for people."""
        config = self.config
        spec = DataSpec(config.data)
        algorithm, model = short_name(config.algorithm), short_name(config.model)
        return f"{algorithm} {model} on {Path(spec.path).name or spec.kind}"

    @property
    def public(self) -> tuple[str, ...]:
        """Sentences on choices that read private rows, and on what is taken as public."""
        sim = self.simulation
        return (*self.config.public, *sim.public, *sim.assumed_of(self.hparams))

    @property
    def noise_multiplier(self) -> float:
        """The z of every round; for a schedule, the constant z with the same Σ 1/z²."""
        return equally_costly(np.asarray(self.hparams.get("noise_multiplier", 0.0)))

    def per_round(self, axis: Axis) -> float:
        """Return how far a round goes along the axis of a figure."""
        sim, hparams = self.simulation, self.hparams
        return axis.per_round(lambda: sim.bytes_sent(hparams), lambda: sim.round_work(hparams))

    def init(self) -> SimulationState:
        """Return the state before the first round."""
        return self.with_budget(self.simulation.init(self.config.seed, self.hparams))

    def with_budget(self, state: SimulationState) -> SimulationState:
        """Return the state with the budget of the settings, which must leave room for a round."""
        asked, limit = self.config.get("budget_epsilon"), state.privacy.limit
        if asked is not None and (limit is None or limit[:2] != (asked, self.delta)):
            return self.simulation.with_budget(state, self.budget)
        first = self.planned(0, 1)
        if limit is not None and filters.exceeded(limit, [*charged(state.privacy), first]):
            raise ValueError(
                f"the budget of ε = {epsilon_text(limit.epsilon)}, δ = {limit.delta:.3g} has no "
                f"room for a round of this stage ({filters.described([first])}): it allows "
                f"{filters.described(limit.planned)}, earlier stages included"
            )
        return state

    @functools.cached_property
    def budget(self) -> PrivacyLimit:
        """The budget of the settings, which have one."""
        return self.simulation.budget(
            self.hparams,
            epsilon=self.config.budget_epsilon,
            delta=self.delta,
            evaluate_privately=self.evaluations,
            eval_every=self.config.eval_every,
        )

    @property
    def state_shapes(self) -> SimulationState:
        """The shapes of its state."""
        return self.simulation.state_shapes(self.hparams)

    def planned(self, begin: int = 0, end: int | None = None) -> PrivacySpend:
        """Return the charges of rounds `begin` to `end`; by default of all rounds."""
        end = self.config.rounds if end is None else end
        return self.simulation.planned(self.hparams, begin, end)

    @property
    def evaluations(self) -> EvaluationPlan | None:
        """The evaluations that the run releases: of the metric by which runs are judged."""
        noise = self.config.get("evaluate_privately")
        if noise is None:
            return None
        return self.evaluation_plan(noise, self.config.evaluation_largest)

    def evaluation_plan(self, noise_multiplier: float, largest: float) -> EvaluationPlan:
        """Return the plan to release the metric by which runs are judged."""
        plan = EvaluationPlan(noise_multiplier, self.judging, largest)
        check_released(plan, self.metrics)
        return plan

    @functools.cached_property
    def metrics(self) -> MetricRecords:
        """The records of the metrics of each client."""
        return self.simulation.reported.metric_records(self._measured.sums)

    @property
    def judging(self) -> str:
        """The name of the client metric by which runs are judged on validation rows."""
        measured = self._measured
        of_clients = {*measured.sums, *measured.values}
        first = next(name for name in self.metrics if name in of_clients)
        return self.config.judged_by(of_clients) or first

    @functools.cached_property
    def _measured(self) -> ClientMetrics:
        """The shapes of the metrics of one client."""
        return self.simulation.metric_shapes(self.hparams)

    def draws(self) -> tuple[Drawn, ...]:
        """Return the draws of all rounds of a run, unless it is a later stage."""
        if not self.simulation.mechanism.event.releases and self.simulation.examples is None:
            return ()
        return (draws_of(require_key(self.config.seed), self.config.rounds),)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of what a run keeps to its end: its settings, and its clients' rows."""
        # Files may move: what counts are the rows in them.
        settings = self.config.settings() | {"data": DataSpec(self.config.data).kind}
        rows = self.simulation.population.fingerprint
        return {"settings": settings_digest(settings), "data": rows}

    @property
    def code_fingerprint(self) -> str:
        """A hash of the users' modules, without what they import."""
        sim = self.simulation
        names = own_modules((sim.algorithm, sim.mechanism, sim.sampler))
        files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
        return settings_digest([Path(file).read_bytes().hex() for file in files if file])

    @property
    def origin(self) -> Record:
        """The settings and data that results follow from, as files keep them."""
        asked = self.config.settings()
        reading = {name: asked.get(name) for name in (*sorted(self.config.data_settings()), "loss")}
        return {
            **{f"{what}_fingerprint": digest for what, digest in self.fingerprints.items()},
            "code_fingerprint": self.code_fingerprint,
            "data_settings_fingerprint": settings_digest(reading),
            "x64": has_x64(),
        }

    def resolved(self) -> Record:
        """Return the settings as asked for, the values that followed, and versions."""
        minibatches, plan = self.simulation.minibatches, self.simulation.plan_for(self.hparams)
        z = np.asarray(self.hparams.get("noise_multiplier", 0.0))
        noise_range = {"noise_first": float(z[0]), "noise_last": float(z[-1])} if z.ndim else {}
        return {
            **self.config.settings(),
            "resolved": {
                "rounds": self.config.rounds,
                "clients": self.simulation.num_clients,
                "capacity": self.simulation.sampler.scheme.capacity,
                "noise_multiplier": self.noise_multiplier,
                **noise_range,
                "clip": float(np.asarray(self.hparams.get("clip", math.inf))),
                "delta": self.delta,
                "bytes_sent": self.simulation.bytes_sent(self.hparams),
                "work": self.simulation.round_work(self.hparams).record(),
                **{
                    record.name: np.asarray(self.hparams.get(name), np.float64).tolist()
                    for name, record in self.simulation.records.items()
                    if isinstance(record.default, Default)
                },
                "local_epochs": minibatches.epochs or 0,
                "local_steps": minibatches.steps or 0,
                "chunk_size": plan.chunk_size,
                "chunk_map": plan.chunk_map,
                "metrics": metrics_to_tables(self.metrics),
            },
            "versions": versions(),
        }


def draws_of(key: jax.Array, rounds: int) -> Drawn:
    """Return the draws of the first `rounds` rounds of a run with the key of its `init`."""
    return Drawn(hex_digest(key_digest(run_key(key))), rounds)


@functools.cache
def _installed() -> dict[str, str]:
    """Return the versions of packages, whose descriptions take longer to read than settings."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def versions() -> dict[str, str]:
    """Return the versions of the programs, and the device."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "fedjaxsim": __version__,  # also of a checkout that is not installed
        **_installed(),
        "device": f"{device.platform}: {device.device_kind}",
    }


def prepare(
    config: RunConfig,
    simulation: Simulation | None = None,
    *,
    population: Population | None = None,
    check_memory: bool = True,
) -> Experiment:
    """Check everything about a run before it computes anything.

    Args:
      config: the settings.
      simulation: simulation of an experiment whose settings differ in hyperparameters only (ε, z,
        C, λ, μ, learning rates), to share its data and compiled code; by default a new one.
      population: population of an experiment on the same data; by default it is loaded.
      check_memory: whether the memory of this machine must suffice for a new simulation.

    Raises:
      FileNotFoundError: if there are no data at the path in the settings.
      ValueError: naming the setting, its value and what is allowed.
    """
    is_new, begin, load_seconds = simulation is None, time.perf_counter(), 0.0
    if simulation is None:
        population = population_of(config) if population is None else population
        load_seconds = time.perf_counter() - begin
        check_data(config, population)
        simulation = simulation_of(config, population)
    for record in simulation.mechanism.hyperparameters:
        if record.name not in config.records:
            raise ValueError(
                f"mechanism {config.mechanism} reads {flag(record.name)}, which its factory "
                "does not declare: put @fedjaxsim.reads above the factory"
            )
    delta = _delta(config, simulation.num_clients)
    with _naming_user_parts(config):
        hparams = hparams_of(config, simulation)
    simulation.check(hparams)
    simulation.check_rounds(hparams, 0, config.rounds, config.eval_every)
    if config.audit_canaries is not None:
        simulation = with_canaries(simulation, hparams, config.audit_canaries)
    experiment = Experiment(config, simulation, hparams, delta, load_seconds)
    if is_new:
        _check_start(experiment)
    if is_new and check_memory:
        _check_memory(experiment)
    return experiment


def prepare_with_progress(config: RunConfig, *, quiet: bool, **options: Any) -> Experiment:
    """Check a run by `prepare`, and say so on stderr if that is slow."""
    quiet = quiet or not is_first()
    with doing(f"reading {config.data} and checking the run", quiet=quiet):
        return prepare(config, **options)


def _delta(config: RunConfig, num_clients: int) -> float:
    delta = config.get("delta")
    return default_delta(num_clients) if delta is None else delta


def hparams_of(config: RunConfig, simulation: Simulation) -> Hyperparameters:
    """Return the hyperparameters of a run, with those that follow from its settings and data."""
    records, scheme = simulation.records, simulation.sampler.scheme
    values = {name: config.get(name) for name in records if config.get(name) is not None}
    if "clip" in records and not (config.clips and "clip" in values):
        values["clip"] = simulation.clip_norm if config.clips else math.inf
    ratios = [name for name, record in records.items() if record.default is Default.RATIO]
    if ratios and not values.keys() & {*ratios}:
        estimated = _ratios(config, simulation)
        values |= {name: estimated[name] for name in ratios}
    hparams = simulation.hyperparameters(**values)
    p = float(np.asarray(hparams.get("sampling_rate", scheme.capacity / scheme.clients)))
    if p * scheme.clients * config.rounds < 1:
        raise ValueError(
            f"sampling-rate must be at least {1 / (scheme.clients * config.rounds):.2g}, so that "
            f"one of {scheme.clients} clients is expected in {config.rounds} rounds, got {p:g}"
        )

    def complete(hparams: Hyperparameters) -> Hyperparameters:
        z = float(np.max(hparams.get("noise_multiplier", 0.0)))
        if z > 0 and "count_noise" in hparams and config.get("count_noise") is None:
            # A twentieth of the expected cohort is usual; where that is small, it must exceed z/2.
            return hparams.replace(count_noise=max(p * scheme.clients / 20, z))
        return hparams

    if math.isfinite(config.target_epsilon):
        return simulation.calibrate(
            hparams,
            epsilon=config.target_epsilon,
            rounds=config.rounds,
            delta=_delta(config, scheme.clients),
            noise_schedule=config.noise_schedule,
            complete=complete,
        )
    if "noise_multiplier" in hparams:
        z = float(np.asarray(hparams.noise_multiplier))
        hparams = hparams.replace(noise_multiplier=config.noise_schedule.noise(z, config.rounds))
    return complete(hparams)


def _ratios(config: RunConfig, simulation: Simulation) -> dict[str, float]:
    """Estimate ratios of variances; 1 if the run promises what does not cover an estimate."""
    if config.loss != "squared":
        raise ValueError(f"lam and lam-intercept must be given with loss {config.loss}")
    noise = math.isfinite(config.target_epsilon) or (config.get("noise_multiplier") or 0) > 0
    noise |= is_user_code(config.parts["mechanism"].name)  # it may have noise of other settings
    if noise or simulation.examples is not None or config.get("evaluate_privately") is not None:
        return {"lam": 1.0, "lam_intercept": 1.0}
    return variance_ratios(simulation.population)


@contextlib.contextmanager
def _naming_user_parts(config: RunConfig) -> Iterator[None]:
    """Raise ValueError if a user's part reads a hyperparameter without declaring it."""
    try:
        yield
    except AttributeError as error:
        user_parts = [
            f"{part.role} {part.name}" for part in config.parts.values() if is_user_code(part.name)
        ]
        if not user_parts or not isinstance(error.obj, Hyperparameters):
            raise
        raise ValueError(
            f"{' or '.join(user_parts)}: {error} (fedjaxsim.reads declares them)"
        ) from error


def _check_start(experiment: Experiment) -> None:
    """Check that a run can start, and has an ε that can be computed."""
    config, simulation, hparams = experiment.config, experiment.simulation, experiment.hparams
    with _naming_user_parts(config):
        simulation.check_start(config.seed, hparams)
    _ = experiment.evaluations  # refuses bad numbers
    if config.patience is not None:
        require_direction(next(iter(experiment.metrics)), experiment.metrics)
    if config.get("budget_epsilon") is not None:
        _ = experiment.budget  # refuses one without a round
    if (
        simulation.mechanism.event.kind in ("gaussian", "correlated", "banded")
        and experiment.noise_multiplier > 0
    ):
        tight_epsilon([*simulation.prepared, experiment.planned()], experiment.delta)


def _check_memory(experiment: Experiment) -> None:
    """Check that rows, minibatches and states fit into the memory of this machine."""
    config, simulation = experiment.config, experiment.simulation
    fields = simulation.population.fields.values()
    row = sum(value.nbytes // len(value) for value in fields)
    host, device = host_bytes(), backend.memory()
    of_devices = host if device is None else device * jax.local_device_count()
    states = 2 * bytes_of(experiment.state_shapes), "two copies of all states"
    batches = simulation.program.plan.chunk_size * config.get("batch_size") * row, "minibatches"
    rows = 0 if device is None else sum(value.nbytes for value in fields), "rows"
    streamed = simulation.streamed
    on_devices = [batches] if streamed else [batches, states, rows]
    for parts, room in ((on_devices, of_devices), ([states], host if streamed else math.inf)):
        needed, (_, most) = sum(size for size, _ in parts), max(parts)
        if needed > room:
            raise ValueError(
                f"the run needs {bytes_text(needed)} of memory, mostly for {most}, and there are "
                f"{bytes_text(room)}: batch-size, chunk-size, clients or hidden must be smaller, "
                "or rows streamed (--streamed)"
            )


# --- the check of users' code ---------------------------------------------------------------------

_CLIENTS, _ROWS, _ROUNDS = 5, 6, 2
"""Clients and rounds of the check, and rows of each client in each split."""


def trusts_code(config: RunConfig) -> bool:
    """Return whether a run's parts are the package's, or the user's that need no check."""
    return config.get("trust_own_code", True)  # not a setting of parts of the package


def check_user_code(experiment: Experiment) -> None:
    """Check that a user's algorithm, model or loss keeps clients apart; see `check_billboard`.

    Its few rounds on few clients show no warnings: the run shows its warnings itself.
    """
    config = experiment.config
    if trusts_code(config):
        return
    parts = [config.parts.get(role) for role in ("algorithm", "model", "loss")]
    user_parts = [f"{part.role} {part.name}" for part in parts if part and is_user_code(part.name)]
    simulation, hparams = everyone_of(experiment, _few(experiment.simulation.population))

    def build(population: Population) -> Simulation:
        """Trace the code anew, which may look for the rows where it is called."""
        return everyone_of(experiment, population)[0]

    rounds = min(_ROUNDS, config.rounds)
    try:
        with warnings.catch_warnings(action="ignore"):
            check_billboard(simulation, hparams, rounds=rounds, build=build)
    except AssertionError as error:
        raise ValueError(
            f"{' or '.join(user_parts)} lets clients learn of each other: {error}"
        ) from error
    except NothingTestedError:  # the code does not read the data
        pass


def everyone_of(
    experiment: Experiment, population: Population
) -> tuple[Simulation, Hyperparameters]:
    """Return a simulation of these clients in memory, in each of whose rounds all take part."""
    original = experiment.simulation
    parts = parts_of(experiment.config, population, population.num_clients, original.task)
    simulation = dataclasses.replace(
        original,
        algorithm=parts.algorithm,
        population=population,
        sampling=full_participation(),
        mechanism=parts.mechanism,
        devices=None,
        streamed=False,
    )
    hparams = {name: experiment.hparams.get(name) for name in simulation.records}
    return simulation, Hyperparameters(**hparams)


def _few(population: Population) -> Population:
    """Return the first rows of the first clients."""
    counts = np.minimum(population.counts[:_CLIENTS], _ROWS)
    starts = np.stack([population.splits[name].start[:_CLIENTS] for name in SPLITS], axis=1)
    pieces = zip(starts.ravel(), counts.ravel(), strict=True)
    index = np.concatenate([np.arange(start, start + count) for start, count in pieces])
    return population.of_rows(index, counts, slice(_CLIENTS))
