"""On whose data hyperparameters are tuned, and what the guarantee of the final run says then."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.data.hold_out import hold_out
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.data.population import Population
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.metrics import metric
from fedjaxsim.runs.build import (
    Experiment,
    population_of,
    prepare,
    simulation_of,
    whole_population_of,
)
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import Task

VALIDATION_FRACTION = 0.2
"""Part of each client's training rows that is tuned on where the settings say nothing."""

_STREAM = 0x74_75_6E_65
"""Folded into the key of the final run, so that no run of a tuning shares its random numbers."""
_TUNING = "The final run's guarantee is that of a run whose hyperparameters were fixed beforehand."


@dataclasses.dataclass(frozen=True)
class Source:
    """What tuning runs on, and the run that comes after it.

    Attributes:
      final: the run at the start of the tuning, on the clients that its guarantee is for.
      simulation: what tuning runs.
      hparams: of tuning, at its start.
      split: the rows that the objective is on.
      kind: "validation", "held-out" or "public".
      statement: what this means for the guarantee, in sentences.
    """

    final: Experiment
    simulation: Simulation
    hparams: Hyperparameters
    split: str
    kind: str
    statement: str


def find_source(config: RunConfig, public_data: str | None, *, clips: bool) -> Source:
    """Loads the data of a tuning and of the run after it.

    Where other clients than those of the run are tuned on, their noise multiplier is scaled by how
    many they are, so that the noise on a released *mean* is that of the final run.

    Args:
      config: the settings at the start; `held_out_clients` sets clients apart to tune on.
      public_data: a source of data to tune on, as `config.data`.
      clips: whether messages are clipped at ε = ∞ too.

    Raises:
      FileNotFoundError: if there are no data where the settings say.
      ValueError: as `prepare`; if both kinds of other data are asked for; if public data do not
        suit the model; or if the run is streamed.
    """
    config.require_unstreamed("tuning")
    if public_data is not None:
        if config.held_out_clients:
            raise ValueError(
                "public-data and held-out-clients exclude each other: give one of them, got "
                f"{public_data} and {config.held_out_clients}"
            )
        if public_data == config.data:
            raise ValueError(f"public-data must be other data than those of the run, {config.data}")
        final = prepare(config)
        others = whole_population_of(config.replace(data=public_data))
        _require_alike(final, others, public_data)
        kind, statement = "public", _of_public(public_data, others, final)
    elif config.held_out_clients:
        whole = whole_population_of(config)
        left, others = hold_out(whole, config.held_out_clients, config.seed)
        final = prepare(config, simulation_of(config, left))
        kind, statement = "held-out", _of_held_out(others, final)
    else:
        final = _with_validation_rows(config)
        return Source(
            final,
            final.simulation,
            _at(final, 1.0, clips),
            "validation",
            "validation",
            _of_validation(final),
        )
    if config.get("cohort") is not None:
        raise ValueError(
            "tuning on other clients needs a sampling rate: cohorts of one size are another share "
            f"of them, with other noise on their mean, got cohort {config.get('cohort')}"
        )
    simulation = simulation_of(config, others, final.simulation.task)
    hparams = _at(final, others.num_clients / final.simulation.num_clients, clips)
    if not others.splits["test"].count.any():
        raise ValueError(f"tuning needs rows to test on, but {kind} clients have none")
    return Source(final, simulation, hparams, "test", kind, statement)


def keys_of(seed: int, count: int) -> jax.Array:
    """The keys of the runs that are tuned on, (S,): other ones than that of the final run.

    Args:
      seed: of the final run.
      count: S.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _STREAM)
    return jax.random.split(key, count)


def metric_of(task: Task, population: Population, asked: str | None) -> str:
    """The metric that is minimized: the one asked for, else the loss or the excess risk.

    Raises:
      ValueError: if the task has no such metric, or it is a step function.
    """
    names = _metrics(task, population)
    smooth = [n for n in names if metric(n).smooth and not metric(n).larger_is_better]
    if asked is None:
        return "loss" if "loss" in smooth else smooth[0]
    if asked in task.folds or (asked in names and not metric(asked).smooth):
        raise ValueError(
            f"{asked} has no derivative: it is a step function of the models. Metrics to tune on: "
            + ", ".join(smooth)
        )
    if asked not in smooth:
        raise ValueError(f"metric must be one of {', '.join(smooth)}, got {asked!r}")
    return asked


def _metrics(task: Task, population: Population) -> list[str]:
    row = {name: jnp.asarray(values[:1]) for name, values in population.fields.items()}

    def of_one(key):
        return task.metrics(task.init(key), Batch(row, jnp.ones(1)))

    return sorted(jax.eval_shape(of_one, jax.random.key(0)))


def _with_validation_rows(config: RunConfig) -> Experiment:
    if config.data == "synthetic-stream":
        raise ValueError(
            "synthetic-stream has no validation rows: tune on other clients, with "
            "--held-out-clients or --public-data"
        )
    if config.get("validation_fraction") == 0:
        own = population_of(config).splits["validation"].count.any()
        fraction = 0.0 if own else VALIDATION_FRACTION
        config = config.replace(validation_fraction=fraction)
    return prepare(config)


def _at(final: Experiment, scale: float, clips: bool) -> Hyperparameters:
    """The hyperparameters of the final run, for more or fewer clients, clipped where that is."""
    hparams = final.hparams
    scaled = [name for name in ("noise_multiplier", "count_noise") if name in hparams]
    hparams = hparams.replace(**{n: np.asarray(getattr(hparams, n)) * scale for n in scaled})
    if clips and not math.isfinite(float(np.asarray(hparams.clip_norm))):
        hparams = hparams.replace(clip_norm=final.config.clip_norm)
    return hparams


def _require_alike(final: Experiment, public: Population, source: str) -> None:
    """That the model of the private clients suits the public ones."""
    fields, others = final.simulation.population.fields, public.fields
    shapes, theirs = (
        {name: values.shape[1:] for name, values in each.items()} for each in (fields, others)
    )
    if shapes != theirs:
        raise ValueError(f"public data must have fields of the shapes {shapes}, got {theirs}")
    try:
        final.simulation.task.check(others)
    except ValueError as error:
        raise ValueError(f"public data {source} do not suit the model: {error}") from error


def _of_validation(final: Experiment) -> str:
    return (
        f"Tuned on validation rows of the same {final.simulation.num_clients} clients as the run. "
        f"{_TUNING} These were chosen by reading the clients' data without protection: the choice "
        "is NOT covered by the run's ε, and what the hyperparameters reveal is not bounded. To be "
        "covered, tune on held-out clients or on public data."
    )


def _of_held_out(others: Population, final: Experiment) -> str:
    return (
        f"Tuned on {others.num_clients} held-out clients, drawn by the seed whatever their data "
        f"are; the run uses the {final.simulation.num_clients} others only. {_TUNING} That holds "
        f"for these {final.simulation.num_clients} clients, of whose data the choice read nothing. "
        f"The {others.num_clients} held-out clients have NO protection: the hyperparameters depend "
        "on their data, which were read without noise that counts."
    )


def _of_public(source: str, others: Population, final: Experiment) -> str:
    return (
        f"Tuned on {source} ({others.num_clients} clients), which is taken to be public. {_TUNING} "
        f"That holds for the {final.simulation.num_clients} clients of the run if {source} holds "
        "nothing of theirs; whoever is in it has NO protection."
    )
