"""Simulations that the commands of tests share, to trace and compile them once.

`fedjaxsim run` and all commands that read a run, or go on with it, assemble its simulation anew, as
each is a process. In tests they are one process. Commands that share a simulation may differ in
seeds, in what a sweep varies within one program, and in what is computed after a run.

A file of tests shares its own. Files with the mark `usual_runs` share theirs, in one process: their
commands take the settings of `support.usual_runs`.
"""

import contextlib
import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from fedjaxsim.factories import is_user_code
from fedjaxsim.runs import assemble, build, execute
from fedjaxsim.runs.sweep_runs import hyperparameters_of
from fedjaxsim.tuning import setup

_ASSEMBLE = assemble.simulation_of
_NOT_IN_PROGRAMS = {
    "seed", "partition_seed", "eval_every", "epsilon", "delta", "evaluate_privately",
    "evaluation_largest", "noise_schedule",
}  # fmt: skip


def _key(config, population):
    settings = {**config.settings()}
    unread = {*_NOT_IN_PROGRAMS, *hyperparameters_of(config)}
    if config.get("schedule", "constant") == "constant" and not config.protects_examples:
        unread.add("rounds")
    about = dataclasses.replace(population, held_out=None)
    values = [getattr(about, field.name) for field in dataclasses.fields(about)[3:]]
    left = {name: value for name, value in settings.items() if name not in unread}
    return str((left, values, jnp.result_type(float))), population.fingerprint


_USUAL: dict[Any, Any] = {}


def of_module(node) -> dict[Any, Any]:
    """Return the simulations that the tests of a module, a node of pytest, share."""
    return _USUAL if node.get_closest_marker("usual_runs") else {}


@contextlib.contextmanager
def shared(simulations: dict[Any, Any]):
    """Share simulations of equal settings and data, without code of a user, meanwhile."""

    def simulation_of(config, population, task=None):
        if any(is_user_code(part.name) for part in config.parts.values()):
            return _ASSEMBLE(config, population, task)
        key = id(task), _key(config, population)
        if key not in simulations:  # with its task, whose number nothing else gets
            simulations[key] = _ASSEMBLE(config, population, task), task
        return simulations[key][0].with_population(population)

    with pytest.MonkeyPatch.context() as patch:
        for module in (assemble, build, execute, setup):
            patch.setattr(module, "simulation_of", simulation_of)
        yield
