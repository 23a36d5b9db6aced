"""Objectives of a run and the hyperparameters that they can be differentiated with respect to."""

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.engine.evaluation import measure_with, targets_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import map_clients
from fedjaxsim.gradients.reverse import bounded
from fedjaxsim.hyperparameters import Hyperparameters, on_host
from fedjaxsim.simulation import Simulation

PyTree = Any
Objective = Callable[[SimulationState, Hyperparameters], jax.Array]
"""(final state, hparams) -> (); a `jax.tree_util.Partial` if it holds arrays."""
Gradient = dict[str, jax.Array]
"""Derivatives by name, each of the shape of its hyperparameter."""

EPSILON = "epsilon"


def mean_metric(
    simulation: Simulation, metric: str = "loss", split: str = "validation"
) -> Objective:
    """Return the objective `Simulation.evaluate(...).mean(metric)`, for either mode.

    It is the mean over clients of their mean over rows.

    Args:
      simulation: the clients, the task and the algorithm.
      metric: one of the task's `metrics`.
      split: the rows that are evaluated.

    Raises:
      ValueError: if there is no such split or it has no rows. When the objective is first used, if
        the task has no such metric.
    """
    simulation.check_evaluated(split, None)
    rows, population = simulation.rows[split], simulation.population
    counts = targets_of(population, split, simulation.task)
    present = int(np.sum(counts > 0))
    if present == 0:
        raise ValueError(f"the {split} split has no rows, so it has no mean {metric}")
    program = simulation.program
    choose = bounded(program.workload, rows).layout
    layout = choose()
    targets = jnp.maximum(counts, 1)
    # Streaming metrics have no derivatives.
    measure = measure_with(simulation.task._replace(streaming_metrics={}))

    def value(rows, state, hparams):
        def one(personal, client_id):
            params = program.predict(state, personal, hparams, client_id, rows, layout)
            data = rows.of(client_id, state.key, program.minibatches, layout)
            sums = measure(params, data, rows.most_rows).sums
            checks.one_of(sorted(sums), metric=metric)
            return sums[metric] / targets[client_id].astype(sums[metric].dtype)

        again = jax.checkpoint(one, prevent_cse=False)
        ids = jnp.arange(program.num_clients, dtype=jnp.int32)
        means = map_clients(again, state.personal, ids, choose)
        return jnp.sum(means) / present

    return Partial(value, rows)


def check_names(
    names: Sequence[str], hparams: Hyperparameters, epsilon: ArrayLike | None = None
) -> None:
    """Check that derivatives with respect to the hyperparameters `names` exist."""
    fields = list(hparams)
    if not names:
        raise ValueError(f"wrt must name at least one of {fields}, got nothing")
    for name in names:
        if name == "sampling_rate":
            raise ValueError(
                "sampling_rate has no derivative here: it decides who takes part, which is "
                "discrete. gradients.epsilon_by_sampling_rate gives dε/dp; for the rest, compare "
                "runs at several p"
            )
        if name == EPSILON:
            if epsilon is None:
                raise ValueError("a derivative with respect to epsilon needs its value")
        elif name not in fields:
            near = difflib.get_close_matches(name, [*fields, EPSILON], n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"no hyperparameter {name!r}; {hint}There are {', '.join(fields)}")
    if "noise_multiplier" not in names:
        return
    if epsilon is not None:
        raise ValueError("noise_multiplier follows from epsilon, so it is not free to vary")
    clip_norm = on_host(hparams.get("clip", np.inf))
    if clip_norm is not None and not np.all(np.isfinite(clip_norm)):
        raise ValueError(
            f"noise_multiplier has no derivative without a finite clip, got {clip_norm}"
        )
