"""The models that clients predict with, their predictions and coefficients, by hand if linear."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from support.problems import after, classification, compilations, read_by, simulation_of

import fedjaxsim as fjs
from fedjaxsim.algorithms.knnper import knnper
from fedjaxsim.models import linear
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.tasks import softmax, squared

VALUES = {"learning_rate": 0.05, "lam": 0.1, "clip": 1.0, "noise_multiplier": 0.0}


def simulation(name, population, task):
    minibatches = fjs.Minibatches(3, epochs=1)
    return simulation_of(name, task, population, full_participation(), minibatches)


def trained(name, population, task, rounds=3):
    sim = simulation(name, population, task)
    hparams = read_by(sim, **VALUES)
    return sim, after(sim, hparams, rounds), hparams


def regression(sim):
    """The population of a shared simulation, its state after two rounds, and hyperparameters."""
    hparams = read_by(sim, **VALUES)
    return sim.population, after(sim, hparams, 2), hparams


def owners(population):
    """The client of each row, counted out."""
    rows = np.zeros(len(population.fields["y"]), int)
    for ranges in population.splits.values():
        for client in range(population.num_clients):
            rows[ranges.rows(client)] = client
    return rows


def stored(population, values):
    """Values in the order of the source's rows, in that of the population's."""
    return values[population.source_row]


@pytest.mark.usefixtures("every_program")
@pytest.mark.parametrize("name", ["pmtl", pytest.param("fedavg", marks=pytest.mark.thorough)])
def test_a_linear_model_says_its_products(shared_pmtl, shared_fedavg, name):
    sim = {"pmtl": shared_pmtl, "fedavg": shared_fedavg}[name]
    population, state, hparams = regression(sim)
    models = sim.models(state, hparams)
    assert models["kernel"].shape == (5, 1, 3)
    kernel = models["kernel"][owners(population), 0]
    by_hand = np.sum(kernel * population.fields["x"], axis=1)
    by_hand += np.ravel(models.get("bias", np.zeros((5, 1))))[owners(population)]
    said = sim.predict(state, hparams)
    said = {name: stored(population, values) for name, values in said.items()}
    np.testing.assert_allclose(said["prediction"], by_hand, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(said["client"], owners(population))
    np.testing.assert_array_equal(said["row"], population.source_row)
    with compilations() as programs:  # nothing is compiled again, whatever reports name
        other = state.announce(sentences=["a sentence from a callback"])
        sim.predict(other, hparams)
        sim.models(other, hparams)
    assert not programs


def test_mean_squared_error_of_predictions_is_that_of_the_evaluation(shared_pmtl):
    sim = shared_pmtl
    population, state, hparams = regression(sim)
    rows = population.splits["test"].all_rows()
    predicted = stored(population, sim.predict(state, hparams)["prediction"])
    errors = (predicted - population.fields["y"])[rows] ** 2
    values = sim.evaluate(state, hparams, "test").values["squared_error"]
    counts = population.splits["test"].count
    np.testing.assert_allclose(errors.mean(), np.average(values, weights=counts), rtol=1e-5)


@pytest.mark.thorough
def test_a_streamed_run_has_the_models_and_predictions_of_one_in_memory(
    shared_pmtl, shared_streamed
):
    sim, streamed = shared_pmtl, shared_streamed
    hparams = read_by(sim, **VALUES, sampling_rate=0.7)
    state, same = (each.run(each.init(0, hparams), hparams, 2)[0] for each in (sim, streamed))
    for found, want in (
        (streamed.models(same, hparams), sim.models(state, hparams)),
        (streamed.predict(same, hparams), sim.predict(state, hparams)),
    ):
        np.testing.assert_array_equal(found.pop("split", None), want.pop("split", None))
        for name, each in want.items():
            np.testing.assert_allclose(found[name], each, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_new_rows_go_to_the_clients_of_their_names():
    population, task = classification([5, 9, 4])
    sim, state, hparams = trained("pmtl", population, task)
    said = {name: stored(population, v) for name, v in sim.predict(state, hparams).items()}
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
    with pytest.raises(ValueError, match="client '7' took no part"):
        alone.predict(state, hparams, stranger)


@pytest.mark.thorough
def test_accuracy_of_predictions_from_data_is_that_of_the_evaluation():
    population, task = classification([5, 9, 4])
    sim = fjs.Simulation(knnper(task), population, full_participation())
    hparams = read_by(sim, **VALUES)
    state, _ = sim.run(sim.init(0, hparams), hparams, 2)
    rows = population.splits["test"].all_rows()
    predicted = stored(population, sim.predict(state, hparams)["prediction"])
    right = (predicted == population.fields["y"])[rows]
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


@pytest.mark.usefixtures("every_program")
def test_predictions_are_in_the_units_of_the_source(shared_pmtl):
    population, state, hparams = regression(shared_pmtl)
    scaled = in_units(population)
    sim = shared_pmtl.with_population(scaled)
    x = scaled.columns["x"].original(population.fields["x"])
    models = jax.tree.map(lambda leaf: leaf[owners(population)], sim.models(state, hparams))
    scores = np.einsum("nod,nd->no", models["kernel"], population.fields["x"]) + models["bias"]
    wanted = 3 + 5 * scores[:, 0]
    shared_pmtl.predict(state, hparams)
    with compilations() as programs:  # other data share the programs
        said = stored(scaled, sim.predict(state, hparams)["prediction"])
    assert not programs
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


def test_an_encoded_value_that_does_not_occur_is_zero_and_an_unknown_one_counts_as_none():
    known = fjs.data.Columns(("sex=f", "sex=m", "age"), bound=(1, 1, np.inf))
    given = fjs.data.Columns(("age", "sex=m"))
    rows = np.array([[30.0, 1.0]])
    np.testing.assert_array_equal(known.aligned(rows, given), [[0, 1, 30]])
    with pytest.warns(UserWarning, match=r"nothing of 'sex=x' \(1 rows\), which count as none"):
        none = known.aligned(rows, fjs.data.Columns(("age", "sex=x")))
    np.testing.assert_array_equal(none, [[0, 0, 30]])


# --- the law: in the order and the units of the frame ---------------------------------------------


def frame_of(seed):
    """A random table: clients in any order, columns of unlike units, a shuffled index."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(["ann", "bob", "cy", "dee"])
    who = rng.permutation(np.repeat(names, [7, 12, 6, 9]))
    frame = pd.DataFrame({"year": rng.uniform(1950, 2010, 34), "who": who})
    frame["pay"] = rng.lognormal(9, 1, 34)
    slopes = dict(zip(names, rng.normal(0, 3, 4), strict=True))
    noise = rng.normal(0, 5, 34)
    frame["y"] = frame.who.map(slopes) * (frame.year - 1980) + 1e-3 * frame["pay"] + noise
    frame.index = rng.permutation(34) + 100
    return frame


def ends(column, margin=1.0):
    return float(column.min()) - margin, float(column.max()) + margin


def by_least_squares(frame):
    """Intercept and slopes of each client's table by numpy, and the fitted values."""
    fitted, found = pd.Series(0.0, frame.index), {}
    for name, rows in frame.groupby("who"):
        design = np.column_stack([np.ones(len(rows)), rows.year, rows["pay"]])
        found[name] = np.linalg.lstsq(design, rows.y, rcond=None)[0]
        fitted[rows.index] = design @ found[name]
    return found, fitted


def with_least_squares(sim, population, state):
    """The state whose personal models are each client's least squares on the *stored* rows."""
    kernels, biases = [], []
    for client in range(population.num_clients):
        rows = population.rows(client)
        design = np.column_stack([np.ones(len(rows["y"])), rows["x"]]).astype(np.float64)
        first, *others = np.linalg.lstsq(design, rows["y"], rcond=None)[0]
        kernels.append([others])
        biases.append([first])
    models = {"kernel": jnp.asarray(kernels, float), "bias": jnp.asarray(biases, float)}
    assert jax.tree.structure(state.personal) == jax.tree.structure(models)
    return dataclasses.replace(state, personal=models)


@functools.cache
def fitting():
    """A simulation whose clients keep a linear model, and its first state."""
    population = table_of_frame(frame_of(0))
    task = squared(linear((2,), 1))
    sim = fjs.Simulation(
        fjs.local(task), population, full_participation(), mechanism=fjs.no_release()
    )
    hparams = sim.hyperparameters()
    return sim, hparams, sim.init(0, hparams)


def table_of_frame(frame, split=0.0):
    population = fjs.data.from_dataframe(frame, client="who", target="y")
    ranges = {name: ends(frame[name]) for name in ("year", "pay", "y")}
    scaled = fjs.data.scale(population, ranges)
    return fjs.data.split(scaled, test=split, seed=1) if split else scaled


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(k, marks=pytest.mark.thorough) for k in range(3, 301))]
)
def test_predictions_and_coefficients_are_those_of_least_squares_on_the_frame(seed):
    frame = frame_of(seed)
    wanted, fitted = by_least_squares(frame)
    # Rows that a split has moved come back to their places, too.
    population = table_of_frame(frame, split=0.3 * (seed % 2))
    first, hparams, begin = fitting()
    sim = first.with_population(population)
    state = with_least_squares(sim, population, begin)
    said = sim.predict(state, hparams)
    frame["said"] = said["prediction"]
    np.testing.assert_allclose(frame.said, fitted, rtol=1e-3, atol=0.02 * np.ptp(frame.y))
    assert np.corrcoef(frame.said, fitted)[0, 1] > 0.99999
    np.testing.assert_array_equal(said["client"], frame.who)
    np.testing.assert_array_equal(said["row"], np.arange(len(frame)))
    table = pd.DataFrame(sim.coefficients(state, hparams)).set_index("client")
    assert [*table] == ["intercept", "year", "pay"]
    for name, numbers in wanted.items():
        np.testing.assert_allclose(table.loc[name], numbers, rtol=2e-3, atol=1e-6)


def test_new_rows_without_a_target_are_predicted_in_their_order_and_counted_if_clipped():
    sim, hparams, begin = fitting()
    state = with_least_squares(sim, sim.population, begin)
    wanted, _ = by_least_squares(frame_of(0))
    rows = pd.DataFrame(
        {"pay": [5e3, 1e9, 6e3], "who": ["dee", "ann", "bob"], "year": [1980.0, 1990.0, 2000.0]}
    )
    said = sim.predict(state, hparams, fjs.data.from_dataframe(rows, client="who", target=None))
    np.testing.assert_array_equal(said["client"], rows.who)
    np.testing.assert_array_equal(said["clipped"], [False, True, False])
    for place in (0, 2):
        first, year, pay = wanted[rows.who[place]]
        by_hand = first + year * rows.year[place] + pay * rows["pay"][place]
        assert said["prediction"][place] == pytest.approx(by_hand, rel=1e-3)
    stranger = rows.assign(who="eve")
    with pytest.raises(ValueError, match="'eve' took no part"):
        sim.predict(state, hparams, fjs.data.from_dataframe(stranger, client="who", target=None))


def test_classes_have_their_names_in_predictions_and_coefficients():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.uniform(0, 4, 12), "who": ["a", "b"] * 6})
    frame["kind"] = ["low", "mid", "up"] * 4
    population = fjs.data.scale(
        fjs.data.from_dataframe(frame, client="who", target="kind"), {"x": (0, 4)}
    )
    sim = fjs.Simulation(
        fjs.local(softmax(linear((1,), 3), 3)),
        population,
        full_participation(),
        mechanism=fjs.no_release(),
    )
    hparams = sim.hyperparameters()
    state = sim.init(0, hparams)
    # On the stored scale client a scores (s, 0, −s), client b the opposite; s = (x − 2)/2.
    kernel = jnp.array([[[1.0], [0.0], [-1.0]], [[-1.0], [0.0], [1.0]]])
    state = dataclasses.replace(state, personal={"kernel": kernel, "bias": jnp.zeros((2, 3))})
    said = sim.predict(state, hparams)["prediction"]
    up = (frame.x > 2) == (frame.who == "a")
    np.testing.assert_array_equal(said, np.where(up, "low", "up"))
    table = pd.DataFrame(sim.coefficients(state, hparams)).set_index(["client", "class"])
    assert table.loc[("a", "low")].to_dict() == {"intercept": -1.0, "x": 0.5}
    assert table.loc[("b", "low")].to_dict() == {"intercept": 1.0, "x": -0.5}
    assert table.loc[("a", "mid")].to_dict() == {"intercept": 0.0, "x": 0.0}
