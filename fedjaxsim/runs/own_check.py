"""A check of users' code on a few clients, before a run."""

import dataclasses

import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.data.ranges import SPLITS
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.runs.assemble import parts_of
from fedjaxsim.runs.build import Experiment
from fedjaxsim.runs.user_code import is_own
from fedjaxsim.simulation import Simulation
from fedjaxsim.testing import NothingTestedError, check_billboard

_CLIENTS, _ROWS, _ROUNDS = 5, 6, 2
"""Clients and rounds of the check, and rows of each client in each split."""


def check_own_code(experiment: Experiment) -> None:
    """Check that a user's algorithm, model or loss keeps clients apart; see `check_billboard`.

    Parts of the package are not checked, nor anything with `trust_own_code`.

    Raises:
      ValueError: naming what depends on another client's data.
    """
    config = experiment.config
    if config.get("trust_own_code", True):  # not a setting of parts of the package
        return
    parts = [config.parts.get(role) for role in ("algorithm", "model", "loss")]
    own = [f"{part.role} {part.name}" for part in parts if part and is_own(part.name)]
    simulation, hparams = everyone_of(experiment, _few(experiment.simulation.population))
    try:
        check_billboard(simulation, hparams, rounds=min(_ROUNDS, config.rounds))
    except AssertionError as error:
        raise ValueError(f"{' or '.join(own)} lets clients learn of each other: {error}") from error
    except NothingTestedError:  # the code does not read the data
        pass


def everyone_of(
    experiment: Experiment, population: Population
) -> tuple[Simulation, Hyperparameters]:
    """Return a simulation of these clients in memory, in each of whose rounds all take part."""
    whole = experiment.simulation
    parts = parts_of(experiment.config, population, population.num_clients, whole.task)
    simulation = dataclasses.replace(
        whole,
        algorithm=parts.algorithm,
        population=population,
        sampling=full_participation(),
        mechanism=parts.mechanism,
        accountant=None,
        devices=None,
        streamed=False,
    )
    hparams = {name: experiment.hparams.get(name) for name in simulation.records}
    return simulation, Hyperparameters(**hparams)


def _few(population: Population) -> Population:
    """Return the first rows of the first clients."""
    counts = np.minimum(population.counts[:_CLIENTS], _ROWS)
    starts = np.stack([population.splits[name].start[:_CLIENTS] for name in SPLITS], axis=1)
    pieces = zip(starts.ravel(), counts.ravel(), strict=True)
    index = np.concatenate([np.arange(start, start + count) for start, count in pieces])
    return population.of_rows(index, counts, slice(_CLIENTS))
