"""A run of the command line, and the same one in Python."""

import importlib.metadata

import jax
import numpy as np
import pytest
from support.usual_runs import SQUARED

import fedjaxsim as fjs
from fedjaxsim.runs import build
from fedjaxsim.runs.build import prepare, versions
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.settings_files import read_toml

pytestmark = pytest.mark.usual_runs
HPARAMS = {"learning_rate": 0.1, "lam": 0.2, "clip": 0.2, "noise_multiplier": 1.0}
CONFIG = run_config(**SQUARED | HPARAMS, rounds=1)


@pytest.fixture(scope="module")
def experiment():
    return prepare(CONFIG)


@pytest.fixture(scope="module")
def by_hand(experiment):
    """The simulation of these settings, made by hand."""
    made = experiment.simulation
    return fjs.Simulation(
        fjs.pmtl(made.task), made.population, fjs.poisson(0.4), fjs.Minibatches(10, 1)
    )


def test_a_run_built_from_its_directory_draws_the_same_noise(experiment, tmp_path):
    RunDirectory(tmp_path).write_config(experiment.resolved())
    again = prepare(read_toml(tmp_path / "config.toml"))
    keys = []
    for each in (experiment, again):
        hparams = each.hparams.as_arrays()
        state = each.simulation.init(each.config.seed, hparams)
        drawn = jax.jit(each.simulation.program.draw)(state, hparams)
        keys.append(jax.random.key_data(drawn.noise))
    np.testing.assert_array_equal(*keys)


def test_the_same_seed_is_the_same_run_from_python_and_from_settings(experiment, by_hand):
    def after_a_round(simulation, hparams):
        state, _ = simulation.round(simulation.init(CONFIG.seed, hparams), hparams)
        return jax.tree.leaves(state.shared.params), simulation.guarantee(state).draws

    ours, draws = after_a_round(experiment.simulation, experiment.hparams)
    theirs, same = after_a_round(by_hand, by_hand.hyperparameters(**HPARAMS))
    assert all(map(np.allclose, ours, theirs))
    assert draws == same == experiment.draws()


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch):
    def version(name, of=importlib.metadata.version):
        if name == "fedjaxsim":
            raise importlib.metadata.PackageNotFoundError(name)
        return of(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    build._installed.cache_clear()
    assert versions()["fedjaxsim"] == fjs.__version__
