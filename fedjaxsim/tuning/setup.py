"""The data of a tuning, and what the choice means for the guarantee of the final run."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import keys
from fedjaxsim.checks import prefixed
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.data.population import Population
from fedjaxsim.engine.part_checks import require_key
from fedjaxsim.gradients.whole_run import differentiable
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.keys import Stream
from fedjaxsim.metrics import Metric, named_metric, require_direction
from fedjaxsim.runs.assemble import population_of, simulation_of, whole_population_of
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import Task

VALIDATION_FRACTION = 0.2
"""Fraction of each client's training rows to tune on, by default."""

_FIXED = "The final run's guarantee holds if hyperparameters were fixed beforehand."
_VALIDATION = (
    f"Tuned on validation rows of {{data}} ({{tuning}} clients). {_FIXED} These were chosen by "
    "reading the data of these clients without protection: for them the choice is NOT covered by "
    "the run's ε, and what the hyperparameters reveal is not bounded. To be covered, tune on "
    "held-out clients or on public data."
)
_HELD_OUT = (
    "Tuned on {tuning} held-out clients, drawn by the seed independently of their data; the run "
    f"uses only the {{run}} others. {_FIXED} That holds for these {{run}} clients, because the "
    "choice read none of their data. The {tuning} held-out clients have NO protection: the "
    "hyperparameters depend on their data, which were read without protection."
)


class TuningSetup(NamedTuple):
    """The simulation to tune with its hyperparameters at the start, and the run after it.

    Attributes:
      final: the run at the start of the tuning, on the clients that its guarantee protects.
      split: rows of the objective.
      statement: sentences on the choice and the guarantee.
    """

    final: Experiment
    simulation: Simulation
    hparams: Hyperparameters
    split: str
    statement: str


def set_up(config: RunConfig, *, clips: bool) -> TuningSetup:
    """Load the data of a tuning and of the run after it.

    On held-out clients the noise multiplier is scaled by their number, so that the noise on a
    released *mean* is the same as in the final run. `clips` says whether messages are clipped at
    ε = ∞ too.
    """
    if config.get("exact_sums"):
        raise ValueError("exact-sums has no derivative to tune by: leave it out")
    if config.held_out_clients:
        if config.get("cohort") is not None:
            raise ValueError(
                "tuning on held-out clients needs a sampling rate: cohorts of one size are another "
                f"share of them, with other noise on their mean, got cohort {config.get('cohort')}"
            )
        left, statement, split = whole_population_of(config), _HELD_OUT, "test"
        final = prepare(config, simulation_of(config, left))
        assert left.held_out is not None
        try:
            simulation = simulation_of(config, left.held_out, final.simulation.task)
        except ValueError as error:
            raise prefixed("held-out data do not suit the run: ", error) from error
    else:
        is_unset = config.values.get("validation_fraction") == 0
        if is_unset and not population_of(config).has("validation"):
            config = config.replace(validation_fraction=VALIDATION_FRACTION)
        final, statement, split = prepare(config), _VALIDATION, "validation"
        simulation = final.simulation
    if not simulation.population.has(split):
        raise ValueError(f"the clients have no {split} rows to tune on: see --held-out-clients")
    sizes = {"run": final.simulation.num_clients, "tuning": simulation.num_clients}
    hparams = _scaled(final, sizes["tuning"] / sizes["run"], clips)
    return TuningSetup(
        final, simulation, hparams, split, statement.format(data=config.data, **sizes)
    )


def keys_of(seed: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the keys of `count` runs to tune on and of as many that test the result, (S,) each.

    The final run, of seed `seed`, has none of these keys.
    """
    both = keys.stream(require_key(seed), Stream.TUNING, jnp.arange(2 * count))
    return both[:count], both[count:]


def tuned_metric(task: Task, population: Population, asked: str | None) -> tuple[str, Metric]:
    """Return the metric to improve, by default loss or excess risk, and its record."""
    row = {name: jnp.asarray(values[:1]) for name, values in population.fields.items()}
    batch = Batch(row, jnp.ones(1))
    names = jax.eval_shape(lambda key: task.metrics(task.init(key), batch), jax.random.key(0))

    def of_row(params, metric):
        return differentiable(metric, params, jax.tree.map(jnp.sum, task.metrics(params, batch)))

    records = task.metric_records(names)
    smooth = sorted(name for name in names if records[name].smooth)
    down = [name for name in smooth if records[name].larger_is_better is False]
    asked = None if asked is None else named_metric(asked, names)
    metric = asked
    if metric is None:
        metric = "loss" if "loss" in down else next(iter(down), "loss")
    if metric not in smooth:
        why = "must have a derivative to be tuned by, which steps such as accuracy lack"
        raise ValueError(f"metric {why}: one of {', '.join(smooth)}, got {metric!r}")
    require_direction(metric, records)
    # A record may leave open that its metric is a step function: the trace of a derivative tells.
    jax.eval_shape(
        lambda key: jax.grad(lambda params: of_row(params, metric), allow_int=True)(task.init(key)),
        jax.random.key(0),
    )
    return metric, records[metric]


def _scaled(final: Experiment, scale: float, clips: bool) -> Hyperparameters:
    """Return the hyperparameters of the final run with its noise scaled."""
    hparams = final.hparams
    noise = [name for name in ("noise_multiplier", "count_noise") if name in hparams]
    hparams = hparams.replace(**{n: np.asarray(getattr(hparams, n)) * scale for n in noise})
    if clips and not math.isfinite(float(np.asarray(hparams.clip))):
        clip = final.config.get("clip")
        hparams = hparams.replace(clip=final.simulation.clip_norm if clip is None else clip)
    return hparams
