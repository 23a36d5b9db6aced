"""A run of the command line, and the same one in Python."""

import jax
import numpy as np
import pytest

import fedjaxsim as fjs
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import read_toml

CONFIG = RunConfig(
    data="synthetic", clients=6, loss="squared", rounds=1, sampling_rate=1.0, local_steps=1,
    noise_multiplier=1.0, clip=0.2, learning_rate=0.1, lam=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def experiment():
    return prepare(CONFIG)


@pytest.fixture(scope="module")
def by_hand(experiment):
    """The simulation that somebody who knows the settings would put together."""
    made = experiment.simulation
    return fjs.Simulation(
        fjs.pmtl(made.task), made.task, made.population, fjs.everyone(6), fjs.Minibatches(10, 1)
    )


HPARAMS = fjs.Hyperparameters(
    learning_rate=0.1, lam=0.2, clip_norm=0.2, noise_multiplier=1.0, sampling_rate=1.0
)


def test_a_run_built_from_its_directory_draws_the_same_noise(experiment, by_hand, tmp_path):
    RunDirectory(tmp_path).write_config(experiment.resolved())
    again = prepare(RunConfig(**read_toml(tmp_path / "config.toml")))
    noise = experiment.simulation.noise(experiment.hparams)
    np.testing.assert_array_equal(again.simulation.noise(again.hparams), noise)
    assert np.any(by_hand.noise(HPARAMS) != noise)


def test_in_python_only_the_noise_is_another(experiment, by_hand):
    def after_a_round(simulation, hparams, common):
        state = simulation.init(0, hparams, common_noise=common)
        return jax.tree.leaves(simulation.run(state, hparams, 1)[0].shared.params)

    for common in (True, False):
        ours = after_a_round(experiment.simulation, experiment.hparams, common)
        theirs = after_a_round(by_hand, HPARAMS, common)
        assert all(map(np.allclose, ours, theirs)) == common
