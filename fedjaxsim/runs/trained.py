"""The last state of a run, with the simulation that made it."""

from pathlib import Path
from typing import NamedTuple

from fedjaxsim.engine.state import SimulationState
from fedjaxsim.runs.assemble import population_of, simulation_of
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.directory import CHECKPOINTS, CONFIG, RunDirectory
from fedjaxsim.runs.execute import about
from fedjaxsim.runs.settings_files import read_toml

PERSONAL = (
    "A client's model is its own, and so are predictions by it: the run's guarantee covers it "
    "against the other clients, not against a reader of this file."
)
PUBLISHED = "All clients have the model that the run published, which its guarantee covers."


class Trained(NamedTuple):
    """A run and its last state."""

    experiment: Experiment
    state: SimulationState

    @property
    def whose(self) -> str:
        """A sentence on whose the models are."""
        algorithm = self.experiment.simulation.algorithm
        shared = not self.state.personal and algorithm.predict_with_data is None
        return PUBLISHED if shared and self.experiment.config.algorithm != "naive-dp" else PERSONAL


def trained(path: Path) -> Trained:
    """Read the last state of the run in a directory.

    Raises:
      FileNotFoundError: if the directory holds no run, no state, or its data are missing.
      ValueError: if its files are damaged, or its data are others.
    """
    directory, config = RunDirectory(path), read_toml(path / CONFIG)
    experiment = prepare(config, simulation_of(config, population_of(config)))
    last = directory.checkpoints(about(experiment)).last()
    if last is None:
        raise directory.missing(CHECKPOINTS)
    return Trained(experiment, last.state(experiment.init()))
