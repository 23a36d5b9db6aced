"""Stages: a run that starts from the state of another one, whose charges go along."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjaxsim.engine.state import SimulationState
from fedjaxsim.report.files import Record
from fedjaxsim.runs.build import Experiment, prepare, simulation_of
from fedjaxsim.runs.directory import CHECKPOINTS, CONFIG, RunDirectory
from fedjaxsim.runs.execute import about
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.simulation import Simulation


class Start(NamedTuple):
    """Where a stage starts.

    Attributes:
      state: before its first round.
      earlier: the stages before, as `config.toml` lists them: `directory`, `algorithm`, `rounds`
        and `public`, sentences that their guarantee rests on.
    """

    state: SimulationState
    earlier: list[Record]


def start_from(path: Path, experiment: Experiment) -> Start:
    """Reads the last state of a run, as that before the first round of another one.

    Where algorithm and shapes are the same it is taken as it is. Otherwise clients start from the
    models that they predicted with; see `Simulation.start_from`.

    Args:
      path: the directory of the run.
      experiment: the stage, whose data must be those of the run.

    Raises:
      FileNotFoundError: if the directory holds no run, or no state.
      ValueError: if its files are damaged, its data are others, or the stage cannot start from it.
    """
    directory = RunDirectory(path)
    tables = directory.config()
    config = RunConfig(**read_toml(path / CONFIG))
    simulation = experiment.simulation
    before = prepare(config, simulation_of(config, simulation.population))
    last = directory.checkpoints(about(before)).last()
    if last is None:
        raise directory.missing(CHECKPOINTS)
    state = last.state(before.simulation.init(config.seed, before.hparams))
    alike = config.algorithm == experiment.config.algorithm
    if alike and _shapes(before.simulation, before) == _shapes(simulation, experiment):
        state = simulation.start_from(state, experiment.hparams)
    else:
        state = simulation.start_from(state, experiment.hparams, before.simulation, before.hparams)
    stage = {
        "directory": str(path),
        "algorithm": config.algorithm,
        "rounds": last.round,
        "public": list(before.simulation.public),
    }
    return Start(state, [*tables.get("stages", []), stage])


def _shapes(simulation: Simulation, experiment: Experiment) -> Any:
    """What billboard and personal states look like."""
    key = jax.random.key(0, impl="threefry2x32")
    state = jax.eval_shape(simulation.program.init, key, experiment.hparams.as_arrays())
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state.shared, state.personal))
