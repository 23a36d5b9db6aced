"""What a constant predicts, by scikit-learn's dummies; rare classes."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import accuracy_score, log_loss, mean_poisson_deviance

from fedjaxsim.data import Population
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.divergence import LESS_NOISE
from fedjaxsim.report.results import Run
from fedjaxsim.runs.assemble import parts_of
from fedjaxsim.runs.baseline import rare_class, worse_than_constant
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.sweep_results import Best, warn_of_constants


def population_of(train, test):
    y = np.concatenate([train, test])
    return Population({"y": y}, np.array([[len(train), 0, len(test)]]), np.array(["a"]))


def test_a_result_is_compared_with_the_dummies_of_scikit_learn():
    rng = np.random.default_rng(0)
    train, test = (rng.poisson(2, n).clip(0, 4).astype(np.int32) for n in (90, 40))
    population = population_of(train, test)
    columns = np.zeros((90, 1)), np.zeros((40, 1))
    prior = DummyClassifier(strategy="prior").fit(columns[0], train)
    mean = DummyRegressor().fit(columns[0], train).predict(columns[1])
    shares = prior.predict_proba(columns[1])
    wanted = {
        "test_accuracy_weighted": accuracy_score(test, prior.predict(columns[1])),
        "test_rare_class_loss_weighted": log_loss(test, shares, labels=prior.classes_),
        "test_deviance_weighted": mean_poisson_deviance(test, mean),
        "test_nmse": 1.0,
    }
    for column, value in wanted.items():
        worse, better = value * 1.001, value * 0.999
        if "accuracy" in column:
            worse, better = better, worse
        assert worse_than_constant(population, {column: better}) is None
        said = worse_than_constant(population, {column: worse})
        assert said is not None
        assert float(said.split()[-1]) == pytest.approx(value, rel=5e-3)
    assert worse_than_constant(population, {"test_nmse": None}) is None


def test_a_sweep_names_the_settings_whose_means_are_worse_than_a_constant():
    """The mean of the training rows is 2, so the deviance of a test row 2 is 0 and of 4 is 4 log 2.

    That of 4 is 2 (4 log 2 − 2), so a constant has 4 log 2 − 2 = 0.773 on average.
    """
    y = np.array([1, 3], np.int32), np.array([2, 4], np.int32)
    simulation, noise = SimpleNamespace(population=population_of(*y)), [0.0, 0.0, 1.0, 1.0]
    experiments: Any = {
        run: SimpleNamespace(simulation=simulation, noise_multiplier=z)
        for run, z in enumerate(noise)
    }
    deviances = [0.7, 0.84, 0.2, 9.0]
    runs = [
        Run(str(k), {"lam": k // 2 + 0.5}, k % 2, [{"round": 3, "test_deviance_weighted": value}])
        for k, value in enumerate(deviances)
    ]
    rows = [{"lam": lam, "mean": 1.0} for lam in (0.5, 1.5)]
    best = Best("test_deviance", ["lam"], rows, "")
    assert warn_of_constants(best, runs, experiments) == (
        "warning: of no use yet are the models of lam = 1.5: deviance 4.6, while one constant for "
        f"all has 0.773; {LESS_NOISE.format('')}",
    )
    assert warn_of_constants(best._replace(rows=rows[:1]), runs, experiments) == ()


def test_a_class_is_rare_beside_a_common_one():
    rare = population_of(np.repeat([0, 1], [97, 3]).astype(np.int32), np.zeros(1, np.int32))
    assert rare_class(rare) == "1"
    many = np.arange(40).astype(np.int32)
    assert rare_class(population_of(np.repeat(many, 3), many)) is None
    half = np.repeat([0, 1], [50, 50]).astype(np.int32)
    assert rare_class(population_of(half, half)) is None


def test_runs_are_judged_by_log_loss_if_a_class_is_rare_on_other_models_too():
    """k-NN models and others replace the task's outputs by `on_model`."""
    y, x = np.repeat([0, 1], [97, 3]).astype(np.int32), np.zeros((100, 2), np.float32)
    population = Population({"x": x, "y": y}, np.array([[100, 0, 0]]), np.array(["a"]))
    task = parts_of(run_config(algorithm="fedavg"), population, 1).algorithm.task
    assert task.on_model is not None
    assert task.model is not None
    batch = Batch({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.ones(100))
    params = jax.eval_shape(task.init, jax.random.key(0))
    for each in (task, task.on_model(task.model)):
        assert "rare_class_loss" in jax.eval_shape(each.metrics, params, batch)
