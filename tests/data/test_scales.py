"""Public ranges and the ranges of all rows: where numbers go, and what guarantees say of it."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from sklearn.preprocessing import MinMaxScaler
from support.problems import after

import fedjaxsim as fjs
from fedjaxsim import data
from fedjaxsim.data.transforms import ranges_of

RANGES = {"age": (0.0, 100.0), "wage": (0.0, 50.0)}


def table(rows=60, clients=6, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "who": np.arange(rows) % clients,
            "age": rng.integers(18, 80, rows),
            "year": rng.integers(1960, 1990, rows),
            "sex": rng.choice(["f", "m"], rows),
            "same": 7,
        }
    )
    wage = 10 + 0.2 * frame.age + (frame.sex == "m") + 0.1 * rng.normal(size=rows)
    return frame.assign(wage=wage)


@pytest.fixture(scope="module")
def population():
    found = data.from_dataframe(table(), client="who", target="wage", one_hot=["sex"])
    return data.split(found, test=0.3, seed=1)


@pytest.mark.filterwarnings("ignore:the range")
def test_public_ranges_map_to_the_unit_interval_and_clip(population):
    narrow = data.scale(population, {"age": (30, 60), "wage": (15, 20)})
    age = population.fields["x"][:, 0].astype(float)
    want = np.clip((age - 45) / 15, -1, 1)
    np.testing.assert_allclose(narrow.fields["x"][:, 0], want, atol=1e-6)
    np.testing.assert_array_equal(narrow.fields["x"][:, 1:], population.fields["x"][:, 1:])
    # Targets of test rows are not clipped, so that errors are those of the data.
    stored = (population.fields["y"].astype(float) - 17.5) / 2.5
    train, test = (narrow.splits[name].all_rows() for name in ("train", "test"))
    np.testing.assert_allclose(narrow.fields["y"][train], np.clip(stored, -1, 1)[train], atol=1e-6)
    np.testing.assert_allclose(narrow.fields["y"][test], stored[test], atol=1e-5)
    inside = (age >= 30) & (age <= 60)
    back = narrow.columns["x"].original(narrow.fields["x"])[:, 0]
    np.testing.assert_allclose(back[inside], age[inside], atol=1e-4)
    assert narrow.columns["x"].bound == (1, np.inf, 1, 1, np.inf)
    assert "taken as public" in narrow.public[-1]
    beyond = np.mean((age < 30) | (age > 60)), np.mean(np.abs(stored) > 1)
    shares = narrow.columns["x"].clipped[0], narrow.columns["y"].clipped[0]
    np.testing.assert_allclose(shares, beyond, atol=1e-12)
    assert narrow.columns["x"].clipped[1:] == (0,) * 4
    again = data.scale(narrow, {"age": (0, 120)}).columns["x"]
    assert (again.centre[0], again.half_range[0]) == pytest.approx((60, 60))


def test_a_range_that_misses_the_rows_is_said_or_refused(population):
    age = population.fields["x"][:, 0].astype(int)
    low = int(np.sort(age)[len(age) // 5])  # a fifth of the rows lie below
    with pytest.warns(UserWarning, match=r"range .* of column 'age' misses .* of the rows") as told:
        data.scale(population, {"age": (low, 100)})
    assert f"{np.mean(age < low):.1%}" in str(told[0].message)
    with pytest.raises(ValueError, match=r"range 3000:4000 of column 'year' misses 100.0%"):
        data.scale(population, {"year": (3000, 4000)})


def test_ranges_of_all_rows_are_those_of_scikit_learn(population):
    scaled = data.scale_by_rows(population, target=True)
    rows = population.splits["train"].all_rows()
    x, y = population.fields["x"].astype(float), population.fields["y"]
    free = [0, 1]  # the others are encoded, or constant
    want = MinMaxScaler((-1, 1), clip=True).fit(x[rows][:, free]).transform(x[:, free])
    np.testing.assert_allclose(scaled.fields["x"][:, free], want, atol=1e-5)
    want = MinMaxScaler((-1, 1)).fit(y[rows, None]).transform(y[:, None])[:, 0]
    np.testing.assert_allclose(scaled.fields["y"], want, atol=1e-5)
    np.testing.assert_array_equal(scaled.fields["x"][:, 2:4], x[:, 2:4])
    assert set(scaled.fields["x"][:, 4]) == {0}
    assert scaled.columns["x"].norm == 4**0.5  # encoded columns count once


def test_clients_held_out_are_mapped_by_the_same_ranges(population):
    left, new = population.of_clients([0, 1, 2, 3]), population.of_clients([4, 5])
    scaled = data.scale_by_rows(dataclasses.replace(left, held_out=new))
    assert scaled.held_out is not None
    assert scaled.held_out.columns["x"] == scaled.columns["x"]
    assert scaled.held_out.voids_epsilon == scaled.voids_epsilon
    back = scaled.columns["x"].original(scaled.held_out.fields["x"])[:, 1]
    inside = np.abs(scaled.held_out.fields["x"][:, 1]) < 1
    np.testing.assert_allclose(back[inside], new.fields["x"][:, 1][inside], rtol=1e-6)


def test_what_ranges_were_read_from_cannot_be_taken_off(population):
    scaled = data.scale_by_rows(population)
    sentence, *_ = scaled.voids_epsilon
    turned = scaled.with_field("x", lambda rows: rows[:, :2] @ np.array([[0.6, 0.8]]).T)
    for adapted in (scaled, data.unit_rows(scaled), turned, turned.of_clients([0])):
        bare = dataclasses.replace(adapted, voids_epsilon=(), preparations=())
        assert bare.voids_epsilon == (sentence,)
    assert population.voids_epsilon == data.scale_by_rows(scaled).columns["y"].adapted_to == ()


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"aged": (0, 1)}, "no column 'aged' to scale, only .*'year'.*did you mean 'age'"),
        ({"age": (1, 1)}, "range of column 'age' must be"),
        ({"age": (0, np.inf)}, "range of column 'age' must be"),
    ],
)
def test_bad_ranges_are_refused(population, ranges, message):
    with pytest.raises(ValueError, match=message):
        data.scale(population, ranges)


def test_a_feature_named_as_the_target_is_scaled_alone():
    x, y = np.array([[0.0, 1.0], [1.0, 3.0]]), np.array([100.0, 300.0])
    columns = {"x": data.Columns(("age", "y"))}
    named = fjs.Population.from_flat({"x": x, "y": y}, [1, 1])
    named = dataclasses.replace(named, columns={**named.columns, **columns})
    assert named.columns["y"].names == ("y",)
    scaled = data.scale(named, {"y": (1, 3)})
    np.testing.assert_array_equal(scaled.fields["x"], [[0, -1], [1, 1]])
    np.testing.assert_array_equal(scaled.fields["y"], y)


def test_ranges_are_read_from_words():
    assert ranges_of(["age=0:100", "a=b=-1e3:0.5"]) == {"age": (0, 100), "a=b": (-1000, 0.5)}
    for bad in ("age", "age=1", "=0:1", "age=0:1:2", "age=a:b", "age=1:0", "age=1:inf"):
        with pytest.raises(ValueError, match="age=0:100"):
            ranges_of([bad])


def simulation(population):
    task = fjs.tasks.squared(fjs.models.linear((5,), 1))
    return fjs.Simulation(
        fjs.fedavg(task),
        population,
        fjs.full_participation(),
        fjs.Minibatches(10, epochs=1),
    )


@pytest.mark.thorough
def test_metrics_are_in_the_units_of_the_target_and_no_epsilon_covers_all_rows(population):
    public = data.scale(population, {**RANGES, "year": (1960, 1990), "same": (0, 14)})
    sim = simulation(public)
    hparams = sim.hyperparameters(learning_rate=0.1, noise_multiplier=1.0, clip=1.0)
    state = after(sim, hparams, 2)
    found = sim.evaluate(state, hparams)
    stored = sim.predict(state, hparams)["prediction"][public.source_row]
    wage = public.columns["y"].original(stored) if np.abs(stored).max() < 5 else stored
    rows = population.splits["test"].all_rows()
    error = np.mean((wage - population.fields["y"])[rows] ** 2)
    assert found.weighted_mean("squared_error") == pytest.approx(error, rel=1e-4)
    variance = np.var(population.fields["y"][rows])
    assert found.weighted_mean("nmse") == pytest.approx(error / variance, rel=1e-4)
    known = sim.guarantee(state).guarantees[0]
    assert known.epsilon is not None
    assert any("ranges of columns are given" in each for each in known.assumptions)

    partly = data.scale(population, {**RANGES, "same": (0, 14)})
    assert public.voids_epsilon == data.scale_by_rows(public).voids_epsilon == ()  # nothing is read
    none = sim.with_population(data.scale_by_rows(partly))
    for begun in (none.init(0, hparams), none.start_from(state, hparams)):
        report = none.guarantee(none.round(begun, hparams)[0])
        assert {each.epsilon for each in report.guarantees} == {None}
        assert "ranges of all rows, which no ε covers" in str(report.guarantees[0])
    assert np.isinf(none.epsilon(none.init(0, hparams)))
    with pytest.raises(ValueError, match=r"calibrated: .* ranges of all rows"):
        none.calibrate(hparams, epsilon=4.0, rounds=1)


def test_what_was_adapted_to_rows_stays_so_on_disk(population, tmp_path):
    scaled = data.scale_by_rows(population)
    data.save_npz(tmp_path / "p.npz", scaled)
    data.save_folder(tmp_path / "folder", scaled)
    for found in (data.load_npz(tmp_path / "p.npz"), data.load_folder(tmp_path / "folder")):
        assert found.voids_epsilon == scaled.voids_epsilon != ()
        assert found.of_clients([1, 2]).voids_epsilon == scaled.voids_epsilon
