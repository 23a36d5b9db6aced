"""Building a run: from its settings to a simulation that has been checked and is ready to start."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedjaxsim import tasks
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.data.hold_out import hold_out
from fedjaxsim.data.load import load
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.transforms import drop_constant_columns, invert, unit_rows
from fedjaxsim.engine.program import run_key
from fedjaxsim.hyperparameters import Hyperparameter, Hyperparameters, fill
from fedjaxsim.models.model import Model, in_bfloat16
from fedjaxsim.privacy import calibration
from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.privacy.budget import Budget, entries, equally_costly
from fedjaxsim.privacy.events import Drawn, PrivacySpend, SamplingScheme
from fedjaxsim.privacy.events import PrivacyEvent as PrivacyEvent
from fedjaxsim.privacy.ledger import digest, hex_digest
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.samplers import Sampling, full_participation
from fedjaxsim.report.files import Record
from fedjaxsim.runs import validation
from fedjaxsim.runs.parts import OF_TOKENS
from fedjaxsim.runs.settings import RunConfig, flag
from fedjaxsim.runs.user_code import is_own, make_own
from fedjaxsim.simulation import LEDGER_ENTRIES, Simulation
from fedjaxsim.tasks.known_risk import known_regression
from fedjaxsim.tasks.task import Task

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
        return equally_costly(np.asarray(self.hparams.get("noise_multiplier", 0.0)))

    def planned(self) -> PrivacySpend:
        """What its ledger is charged for all rounds."""
        scheme, event = self.simulation.sampling.scheme, self.simulation.mechanism.event
        hparams = self.hparams.as_arrays()
        rate = float(self.simulation.sampling.rate(hparams))
        noise = np.asarray(hparams.get("noise_multiplier", 0.0), np.float32)
        spent = () if event.kind == "none" else entries(noise, rate, self.config.rounds, event)
        return PrivacySpend(scheme, event, spent)

    def draws(self) -> tuple[Drawn, ...]:
        """Return what a run of all rounds, which is no later stage, draws."""
        if self.simulation.mechanism.event.kind == "none":
            return ()
        key = jax.random.key(self.config.seed, impl="threefry2x32")
        return (draws_of(key, self.config.rounds),)

    def resolved(self) -> Record:
        """The settings as asked for, what followed from them, and with what it was computed."""
        minibatches = self.simulation.minibatches
        z = np.asarray(self.hparams.get("noise_multiplier", 0.0))
        ends = {"noise_first": float(z[0]), "noise_last": float(z[-1])} if z.ndim else {}
        return {
            **self.config.settings(),
            "resolved": {
                "rounds": self.config.rounds,
                "clients": self.simulation.num_clients,
                "capacity": self.simulation.sampling.scheme.capacity,
                "noise_multiplier": self.noise_multiplier,
                **ends,
                "clip": float(np.asarray(self.hparams.get("clip_norm", math.inf))),
                "delta": self.delta,
                "local_epochs": minibatches.epochs or 0,
                "local_steps": minibatches.steps or 0,
                "chunk_size": self.simulation.setup.chunk_size(self.hparams),
                "chunk_map": self.simulation.setup.layout.chunk_map,
            },
            "versions": versions(),
        }


def draws_of(key: jax.Array, rounds: int) -> Drawn:
    """Return what the first rounds of a run draw.

    Args:
      key: the key of its `init`.
      rounds: their number.
    """
    return Drawn(hex_digest(digest(run_key(key))), 0, rounds)


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
    aims = math.isfinite(config.target_epsilon)
    if aims and not math.isfinite(config.clip_norm):
        raise ValueError(f"clip must be finite where epsilon is, got {config.clip_norm}")
    fill_settings(config, config.records)
    new = simulation is None
    if simulation is None:
        population = population_of(config) if population is None else population
        validation.check_data(config, population)
        simulation = simulation_of(config, population)
    for record in simulation.mechanism.hyperparameters:
        if record.name not in config.records:
            raise ValueError(
                f"mechanism {config.mechanism} reads {flag(record.setting)}, which its factory "
                "does not declare: put @fedjaxsim.reads above the factory"
            )
    hparams = fill_settings(config, simulation.records)
    given = config.get("delta")
    delta = default_delta(simulation.num_clients) if given is None else given
    scheme = simulation.sampling.scheme
    p = float(np.asarray(hparams.get("sampling_rate", scheme.capacity / scheme.clients)))
    if aims:
        z = _calibrated(
            config.target_epsilon,
            delta,
            config.rounds,
            p,
            scheme,
            simulation.mechanism.event,
            simulation.setup.accountant,
            config.spread,
        )
        hparams = hparams.replace(noise_multiplier=z)
    if "noise_multiplier" in hparams:
        z = float(np.asarray(hparams.noise_multiplier))
        hparams = hparams.replace(noise_multiplier=config.spread.noise(z, config.rounds))
    z = float(np.max(hparams.get("noise_multiplier", 0.0)))
    if z > 0 and "count_noise" in hparams and config.get("count_noise") is None:
        # A twentieth of the expected cohort is usual; where that is small, it must be above z/2.
        hparams = hparams.replace(count_noise=max(p * scheme.clients / 20, z))
    simulation.setup.check(hparams)
    simulation.setup.check_rounds(hparams, 0, config.rounds, config.eval_every)
    experiment = Experiment(config, simulation, hparams, delta)
    if new:
        with _declared(config):
            validation.check_start(experiment)
    return experiment


@contextlib.contextmanager
def _declared(config: RunConfig) -> Iterator[None]:
    """Turn a read of a hyperparameter that a user's own part does not declare into one line.

    Raises:
      ValueError: instead of the AttributeError of `Hyperparameters`.
    """
    try:
        yield
    except AttributeError as error:
        own = [f"{part.role} {part.name}" for part in config.parts.values() if is_own(part.name)]
        if not own or not isinstance(error.obj, Hyperparameters):
            raise
        raise ValueError(f"{' or '.join(own)}: {error} (fedjaxsim.reads declares them)") from error


def fill_settings(config: RunConfig, records: Mapping[str, Hyperparameter]) -> Hyperparameters:
    """Return hyperparameters as settings say them, before anything follows from an ε.

    Args:
      config: the settings.
      records: of the hyperparameters.

    Raises:
      ValueError: if one is out of range.
    """
    values = {name: config.get(record.setting) for name, record in records.items()}
    if values.get("clip_norm") is not None:  # also where nothing is clipped
        records["clip_norm"].check(values["clip_norm"])
    if "clip_norm" in values:
        values["clip_norm"] = config.clip_norm if config.clips else math.inf
    return fill(records, {name: value for name, value in values.items() if value is not None})


@functools.cache
def _calibrated(
    epsilon: float,
    delta: float,
    rounds: int,
    rate: float,
    scheme: SamplingScheme,
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
    steps, epochs = config.get("local_steps"), config.get("local_epochs")
    if steps is None and epochs is None:
        # Where examples are made afresh, there are no epochs.
        one = config.system.one_minibatch or config.data == "synthetic-stream"
        steps, epochs = (1, None) if one else (None, 1)
    return Minibatches(
        config.get("batch_size", 10), steps=steps, epochs=epochs, passes=config.get("passes")
    )


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
    accountant = config.get("accountant")
    if accountant is not None:
        scheme = parts.sampling.for_clients(population.num_clients).scheme
        _check_accountant(config, accountant, scheme, parts.mechanism.event)
    if config.streamed and jax.process_count() > 1:
        raise ValueError("a streamed run takes one process: give --streamed or several processes")
    divided = jax.device_count() > 1 and not config.streamed
    return Simulation(
        parts.algorithm,
        population,
        parts.sampling,
        parts.minibatches,
        parts.mechanism,
        accountant=accountant,
        ledger_entries=parts.ledger_entries,
        chunk_size=config.chunk_size,
        chunk_map=config.chunk_map,
        devices=jax.devices() if divided else None,
        streamed=config.streamed,
    )


class Parts(NamedTuple):
    """What a simulation is made of besides its population; see `Simulation`."""

    algorithm: Algorithm
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
    everyone = config.sampler == "full"
    return Parts(
        _algorithm(config, task, population, num_clients),
        full_participation() if everyone else _part(config, "sampling", Sampling),
        _minibatches(config),
        _part(config, "mechanism", Mechanism, supplied={"diagonal": config.diagonal}),
        LEDGER_ENTRIES if config.spread.is_constant else max(LEDGER_ENTRIES, config.rounds),
    )


def _part(
    config: RunConfig,
    role: str,
    kind: type,
    *args: Any,
    supplied: Mapping[str, Any] = {},
    **more: Any,
) -> Any:
    """Make the part of a role from its settings.

    Args:
      config: the settings.
      role: which one.
      kind: its type.
      *args: positional arguments of the factory.
      supplied: arguments that are no settings, for factories that take them.
      **more: arguments in place of those of the settings.
    """
    part = config.part(role)
    taken = inspect.signature(part.factory).parameters
    known = {name: value for name, value in supplied.items() if name in taken}
    given = known | config.arguments(role) | more
    if is_own(part.name):
        return make_own(role, part.name, kind, *args, **given)
    return part.factory(*args, **given)


def _check_accountant(
    config: RunConfig, name: str, scheme: SamplingScheme, event: PrivacyEvent
) -> None:
    """Check that an accountant gives the ε that is shown as a run goes on, and aimed at."""
    composition.require_match(name, scheme, event)
    if not composition.covers(name, "zero_out", "joint_dp"):
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
    population = load(
        config.data,
        partition=config.partition,
        classes=config.get("classes"),
        seed=config.seed,
        validation=config.get("validation_fraction", 0.0),
        test=config.get("test_fraction"),
        **config.arguments("data"),
        **config.arguments("partition"),
    )
    for step in config.get("preprocess", ()):
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
    supplied: dict[str, Any] = {}
    if config.model in OF_TOKENS:
        tokens = population.categories.get("x", ())
        num_tokens = len(tokens) or int(fields["x"].max()) + 1
        if not tokens:
            public.append(f"The number of tokens, {num_tokens}, is the largest of them")
        padding = tokens.index("") if "" in tokens else None
        supplied = {"num_tokens": num_tokens, "last": not per_token, "padding": padding}
    model = _part(config, "model", Model, shape, outputs, supplied=supplied)
    if config.compute == "bfloat16":
        model = in_bfloat16(model)
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
    given = config.arguments("algorithm")
    more: dict[str, Any] = {}
    if config.get("schedule", "constant") != "constant":
        decay = {
            "cosine": optax.cosine_decay_schedule(1.0, config.rounds),
            "linear": optax.linear_schedule(1.0, 0.0, config.rounds),
        }[config.get("schedule")]
        more["local_optimizer"] = optimizers.local(given["local_optimizer"], decay)
    supplied: dict[str, Any] = {"num_clients": num_clients}
    if given.get("objective") == "weighted":
        rows = population.splits["train"].count
        supplied["sizes"] = np.minimum(rows, config.get("batch_size"))
    algorithm = _part(config, "algorithm", Algorithm, task, supplied=supplied, **more)
    return algorithm._replace(public=(_DIVISOR,)) if "sizes" in supplied else algorithm
