"""One run, from its settings to its files: where the command line meets the engine."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Self

import jax
import numpy as np
import optax

from fedjaxsim import feasible, models, optimizers
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.fedprox import fedprox
from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.ppsgd import average, ppsgd, weighted
from fedjaxsim.config import RunConfig
from fedjaxsim.data.hold_out import hold_out
from fedjaxsim.data.load import load
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.transforms import drop_constant_columns, invert, unit_rows
from fedjaxsim.evaluation import Evaluation
from fedjaxsim.files import Record, strict
from fedjaxsim.hparams import LARGEST_NOISE, SMALLEST_NOISE, Hyperparameters, validate
from fedjaxsim.models import task as tasks
from fedjaxsim.models.known import known_regression
from fedjaxsim.models.task import Task
from fedjaxsim.privacy import calibration, ledger
from fedjaxsim.privacy.events import Event as PrivacyEvent
from fedjaxsim.privacy.events import Scheme
from fedjaxsim.privacy.guarantee import Report, default_delta
from fedjaxsim.privacy.mechanisms import closed, gaussian
from fedjaxsim.privacy.sampling import check_rate, everyone, poisson
from fedjaxsim.progress import RunProgress, number
from fedjaxsim.rundir import RunDirectory
from fedjaxsim.simulation import Segment, Simulation, SimulationState

_MOMENTUM = functools.partial(optax.sgd, momentum=0.9)
_LOCAL_OPTIMIZERS = {"sgd": optax.sgd, "momentum": _MOMENTUM, "adam": optax.adam}
_SERVER_OPTIMIZERS = _LOCAL_OPTIMIZERS | {"adagrad": optax.adagrad, "yogi": optax.yogi}
_TRANSFORMS = {
    "drop-constant": drop_constant_columns,
    "invert": invert,
    "unit-rows": unit_rows,
}
_ALGORITHMS = {"pmtl": pmtl, "fedavg": fedavg, "fedprox": fedprox}
_LOSSES = {"softmax": tasks.softmax, "one-vs-all": tasks.one_vs_all}
_DIVISOR = (
    "M = Σ min(b, n_k), the divisor of the weighted objective, is made of the clients' numbers of "
    "training rows n_k and taken as public."
)
_PACKAGES = ("fedjaxsim", "jax", "jaxlib", "optax", "flax", "dp-accounting", "numpy")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run that has been checked and is ready to start.

    Attributes:
      config: what was asked for.
      simulation: the engine, with its population.
      hparams: hyperparameters, with z resolved.
      delta: δ of the guarantee.
    """

    config: RunConfig
    simulation: Simulation
    hparams: Hyperparameters
    delta: float

    @property
    def title(self) -> str:
        """What is run, for people."""
        config = self.config
        kind, _, path = config.data.partition(":")
        return f"{config.algorithm} {config.model} on {Path(path).name or kind}"

    @property
    def noise_multiplier(self) -> float:
        """The z of every round."""
        return float(np.asarray(self.hparams.noise_multiplier))

    def resolved(self) -> Record:
        """The settings as asked for, what followed from them, and with what it was computed."""
        minibatches = self.simulation.minibatches
        return {
            **self.config.settings(),
            "resolved": {
                "clients": self.simulation.num_clients,
                "capacity": self.simulation.sampling.scheme.capacity,
                "noise_multiplier": self.noise_multiplier,
                "clip": float(np.asarray(self.hparams.clip_norm)),
                "delta": self.delta,
                "local_epochs": minibatches.epochs or 0,
                "local_steps": minibatches.steps or 0,
                "chunk_size": self.simulation.chunking.size,
                "chunk_map": self.simulation.chunking.map,
            },
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """With what is computed: programs and device."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "device": f"{device.platform}: {device.device_kind}",
    }


def prepare(config: RunConfig, simulation: Simulation | None = None) -> Experiment:
    """Checks everything about a run before it computes anything.

    Args:
      config: the settings.
      simulation: of an earlier experiment whose settings differ in hyperparameters only (ε, z, C,
        λ, μ, learning rates), to share its data and compiled code; by default a new one.

    Raises:
      FileNotFoundError: if there are no data where the configuration says.
      ValueError: naming the setting, its value and what is allowed.
    """
    config.validate()
    hparams = Hyperparameters(
        learning_rate=config.learning_rate,
        server_learning_rate=config.server_learning_rate,
        lam=config.lam,
        mu=config.mu,
        personalization=config.personalization,
        clip_norm=config.clip,
        noise_multiplier=config.noise_multiplier or 0.0,
        sampling_rate=config.sampling_rate,
    )
    validate(hparams)
    if not config.clips:
        hparams = hparams.replace(clip_norm=math.inf)
    if math.isfinite(config.target_epsilon) and not math.isfinite(config.clip):
        raise ValueError(f"clip must be finite where epsilon is, got {config.clip}")
    new = simulation is None
    if simulation is None:
        population = population_of(config)
        feasible.check_labels(config, population)
        simulation = simulation_of(config, population)
    delta = default_delta(simulation.num_clients) if config.delta is None else config.delta
    if config.algorithm == "local":
        hparams = hparams.replace(noise_multiplier=0.0, clip_norm=math.inf)
    elif math.isfinite(config.target_epsilon):
        z = _calibrated(
            config.target_epsilon,
            delta,
            config.rounds,
            config.sampling_rate,
            simulation.sampling.scheme,
            simulation.mechanism.event,
        )
        hparams = hparams.replace(noise_multiplier=z)
    simulation.check(hparams)
    if new:
        feasible.check_start(config, simulation, hparams, delta)
    return Experiment(config, simulation, hparams, delta)


@functools.cache
def _calibrated(
    epsilon: float, delta: float, rounds: int, rate: float, scheme: Scheme, charge: PrivacyEvent
) -> float:
    """The z that meets a target; the runs of a sweep ask for the same ones again and again."""
    z = calibration.noise_multiplier(
        epsilon, delta, rounds=rounds, sampling_rate=rate, scheme=scheme, event=charge
    )
    if not SMALLEST_NOISE <= z <= LARGEST_NOISE:
        raise ValueError(
            f"epsilon {epsilon} at delta {delta:.3g} asks for a noise multiplier of {z:.2g}, not "
            f"in [{SMALLEST_NOISE}, {LARGEST_NOISE}]: change epsilon, delta or rounds"
        )
    return z


def _minibatches(config: RunConfig) -> Minibatches:
    steps, epochs = config.local_steps, config.local_epochs
    if steps is None and epochs is None:
        # PP-SGD takes one minibatch a round; where examples are made afresh, there are no epochs.
        one = config.algorithm == "ppsgd" or config.data == "synthetic-stream"
        steps, epochs = (1, None) if one else (None, 1)
    return Minibatches(config.batch_size, steps=steps, epochs=epochs, passes=config.passes)


def simulation_of(
    config: RunConfig, population: Population, task: Task | None = None
) -> Simulation:
    """The simulation of a configuration, on a population.

    Args:
      config: the settings.
      population: the clients, whatever the settings say about data.
      task: that of another population, where its classes are to be told apart; by default its own.

    Raises:
      ValueError: as `prepare`.
    """
    minibatches = _minibatches(config)
    task = _task(config, population) if task is None else task
    clients, rate = population.num_clients, config.sampling_rate
    sampling = everyone(clients) if rate == 1 else poisson(clients, max_rate=rate)
    check_rate(sampling, rate)
    return Simulation(
        _algorithm(config, task, population),
        task,
        population,
        sampling,
        minibatches,
        closed() if config.algorithm == "local" else gaussian(),
        chunk_size=config.chunk_size,
        chunk_map=config.chunk_map,
        devices=jax.devices() if jax.device_count() > 1 else None,
    )


def population_of(config: RunConfig) -> Population:
    """The population that a run is on, without the clients that are held out.

    Raises:
      FileNotFoundError, ValueError: as `prepare`.
    """
    population = whole_population_of(config)
    if config.held_out_clients == 0:
        return population
    return hold_out(population, config.held_out_clients, config.seed)[0]


def whole_population_of(config: RunConfig) -> Population:
    """The population that a configuration names, with the clients that are held out of the run.

    Raises:
      FileNotFoundError, ValueError: as `prepare`.
    """
    population = load(
        config.data,
        partition=config.partition,
        num_clients=config.clients,
        alpha=config.alpha,
        classes=config.classes,
        offset_scale=config.offset_scale,
        seed=config.seed,
        validation=config.validation_fraction,
        test=config.test_fraction,
    )
    for step in config.preprocess:
        population = _TRANSFORMS[step](population)
    return population


def _task(config: RunConfig, population: Population) -> Task:
    fields = population.fields
    if population.generate is not None:
        return known_regression(fields["theta"].shape[1])
    if "x" not in fields or "y" not in fields:
        raise ValueError(f"the data must have the fields x and y, got {', '.join(fields)}")
    outputs = max(2, int(fields["y"].max()) + 1) if config.loss in _LOSSES else 1
    shape = fields["x"].shape[1:]
    if config.model == "mlp":
        model = models.mlp(shape, outputs, config.hidden)
    elif config.model == "cnn":
        model = models.cnn(shape, outputs)
    else:
        model = models.linear(shape, outputs, bias=config.intercept)
    if config.loss in _LOSSES:
        sentence = (
            f"The number of classes, {outputs}, is the largest label of all clients and one more; "
            "it is taken as public."
        )
        return _LOSSES[config.loss](model, outputs)._replace(public=(sentence,))
    return {"logistic": tasks.logistic, "squared": tasks.squared}[config.loss](model)


def _algorithm(config: RunConfig, task: Task, population: Population) -> Algorithm:
    if config.algorithm == "ppsgd":
        sizes = np.minimum(population.splits["train"].count, config.batch_size)
        algorithm = ppsgd(
            task,
            parametrization=config.parametrization,
            objective=weighted(sizes) if config.objective == "weighted" else average(),
            averaged=config.averaged,
        )
        return algorithm._replace(public=(_DIVISOR,)) if algorithm.public else algorithm
    schedule = {
        "constant": None,
        "cosine": optax.cosine_decay_schedule(1.0, config.rounds),
        "linear": optax.linear_schedule(1.0, 0.0, config.rounds),
    }[config.schedule]
    local_optimizer = optimizers.local(_LOCAL_OPTIMIZERS[config.local_optimizer], schedule)
    if config.algorithm == "local":
        return local(task, local_optimizer)
    server_optimizer = optimizers.server(_SERVER_OPTIMIZERS[config.server_optimizer])
    return _ALGORITHMS[config.algorithm](task, local_optimizer, server_optimizer)


def execute(
    experiment: Experiment, directory: RunDirectory | None, stop: Event, *, quiet: bool = False
) -> tuple[Record, Report]:
    """Runs an experiment, watches it and writes its files.

    Args:
      experiment: from `prepare`.
      directory: where the files go; None writes none.
      stop: once it is set, the run ends after the segment in flight, with all files.
      quiet: no progress bar.

    Returns:
      The summary, as `summary.json` holds it, and the privacy report.
    """
    config, simulation, hparams = experiment.config, experiment.simulation, experiment.hparams
    if directory is not None:
        directory.write_config(experiment.resolved())
    records: list[Record] = []
    round_seconds = 0.0
    with (
        RunProgress(experiment.title, config.rounds, quiet=quiet) as progress,
        _Clock().running() as clock,
    ):

        def keep(record: Record, rounds_per_second: float | None = None) -> None:
            records.append(record)
            if directory is not None:
                directory.append_metrics(record)
            progress.update(strict(record), rounds_per_second)

        def on_segment(state: SimulationState, segment: Segment) -> bool:
            nonlocal round_seconds
            round_seconds += clock.lap()
            record = {
                "round": segment.round,
                "train_loss": _train_loss(segment),
                **segment.evaluation.summary(),
                "epsilon": _epsilon(experiment, state),
            }
            keep(record, segment.round / round_seconds)
            clock.lap()
            return not stop.is_set()

        state = simulation.init(config.seed, hparams, common_noise=config.common_noise)
        evaluation = simulation.evaluate(state, hparams)
        keep({"round": 0, "train_loss": None, **evaluation.summary(), "epsilon": 0.0})
        clock.lap()
        state, history = simulation.run(
            state, hparams, config.rounds, eval_every=config.eval_every, on_segment=on_segment
        )
    report = simulation.guarantee(state, experiment.delta)
    last = dict(records[-1])
    done = last.pop("round")
    summary = {
        "algorithm": config.algorithm,
        "data": config.data,
        "model": config.model,
        "clients": simulation.num_clients,
        "rounds": done,
        "rounds_planned": config.rounds,
        "interrupted": done < config.rounds,
        "diverging": diverges([record["train_loss"] for record in records]),
        **last,
        "epsilon_replace": report.find("replace", "joint_dp").epsilon,
        "delta": experiment.delta,
        "noise_multiplier": experiment.noise_multiplier,
        "rounds_per_second": done / round_seconds,
        "compile_seconds": clock.compile_seconds,
    }
    if directory is not None:
        directory.write_state(state)
        directory.write_clients(_clients(simulation.population, history[-1].evaluation))
        directory.write_guarantee(report.to_json())
        from fedjaxsim import plots

        figure = plots.run_figure(strict(records), _figure_title(experiment))
        plots.save(figure, directory.path / "curves.png")
        directory.write_summary(summary)
    return strict(summary), report


def diverges(losses: Sequence[float | None]) -> bool:
    """Whether the last training loss is not finite, or ten times the lowest one.

    Accuracy can look healthy for long while a model grows without bound.
    """
    known = [loss for loss in losses if loss is not None]
    if not known:
        return False
    return not math.isfinite(known[-1]) or known[-1] > 10 * min(known)


def _train_loss(segment: Segment) -> float | None:
    """The mean of the local losses during the segment, every participation with equal weight."""
    weights = segment.metrics["participants"]
    losses = np.where(weights > 0, segment.metrics["loss"], 0.0)
    return float(losses @ weights / weights.sum()) if weights.sum() else None


def _epsilon(experiment: Experiment, state: SimulationState) -> float:
    """ε so far, zero-out and joint DP: that number of the report alone, the others take longer."""
    [(scheme, event, charged, _)] = ledger.charged(state.privacy)
    if not charged:
        return 0.0
    [entry] = charged  # z and p are constant here.
    return calibration.spent(*entry, experiment.delta, scheme, event)


def _clients(population: Population, evaluation: Evaluation) -> dict[str, np.ndarray]:
    """The columns of the table of clients, each (m,)."""
    return {
        "name": population.names,
        "train_rows": population.splits["train"].count,
        "test_rows": evaluation.count,
        **{f"test_{name}": values for name, values in evaluation.values.items()},
    }


def _figure_title(experiment: Experiment) -> str:
    config = experiment.config
    clients = f"{experiment.simulation.num_clients} clients"
    if config.algorithm == "local":
        privacy = "nothing released"
    elif experiment.noise_multiplier == 0:
        privacy = "no privacy"
    else:
        privacy = f"z = {number(experiment.noise_multiplier)}"
    return f"{experiment.title}, {clients}, {privacy}"


class _Clock:
    """Tells the time spent compiling from the time spent computing.

    Attributes:
      compile_seconds: tracing, lowering and compiling, while the clock runs.
    """

    def __init__(self):
        self.compile_seconds = 0.0
        self._last = 0.0, 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Listens to the compiler."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self.lap()
        try:
            yield self
        finally:
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def lap(self) -> float:
        """Seconds since the last lap, without those of compilation."""
        now = time.perf_counter(), self.compile_seconds
        seconds = (now[0] - self._last[0]) - (now[1] - self._last[1])
        self._last = now
        return max(seconds, 1e-9)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event.startswith("/jax/core/compile/"):
            self.compile_seconds += duration_secs
