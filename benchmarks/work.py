"""The least work of a round: its matrix products, and the bytes that pass through memory.

XLA counts the body of a loop once, and a round nests loops over clients and their steps. So the
products of one gradient are counted, each as XLA analyses it, times the examples of a round.
Elementwise work, random numbers, gathers, padding and an algorithm's work beside its gradients are
not counted.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from fedjaxsim.data.minibatches import Batch
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.kernels.linear_outputs import MOST_ROWS
from fedjaxsim.runs.build import Experiment
from fedjaxsim.simulation import Simulation

_PRODUCTS = ("dot_general", "conv_general_dilated")


class Work(NamedTuple):
    """The work of a round, in expectation over its cohort.

    Attributes:
      cohort: clients that take part.
      flops: floating-point operations of matrix products; NaN where they cannot be counted.
      bytes: bytes read or written at least once.
    """

    cohort: float
    flops: float
    bytes: float


def work_of(experiment: Experiment, state: Any) -> Work:
    """Count the work of a round of a run, from its `SimulationState` or the shapes of one."""
    simulation, config = experiment.simulation, experiment.config
    population, batches = simulation.population, simulation.minibatches
    rate = float(simulation.sampler.rate(experiment.hparams.as_arrays()))
    cohort = rate * simulation.num_clients
    # A read of all training rows, or of the minibatches.
    examples = rate * float(population.splits["train"].count.sum())
    if not config.system.whole_pass:
        drawn = cohort * (batches.steps or 0) * batches.size
        examples = batches.epochs * examples if batches.epochs else drawn
    rows = cohort if population.generate else examples
    row = sum(field.nbytes for field in population.fields.values()) / population.num_rows
    personal = cohort / simulation.num_clients * bytes_of(state.personal)
    gradients = config.system.local_passes * examples / batches.size
    return Work(
        cohort,
        gradients * flops_of_gradient(simulation),
        2 * personal + 2 * bytes_of(state.shared) + rows * row,
    )


def flops_of_gradient(simulation: Simulation) -> float:
    """Count the products of the task's gradient on one minibatch; see `flops_of`."""
    task, population, key = simulation.task, simulation.population, jax.random.key(0)
    row = {
        name: jax.ShapeDtypeStruct(field.shape[1:], field.dtype)
        for name, field in population.fields.items()
    }

    size = MOST_ROWS + 1  # whose outer products are a matrix product

    def batch(row: dict[str, jax.Array]) -> Batch:
        fields = {name: jnp.zeros((size, *value.shape), value.dtype) for name, value in row.items()}
        if population.generate is not None:
            fields = population.generate(key, row, size)
        return Batch(fields, jnp.ones(size))

    shapes = jax.eval_shape(task.init, key), jax.eval_shape(batch, row)
    found = flops_of(jax.make_jaxpr(jax.grad(task.loss))(*shapes).jaxpr)
    return found * simulation.minibatches.size / size


def flops_of(jaxpr: Any) -> float:
    """Count the floating-point operations of the matrix products of a program.

    The body of a scan counts once per iteration, and a condition as its largest branch; a loop of
    unknown length with products makes the number NaN.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name in _PRODUCTS:
            total += _analysed(equation)
            continue
        inner = [flops_of(each) for each in jaxprs_in_params(equation.params)]
        if equation.primitive.name == "cond":
            total += max(inner)
        elif equation.primitive.name == "while":
            total += math.nan if any(inner) else 0.0
        else:
            total += equation.params.get("length", 1) * sum(inner)
    return total


def _analysed(equation: Any) -> float:
    product = functools.partial(equation.primitive.bind, **equation.params)
    shapes = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in equation.invars]
    return (jax.jit(product).lower(*shapes).cost_analysis() or {}).get("flops", math.nan)
