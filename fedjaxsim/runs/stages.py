"""Stages: a run that starts from the state of another one, whose charges go along."""

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.report.files import Record
from fedjaxsim.runs.assemble import population_of, simulation_of
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.directory import CHECKPOINTS, CONFIG, RunDirectory
from fedjaxsim.runs.execute import about, stage_of
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import read_toml

PERSONAL = (
    "A client's model is its own, and so are predictions by it: the run's guarantee covers it "
    "against the other clients, not against a reader of this file."
)
PUBLISHED = "All clients have the model that the run published, which its guarantee covers."


class Trained(NamedTuple):
    """A run and its last state.

    Attributes:
      experiment: the run.
      state: its last state.
      round: the round of the state.
      skipped: whether a later checkpoint is damaged.
    """

    experiment: Experiment
    state: SimulationState
    round: int
    skipped: bool

    @property
    def whose(self) -> str:
        """A sentence on whose the models are."""
        algorithm = self.experiment.simulation.algorithm
        shared = not self.state.personal and algorithm.predict_with_data is None
        return PUBLISHED if shared and self.experiment.config.algorithm != "naive-dp" else PERSONAL


def trained(path: Path, population: Population | None = None) -> Trained:
    """Read the last state of the run in a directory; by default, load its data.

    Raises:
      FileNotFoundError: if the directory holds no run, no state, or its data are missing.
      ValueError: if its files are damaged, or its data are others.
    """
    directory, config = RunDirectory(path), read_toml(path / CONFIG)
    population = population_of(config) if population is None else population
    experiment = prepare(config, simulation_of(config, population))
    last = directory.checkpoints(about(experiment)).last()
    if last is None:
        raise directory.missing(CHECKPOINTS)
    state = last.state(experiment.init())
    return Trained(experiment, state, last.round, bool(last.skipped))


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
    new = _new_clients(config, experiment.config)
    last = trained(path, None if new else experiment.simulation.population)
    before, state = last.experiment, last.state
    if last.skipped or directory.released() > last.round:
        # A stage from an older state would not be charged for the rounds since.
        least = max(directory.released(), last.round)
        raise ValueError(
            f"{path} released {least} rounds, and its last whole checkpoint is of round "
            f"{last.round}: first run fedjaxsim resume {shlex.quote(str(path))} --rounds {least}"
        )
    alike = config.algorithm == experiment.config.algorithm
    alike = alike and not experiment.simulation.algorithm.warm_start.required
    if alike and not new and _shapes(before) == _shapes(experiment):
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
