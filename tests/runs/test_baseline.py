"""What a constant predicts, by scikit-learn's dummies; rare classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import accuracy_score, log_loss, mean_poisson_deviance

from fedjaxsim.data import Population
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.runs.assemble import parts_of
from fedjaxsim.runs.baseline import rare_class, worse_than_constant
from fedjaxsim.runs.settings import run_config


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
