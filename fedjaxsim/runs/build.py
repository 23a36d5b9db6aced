"""Building a run: from its settings to a simulation that has been checked and is ready to start."""

import dataclasses
import functools
import importlib.metadata
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedjaxsim import models
from fedjaxsim.algorithm import Algorithm, LocalOptimizer, ServerOptimizer
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.ppsgd import Objective, average, weighted
from fedjaxsim.data.hold_out import hold_out
from fedjaxsim.data.load import load
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.table import Columns
from fedjaxsim.data.transforms import drop_constant_columns, invert, unit_rows
from fedjaxsim.hparam_fields import HparamFields, about
from fedjaxsim.hparams import Hyperparameters, validate
from fedjaxsim.models import task as tasks
from fedjaxsim.models.known_risk import known_regression
from fedjaxsim.models.model import Model
from fedjaxsim.models.task import Task
from fedjaxsim.privacy import calibration
from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.budget import Budget, entries, equally_costly
from fedjaxsim.privacy.events import Charged, Scheme
from fedjaxsim.privacy.events import Event as PrivacyEvent
from fedjaxsim.privacy.guarantee import default_delta
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.sampling import Sampling
from fedjaxsim.report.files import Record
from fedjaxsim.runs import feasible
from fedjaxsim.runs.own import make_own
from fedjaxsim.runs.settings import OF_TOKENS, RunConfig, is_own
from fedjaxsim.simulation import LEDGER_ENTRIES, Simulation

_MOMENTUM = functools.partial(optax.sgd, momentum=0.9)
_LOCAL_OPTIMIZERS = {"sgd": optax.sgd, "momentum": _MOMENTUM, "adam": optax.adam}
_SERVER_OPTIMIZERS = _LOCAL_OPTIMIZERS | {"adagrad": optax.adagrad, "yogi": optax.yogi}
_TRANSFORMS = {
    "drop-constant": drop_constant_columns,
    "invert": invert,
    "unit-rows": unit_rows,
}
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
        """The z of every round; of a schedule, that with the same Σ 1/z²."""
        return equally_costly(np.asarray(self.hparams.noise_multiplier))

    def planned(self) -> Charged:
        """What its ledger is charged for all rounds."""
        scheme, event = self.simulation.sampling.scheme, self.simulation.mechanism.event
        hparams = self.hparams.as_arrays()
        rate = float(self.simulation.sampling.rate(hparams))
        noise = np.asarray(hparams.noise_multiplier, np.float32)
        spent = () if event.kind == "none" else entries(noise, rate, self.config.rounds, event)
        return Charged(scheme, event, spent)

    def resolved(self) -> Record:
        """The settings as asked for, what followed from them, and with what it was computed."""
        minibatches = self.simulation.minibatches
        z = np.asarray(self.hparams.noise_multiplier)
        ends = {"noise_first": float(z[0]), "noise_last": float(z[-1])} if z.ndim else {}
        return {
            **self.config.settings(),
            "resolved": {
                "rounds": self.config.rounds,
                "clients": self.simulation.num_clients,
                "capacity": self.simulation.sampling.scheme.capacity,
                "noise_multiplier": self.noise_multiplier,
                **ends,
                "clip": float(np.asarray(self.hparams.clip_norm)),
                "delta": self.delta,
                "local_epochs": minibatches.epochs or 0,
                "local_steps": minibatches.steps or 0,
                "chunk_size": self.simulation.chunk_size(self.hparams),
                "chunk_map": self.simulation.layout.chunk_map,
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


def prepare(
    config: RunConfig,
    simulation: Simulation | None = None,
    *,
    population: Population | None = None,
) -> Experiment:
    """Checks everything about a run before it computes anything.

    Args:
      config: the settings.
      simulation: of an earlier experiment whose settings differ in hyperparameters only (ε, z, C,
        λ, μ, learning rates), to share its data and compiled code; by default a new one.
      population: that of an earlier experiment on the same data; by default it is loaded.

    Raises:
      FileNotFoundError: if there are no data where the configuration says.
      ValueError: naming the setting, its value and what is allowed.
    """
    config.validate()
    hparams = asked_for(config)
    if "noise_multiplier" not in config.release_reads:
        hparams = hparams.replace(noise_multiplier=0.0)
    if not config.clips:
        hparams = hparams.replace(clip_norm=math.inf)
    if math.isfinite(config.target_epsilon) and not math.isfinite(config.clip):
        raise ValueError(f"clip must be finite where epsilon is, got {config.clip}")
    new = simulation is None
    if simulation is None:
        population = population_of(config) if population is None else population
        feasible.check_data(config, population)
        simulation = simulation_of(config, population)
    delta = default_delta(simulation.num_clients) if config.delta is None else config.delta
    scheme = simulation.sampling.scheme
    if scheme.kind != "poisson":
        hparams = hparams.replace(sampling_rate=scheme.capacity / scheme.clients)
    p = float(np.asarray(hparams.sampling_rate))
    if math.isfinite(config.target_epsilon) and "epsilon" in config.door.reads:
        z = _calibrated(
            config.target_epsilon,
            delta,
            config.rounds,
            p,
            scheme,
            simulation.mechanism.event,
            simulation.accountant,
            config.spread,
        )
        hparams = hparams.replace(noise_multiplier=z)
    if "budget" in config.release_reads:
        z = float(np.asarray(hparams.noise_multiplier))
        hparams = hparams.replace(noise_multiplier=config.spread.noise(z, config.rounds))
        validate(hparams)
    z = float(np.max(hparams.noise_multiplier))
    if z > 0 and "count_noise" in config.door.reads and config.count_noise is None:
        # A twentieth of the expected cohort is usual; where that is small, it must be above z/2.
        hparams = hparams.replace(count_noise=max(p * scheme.clients / 20, z))
    simulation.check(hparams)
    simulation.check_rounds(hparams, 0, config.rounds, config.eval_every)
    experiment = Experiment(config, simulation, hparams, delta)
    if new:
        feasible.check_start(experiment)
    return experiment


def asked_for(config: RunConfig) -> Hyperparameters:
    """Hyperparameters as settings say them, before anything follows from an ε.

    Raises:
      ValueError: if one is out of range.
    """
    hparams = Hyperparameters(
        **{name: getattr(config, name) for name in about(HparamFields)},
        clip_norm=config.clip,
        noise_multiplier=config.noise_multiplier or 0.0,
        count_noise=config.count_noise or 0.0,
    )
    validate(hparams)
    return hparams


@functools.cache
def _calibrated(
    epsilon: float,
    delta: float,
    rounds: int,
    rate: float,
    scheme: Scheme,
    charge: PrivacyEvent,
    accountant: str | None,
    budget: Budget,
) -> float:
    """The z that meets a target; the runs of a sweep ask for the same ones again and again."""
    return calibration.noise_multiplier(
        epsilon,
        delta,
        rounds=rounds,
        sampling_rate=rate,
        scheme=scheme,
        event=charge,
        accountant=accountant,
        budget=budget,
    )


def _minibatches(config: RunConfig) -> Minibatches:
    steps, epochs = config.local_steps, config.local_epochs
    if steps is None and epochs is None:
        # Where examples are made afresh, there are no epochs.
        one = config.system.one_minibatch or config.data == "synthetic-stream"
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
    parts = parts_of(config, population, population.num_clients, task)
    if config.accountant is not None and config.door_name != "closed":
        _check_accountant(config, parts.sampling.scheme, parts.mechanism.event)
    if config.streamed and jax.process_count() > 1:
        raise ValueError("a streamed run takes one process: give --streamed or several processes")
    divided = jax.device_count() > 1 and not config.streamed
    return Simulation(
        parts.algorithm,
        parts.task,
        population,
        parts.sampling,
        parts.minibatches,
        parts.mechanism,
        accountant=config.accountant,
        ledger_entries=parts.ledger_entries,
        chunk_size=config.chunk_size,
        chunk_map=config.chunk_map,
        devices=jax.devices() if divided else None,
        streamed=config.streamed,
    )


class Parts(NamedTuple):
    """What a simulation is made of besides its population; see `Simulation`."""

    algorithm: Algorithm
    task: Task
    sampling: Sampling
    minibatches: Minibatches
    mechanism: Mechanism
    ledger_entries: int


def parts_of(
    config: RunConfig, population: Population, num_clients: int, task: Task | None = None
) -> Parts:
    """The parts of a configuration's simulation.

    Args:
      config: the settings.
      population: whose fields models are made for.
      num_clients: m; there may be more than the population has, where one is planned.
      task: by default that of the population.

    Raises:
      ValueError: as `prepare`.
    """
    task = _task(config, population) if task is None else task
    given = [getattr(config, name) for name in config.sampler.reads]
    options = {name: getattr(config, name) for name in config.door.options}
    constant = config.spread.is_constant or "budget" not in config.release_reads
    return Parts(
        _algorithm(config, task, population, num_clients),
        task,
        config.sampler.make(num_clients, *given),
        _minibatches(config),
        config.door.make(num_clients, **options),
        LEDGER_ENTRIES if constant else max(LEDGER_ENTRIES, config.rounds),
    )


def _check_accountant(config: RunConfig, scheme: Scheme, event: PrivacyEvent) -> None:
    """That an accountant gives the ε that is shown as a run goes on, and aimed at."""
    name = config.accountant
    assert name is not None
    composition.require_match(name, scheme, event)
    if not composition.knows(name, "zero_out", "joint_dp"):
        raise ValueError(
            f"accountant {name!r} has no ε for zero-out in joint_dp, which a run shows; use "
            f"`fedjaxsim privacy epsilon --accountant {name}`"
        )
    if math.isfinite(config.target_epsilon) and composition.is_approximate(name):
        raise ValueError(f"epsilon cannot be aimed at with accountant {name!r}, which is no bound")


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
    columns = None
    if config.target is not None:
        columns = Columns(config.target, config.client, config.split, config.one_hot, config.drop)
    population = load(
        config.data,
        partition=config.partition,
        num_clients=config.clients,
        alpha=config.alpha,
        noise_variance=config.feature_noise,
        classes=config.classes,
        offset_scale=config.offset_scale,
        columns=columns,
        cells=(config.fields[0], config.fields[1]) if config.fields else None,
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
    classes = population.categories.get("y")
    outputs = 1
    if config.loss in _LOSSES:
        outputs = max(2, int(fields["y"].max()) + 1 if classes is None else len(classes))
    shape = fields["x"].shape[1:]
    public = []
    per_token = config.loss == "softmax" and fields["y"].ndim == 2
    if is_own(config.model):
        model = make_own("model", config.model, Model, shape=shape, outputs=outputs)
    elif config.model in OF_TOKENS:
        tokens = population.categories.get("x", ())
        num_tokens = len(tokens) or int(fields["x"].max()) + 1
        if not tokens:
            public.append(f"The number of tokens, {num_tokens}, is the largest of them")
        model = getattr(models, config.model)(
            shape,
            outputs,
            num_tokens,
            config.hidden,
            last=not per_token,
            padding=tokens.index("") if "" in tokens else None,
        )
    elif config.model == "mlp":
        model = models.mlp(shape, outputs, config.hidden)
    elif config.model == "cnn":
        model = models.cnn(shape, outputs)
    else:
        model = models.linear(shape, outputs, bias=config.intercept)
    if config.compute == "bfloat16":
        model = models.in_bfloat16(model)
    if config.loss in _LOSSES:
        task = (tasks.softmax_sequence if per_token else _LOSSES[config.loss])(model, outputs)
        if classes is None:  # otherwise their names say how many there are
            public.append(f"The number of classes, {outputs}, is the largest label")
    else:
        task = {"logistic": tasks.logistic, "squared": tasks.squared}[config.loss](model)
    made = " of all clients and one more; it is taken as public."
    return task._replace(public=tuple(f"{sentence}{made}" for sentence in public))


def _algorithm(
    config: RunConfig, task: Task, population: Population, num_clients: int
) -> Algorithm:
    if is_own(config.algorithm):
        return make_own("algorithm", config.algorithm, Algorithm, task=task)

    def argument(name: str) -> Any:
        make = _ARGUMENTS.get(name)
        return getattr(config, name) if make is None else make(config, population)

    system = config.system
    given = {name: argument(name) for name in system.arguments if name != "num_clients"}
    algorithm = system.make(task, num_clients, **given)
    weighted = "objective" in system.arguments and config.objective == "weighted"
    return algorithm._replace(public=(_DIVISOR,)) if weighted else algorithm


def _local_optimizer(config: RunConfig, population: Population) -> LocalOptimizer:
    del population
    schedule = {
        "constant": None,
        "cosine": optax.cosine_decay_schedule(1.0, config.rounds),
        "linear": optax.linear_schedule(1.0, 0.0, config.rounds),
    }[config.schedule]
    return optimizers.local(_LOCAL_OPTIMIZERS[config.local_optimizer], schedule)


def _server_optimizer(config: RunConfig, population: Population) -> ServerOptimizer:
    del population
    return optimizers.server(_SERVER_OPTIMIZERS[config.server_optimizer])


def _objective(config: RunConfig, population: Population) -> Objective:
    sizes = np.minimum(population.splits["train"].count, config.batch_size)
    return weighted(sizes) if config.objective == "weighted" else average()


_ARGUMENTS: dict[str, Callable[[RunConfig, Population], Any]] = {
    "local_optimizer": _local_optimizer,
    "server_optimizer": _server_optimizer,
    "objective": _objective,
    "penalty": lambda config, population: config.penalty_name,
    "head": lambda config, population: config.head or None,
}
"""What systems take that is made of settings, by the setting's name."""
