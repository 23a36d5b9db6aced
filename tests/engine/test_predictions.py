"""The models that clients predict with, by hand where they are linear, and their predictions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import after, classification, least_squares, read_by, simulation_of

import fedjaxsim as fjs
from fedjaxsim.algorithms.knnper import knnper
from fedjaxsim.privacy.samplers import full_participation

VALUES = {"learning_rate": 0.05, "lam": 0.1, "clip": 1.0, "noise_multiplier": 0.0}


def simulation(name, population, task):
    minibatches = fjs.Minibatches(3, epochs=1)
    return simulation_of(name, task, population, full_participation(), minibatches)


def trained(name, population, task, rounds=3):
    sim = simulation(name, population, task)
    hparams = read_by(sim, **VALUES)
    return sim, after(sim, hparams, rounds), hparams


@functools.cache
def regression(name):
    """Three clients, their task, and a simulation that is trained on them."""
    population, task = least_squares([4, 2, 7], test=0.3)
    return population, task, *trained(name, population, task)


def owners(population):
    """The client of each row, counted out."""
    rows = np.zeros(len(population.fields["y"]), int)
    for ranges in population.splits.values():
        for client in range(population.num_clients):
            rows[ranges.rows(client)] = client
    return rows


@pytest.mark.parametrize("name", ["pmtl", pytest.param("fedavg", marks=pytest.mark.thorough)])
def test_a_linear_model_says_its_products(name):
    population, _, sim, state, hparams = regression(name)
    models = sim.models(state, hparams)
    assert models["kernel"].shape == (3, 1, 3)
    kernel = models["kernel"][owners(population), 0]
    by_hand = np.sum(kernel * population.fields["x"], axis=1)
    by_hand += np.ravel(models.get("bias", np.zeros((3, 1))))[owners(population)]
    said = sim.predict(state, hparams)
    np.testing.assert_allclose(said["prediction"], by_hand, rtol=1e-5, atol=1e-6)


def test_mean_squared_error_of_predictions_is_that_of_the_evaluation():
    population, task = least_squares([4, 2, 7], test=0.3)
    sim, state, hparams = trained("ditto", population, task)
    rows = population.splits["test"].all_rows()
    errors = (sim.predict(state, hparams)["prediction"] - population.fields["y"])[rows] ** 2
    values = sim.evaluate(state, hparams, "test").values["squared_error"]
    counts = population.splits["test"].count
    np.testing.assert_allclose(errors.mean(), np.average(values, weights=counts), rtol=1e-5)


@pytest.mark.thorough
def test_a_streamed_run_has_the_models_and_predictions_of_one_in_memory():
    population, task = least_squares([4, 2, 7], test=0.3)
    sampling, minibatches = fjs.poisson(), fjs.Minibatches(3, epochs=1)
    sim = simulation_of("pmtl", task, population, sampling, minibatches)
    hparams = read_by(sim, **VALUES, sampling_rate=0.7)
    streamed = dataclasses.replace(sim, streamed=True)
    state, same = (each.run(each.init(0, hparams), hparams, 3)[0] for each in (sim, streamed))
    for found, want in (
        (streamed.models(same, hparams), sim.models(state, hparams)),
        (streamed.predict(same, hparams), sim.predict(state, hparams)),
    ):
        for name, each in want.items():
            np.testing.assert_allclose(found[name], each, rtol=1e-5, atol=1e-6)


def test_new_rows_go_to_the_clients_of_their_names():
    population, task = classification([5, 9, 4])
    sim, state, hparams = trained("pmtl", population, task)
    said = sim.predict(state, hparams)
    probability = said["probability"]
    assert ((probability > 1 / 3 - 1e-6) & (probability <= 1)).all()  # the largest of three
    some = population.splits["test"].rows(2)
    rows = fjs.Population.from_flat(
        {name: value[some] for name, value in population.fields.items()},
        [len(some)],
        population.names[2:],
    )
    again = sim.predict(state, hparams, rows)
    np.testing.assert_array_equal(again["prediction"], said["prediction"][some])
    stranger = fjs.Population.from_flat(dict(rows.fields), [len(some)], np.array([7]))
    w = state.shared.params
    of_w = np.argmax(rows.fields["x"] @ w["kernel"].T + w["bias"], axis=1)
    np.testing.assert_array_equal(sim.predict(state, hparams, stranger)["prediction"], of_w)
    alone, state, hparams = trained("local", population, task, rounds=0)
    with pytest.raises(ValueError, match="client 7 took no part"):
        alone.predict(state, hparams, stranger)


@pytest.mark.thorough
def test_accuracy_of_predictions_from_data_is_that_of_the_evaluation():
    population, task = classification([5, 9, 4])
    sim = fjs.Simulation(knnper(task), population, full_participation())
    hparams = read_by(sim, **VALUES)
    state, _ = sim.run(sim.init(0, hparams), hparams, 2)
    rows = population.splits["test"].all_rows()
    right = (sim.predict(state, hparams)["prediction"] == population.fields["y"])[rows]
    values = sim.evaluate(state, hparams, "test").values["accuracy"]
    counts = population.splits["test"].count
    np.testing.assert_allclose(right.mean(), np.average(values, weights=counts))


def test_no_prediction_is_class_minus_one():
    _, task = classification([5, 9])
    assert task.predict is not None
    params = jax.tree.map(lambda leaf: leaf * np.nan, task.init(jax.random.key(0)))
    said = task.predict(params, {"x": jnp.ones((2, 4))})
    np.testing.assert_array_equal(said["prediction"], [-1, -1])


def test_a_task_that_says_nothing_names_the_way():
    population, task = classification([5, 9])
    sim, state, hparams = trained("pmtl", population, task._replace(predict=None), rounds=0)
    with pytest.raises(ValueError, match=r"task\._replace\(predict="):
        sim.predict(state, hparams)


def in_units(population):
    """The same rows, declared to be scaled: x by 10, y by 5 and shifted by 3."""
    x = fjs.data.Columns(("age", "pay", "size"), (1.0, 0.0, 2.0), (10.0, 10.0, 10.0))
    columns = {"x": x, "y": fjs.data.Columns(("wage",), (3.0,), (5.0,))}
    return dataclasses.replace(population, columns=columns)


def test_predictions_are_in_the_units_of_the_source():
    population, task, _, state, hparams = regression("pmtl")
    scaled = in_units(population)
    sim = simulation("pmtl", scaled, task)
    x = scaled.columns["x"].original(population.fields["x"])
    models = jax.tree.map(lambda leaf: leaf[owners(population)], sim.models(state, hparams))
    scores = np.einsum("nod,nd->no", models["kernel"], population.fields["x"]) + models["bias"]
    wanted = 3 + 5 * scores[:, 0]
    said = sim.predict(state, hparams)["prediction"]
    np.testing.assert_allclose(said, wanted, rtol=1e-4)
    # Rows as they are read, columns in another order, and those of one client.
    order = [2, 0, 1]
    rows = fjs.Population.from_flat(
        {"x": x[:, order].astype(np.float32), "y": population.fields["y"]},
        population.counts.sum(axis=1),
    )
    named = fjs.data.Columns(tuple(np.array(["age", "pay", "size"])[order].tolist()))
    rows = dataclasses.replace(rows, columns={"x": named})
    np.testing.assert_allclose(sim.predict(state, hparams, rows)["prediction"], said, rtol=1e-3)
    less = rows.with_field("x", lambda values: values[:, 1:], named.chosen(np.arange(3) > 0))
    with pytest.raises(ValueError, match="lack column 'size'"):
        sim.predict(state, hparams, less)


def test_an_encoded_value_that_does_not_occur_is_zero_and_an_unknown_one_is_refused():
    known = fjs.data.Columns(("sex=f", "sex=m", "age"), bound=(1, 1, np.inf))
    given = fjs.data.Columns(("age", "sex=m"))
    rows = np.array([[30.0, 1.0]])
    np.testing.assert_array_equal(known.aligned(rows, given), [[0, 1, 30]])
    with pytest.raises(ValueError, match="'sex=x', which the models do not know"):
        known.aligned(rows, fjs.data.Columns(("age", "sex=x")))
