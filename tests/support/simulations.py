"""Simulations that many tests share: a new one costs seconds to trace and to compile.

A test takes one as a fixture of `support.session`. All have five clients of unequal sizes, in
chunks of two: partial batches, padding, and an odd number to divide over devices. Hyperparameters,
seeds, schedules and, by `with_population`, data of the same shapes compile nothing. A test that
replaces a function of the package makes a simulation of its own.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import split
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import Task
from support.problems import least_squares, simulation_of

Kind = Literal["memory", "full participation", "devices", "streamed"]
COUNTS = [8, 11, 13, 6, 10]
"""Rows of each client, of the splits train, validation and test together."""
BATCHES = Minibatches(4, epochs=1)
PLACEMENTS: tuple[Kind, ...] = ("memory", "devices", "streamed")
SEGMENT = 2
"""Rounds between two evaluations, in all tests: each length is compiled once."""
VALUES = {
    "learning_rate": 0.1, "lam": 0.3, "mu": 0.2, "clip": 0.4, "noise_multiplier": 0.5,
    "sampling_rate": 0.6,
}  # fmt: skip
"""Hyperparameters for `read_by`; with a sampling rate of 1 everyone takes part."""
NAMED = {
    "fedavg": ("fedavg", "memory"),
    "full": ("fedavg", "full participation"),
    "pmtl": ("pmtl", "memory"),
    "ppsgd": ("ppsgd", "memory"),
    "local": ("local", "memory"),
    "mpmtl": ("mpmtl", "memory"),
    "streamed": ("pmtl", "streamed"),
}
"""Those that have a fixture of their own, `shared_fedavg` and so on."""


@functools.cache
def problem() -> tuple[Population, Task]:
    """Return the population and the task of all."""
    population, task = least_squares(COUNTS)
    return split(population, test=0.3, validation=0.2), task


def shared(name: str, kind: Kind = "memory") -> Simulation:
    """Return the simulation of a system; one in float64 inside `jax.enable_x64`."""
    return _shared(name, kind, jnp.result_type(float))


@functools.cache
def _shared(name, kind, dtype) -> Simulation:
    del dtype
    settings = {"devices": {"devices": jax.devices()[:2]}, "streamed": {"streamed": True}}
    sampling = full_participation() if kind == "full participation" else poisson(1.0)
    population, task = problem()
    return simulation_of(
        name, task, population, sampling, BATCHES, chunk_size=2, **settings.get(kind, {})
    )


def group_of(item) -> str:
    """Return the group of tests that run in one process.

    It is that of the shared simulations with a name, of one other system, of the usual runs, of
    what the files of the package say, of a notebook, whose programs no other has, or of a file.
    """
    if "sources" in item.fixturenames:
        return "sources"
    if item.path.name == "test_notebooks.py":
        return item.name
    if any(fixture.startswith("shared_") for fixture in item.fixturenames):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        return parameters.get("shared_system", "shared")
    if item.get_closest_marker("usual_runs"):
        return "usual runs"
    return item.nodeid.split("::")[0]
