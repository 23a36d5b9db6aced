"""Stages: a run that starts from the state of another one, whose charges go along."""

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjaxsim.engine.state import SimulationState
from fedjaxsim.report.files import Record
from fedjaxsim.runs.assemble import population_of, simulation_of
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.directory import CHECKPOINTS, CONFIG, RunDirectory
from fedjaxsim.runs.execute import about, stage_of
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import read_toml


class Start(NamedTuple):
    """Start of a stage: the state before its first round, and `stage_of` each stage before."""

    state: SimulationState
    earlier: list[Record]


def start_from(path: Path, experiment: Experiment) -> Start:
    """Start a stage from the last state of the run in a directory, on the same data.

    With the same algorithm and shapes the state is taken as it is, unless the algorithm starts from
    published models. Otherwise clients start from the models that they predicted with; see
    `Simulation.start_from`.

    Raises:
      FileNotFoundError: if the directory holds no run, or no state.
      ValueError: if its files are damaged, its data are others, or the stage cannot start from it.
    """
    directory = RunDirectory(path)
    tables, config = directory.config(), read_toml(path / CONFIG)
    population = experiment.simulation.population
    if _new_clients(config, experiment.config):
        population = population_of(config)
    before = prepare(config, simulation_of(config, population))
    last = directory.checkpoints(about(before)).last()
    if last is None:
        raise directory.missing(CHECKPOINTS)
    if last.skipped or directory.released() > last.round:
        # A stage from an older state would not be charged for the rounds since.
        least = max(directory.released(), last.round)
        raise ValueError(
            f"{path} released {least} rounds, and its last whole checkpoint is of round "
            f"{last.round}: first run fedjaxsim resume {shlex.quote(str(path))} --rounds {least}"
        )
    state = last.state(before.init())
    alike = config.algorithm == experiment.config.algorithm
    alike = alike and not experiment.simulation.algorithm.warm_start.required
    alike = alike and not _new_clients(config, experiment.config)
    if alike and _shapes(before) == _shapes(experiment):
        state = experiment.simulation.start_from(state, experiment.hparams)
    else:
        state = _begin(state, before, experiment)
    state = experiment.with_budget(state)
    return Start(state, [*tables.get("stages", []), stage_of(before, last.round, path)])


def _begin(state: SimulationState, before: Experiment, experiment: Experiment) -> SimulationState:
    simulation, hparams = experiment.simulation, experiment.hparams
    if not _new_clients(before.config, experiment.config):
        return simulation.start_from(state, hparams, before.simulation, before.hparams)
    earlier, later = (each.simulation.population.names for each in (before, experiment))
    if np.isin(later, earlier).any():
        raise ValueError(
            "held-out clients of the stage took part in the run before: data, seed and "
            "held-out-clients must be as there"
        )
    return simulation.start_new_clients(state, hparams, before.simulation)


def _new_clients(before: RunConfig, config: RunConfig) -> bool:
    """Return whether a stage is of clients who were held out of the run before."""
    return (before.clients_used, config.clients_used) == ("kept", "held-out")


def with_delta_of(config: RunConfig, delta: float) -> RunConfig:
    """Return the settings of new clients with the δ of the run before, unless one is given.

    The default would follow from the number of new clients.
    """
    return config if config.get("delta") is not None else config.replace(delta=delta)


def _shapes(experiment: Experiment) -> Any:
    state = experiment.state_shapes
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state.shared, state.personal))
