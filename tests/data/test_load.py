import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.io import savemat
from support import matlab

from fedjaxsim.data import Population, digits, from_dataframe, load, save_npz, split


def sizes(population, name):
    return population.splits[name].count.tolist()


@pytest.fixture
def own_clients(tmp_path, monkeypatch):
    """Files with two clients of ten rows each, in every format."""
    matlab.read_here(monkeypatch)
    x, y = np.arange(20.0)[:, None], np.arange(20) % 2
    population = Population.from_flat({"x": x, "y": y}, [10, 10])
    save_npz(tmp_path / "a.npz", population)
    halves = [(x[:10], y[:10]), (x[10:], y[10:])]
    cells = np.empty((2, 1, 2), dtype=object)
    for k, half in enumerate(halves):
        cells[0, 0, k], cells[1, 0, k] = half
    savemat(tmp_path / "a.mat", {"X": cells[0], "Y": cells[1]})
    data = {str(k): {"x": a.tolist(), "y": b.tolist()} for k, (a, b) in enumerate(halves)}
    leaf = {"users": ["0", "1"], "num_samples": [10, 10], "user_data": data}
    (tmp_path / "a.json").write_text(json.dumps(leaf))
    return {
        kind: f"{kind}:{tmp_path}/a.{s}"
        for kind, s in (("npz", "npz"), ("mat", "mat"), ("leaf", "json"))
    }


def test_digits_are_divided_among_a_hundred_clients():
    population = load("digits", validation=0.1)
    assert population.num_clients == 100
    assert population.num_rows == 1797
    counts = np.sum([population.splits[name].count for name in population.splits], axis=0)
    assert counts.min() >= 5
    assert population.splits["test"].count.min() >= 1  # a fifth of at least 5 rows
    assert sum(sizes(population, "validation")) > 100
    pixels = digits()["x"].sum(dtype=np.float64)
    np.testing.assert_allclose(population.fields["x"].sum(dtype=np.float64), pixels)


@pytest.mark.parametrize("partition", ["iid", "pathological", "dirichlet", "quantity"])
def test_digits_take_a_partition(partition):
    population = load("digits", partition=partition, test=0.0, seed=3, num_clients=9)
    assert population.num_clients == 9
    assert sum(sizes(population, "train")) == 1797


def test_the_seed_reaches_partition_and_split():
    first, second, other = (load("digits", seed=s).fields["x"] for s in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("kind", ["npz", "mat", "leaf"])
def test_sources_with_clients_keep_them(own_clients, kind):
    population = load(own_clients[kind], validation=0.1)
    assert [str(name) for name in population.names] == ["0", "1"]
    assert [sizes(population, name) for name in population.splits] == [[7, 7], [1, 1], [2, 2]]
    assert sorted(population.rows(1)["x"].ravel()) == list(range(10, 20))
    with pytest.raises(ValueError, match="partition"):
        load(own_clients[kind], partition="iid")


def test_cells_of_a_matlab_file_have_names(own_clients):
    population = load(own_clients["mat"], fields=("X", "Y"))
    assert sorted(population.rows(1)["x"].ravel()) == list(range(10, 20))
    with pytest.raises(ValueError, match="'feature'"):
        load(own_clients["mat"], fields=("feature", "label"))
    with pytest.raises(ValueError, match="fields"):
        load(own_clients["mat"], fields=("X",))


def test_synthetic_has_clients_of_its_own():
    population = load("synthetic", num_clients=3, test=0.5)
    assert sizes(population, "train") == sizes(population, "test") == [10] * 3
    with pytest.raises(ValueError, match="partition"):
        load("synthetic", partition="pathological")


def test_the_patterns_of_synthetic_data_bring_test_rows():
    population = load("synthetic-low-rank", num_clients=10, validation=0.2)
    assert [sizes(population, name)[0] for name in population.splits] == [24, 6, 270]
    assert load("synthetic-group-sparse", test=0.5).num_clients == 320


def test_test_rows_of_the_source_stay_unless_a_fraction_is_given(tmp_path):
    once = split(Population.from_flat({"x": np.arange(20)}, [10, 10]), test=0.3, seed=9)
    save_npz(tmp_path / "a.npz", once)
    kept = load(f"npz:{tmp_path}/a.npz", validation=0.2)
    assert [sizes(kept, name) for name in kept.splits] == [[6, 6], [1, 1], [3, 3]]
    for k in range(2):
        np.testing.assert_array_equal(kept.rows(k, "test")["x"], once.rows(k, "test")["x"])
    afresh = load(f"npz:{tmp_path}/a.npz", test=0.5)
    assert [sizes(afresh, name) for name in afresh.splits] == [[5, 5], [0, 0], [5, 5]]
    assert sizes(load(f"npz:{tmp_path}/a.npz", test=0.0), "train") == [10, 10]


def test_by_time_rows_of_the_sources_splits_are_in_its_order_again(tmp_path):
    lines = [f"{'ab'[k % 2]},{k},{k},{'test' if k < 6 else 'train'}" for k in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["who,x,y,split", *lines]))
    roles: Any = {"client": "who", "target": "y", "test": 0.2, "split_by": "time"}
    population = load(f"csv:{tmp_path / 't.csv'}", **roles)
    rows = population.splits["test"].all_rows()
    assert population.fields["y"][rows].tolist() == [16, 18, 17, 19]


def test_an_npz_without_owners_is_divided(tmp_path):
    np.savez(tmp_path / "flat.npz", x=np.arange(60), y=np.arange(60) % 3)
    population = load(f"npz:{tmp_path}/flat.npz", partition="iid", num_clients=2, test=0.0)
    assert sizes(population, "train") == [30, 30]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spec": "mnist"}, "data .*'mnist'"),
        ({"spec": "leaf"}, "data .*'leaf'"),
        ({"spec": "digits:here"}, "data .*'digits:here'"),
        ({"spec": "digits", "partition": "random"}, "partition .*'random'"),
        ({"spec": "digits", "num_clients": 0}, "num_clients"),
        (
            {"spec": "digits", "partition": "iid", "alpha": 1.0},
            "alpha",
        ),
        ({"spec": "digits", "fields": ("X", "Y")}, "fields"),
        ({"spec": "digits", "alpha": -1.0}, "alpha"),
        ({"spec": "digits", "test": 1.5}, "test"),
        ({"spec": "digits", "validation": -1.0}, "validation"),
        ({"spec": "digits", "seed": -1}, "seed"),
        ({"spec": "synthetic", "num_clients": 0}, "num_clients"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)


@pytest.mark.parametrize("kind", ["leaf", "mat", "npz"])
def test_a_missing_file_is_not_found(kind):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(f"{kind}:/nowhere")


def test_a_stream_has_clients_and_no_rows_to_divide():
    population = load("synthetic-stream", num_clients=7, offset_scale=0.5, seed=2)
    assert population.num_clients == 7
    assert population.generate is not None
    assert sizes(population, "train") == sizes(population, "test") == [1] * 7
    spread = population.fields["theta"][::2, -5:].std(axis=0)
    assert np.all((spread > 0.1) & (spread < 1.5))
    with pytest.raises(ValueError, match="rows"):
        load("synthetic-stream", test=0.2)


def test_by_a_column_of_times_the_latest_rows_are_for_testing_wherever_they_are(tmp_path):
    rng, days = np.random.default_rng(0), pd.date_range("2019-12-20", periods=40)
    frame = pd.DataFrame({"who": np.arange(40) % 5, "day": days, "x": rng.normal(size=40)})
    frame["y"] = np.arange(40.0)  # rises with the day
    frame = frame.sample(frac=1, random_state=0)
    frame.to_csv(tmp_path / "t.csv", index=False, date_format="%Y-%m-%d")
    read = {"client": "who", "target": "y", "drop": ("day",), "time": "day", "test": 0.25}
    last = frame.sort_values("day").groupby("who").tail(2).sort_values("y").y
    frame.to_parquet(tmp_path / "t.parquet")  # dates, not their texts
    for name in ("csv:t.csv", "parquet:t.parquet"):
        kind, _, file = name.partition(":")
        found = load(f"{kind}:{tmp_path / file}", **read)
        tests = found.splits["test"].all_rows()
        np.testing.assert_array_equal(np.sort(found.fields["y"][tests]), last)
        # Rows are known by their places in the file.
        np.testing.assert_array_equal(frame.y.to_numpy()[found.source_row], found.fields["y"])
    with pytest.raises(ValueError, match=r"leave it out if split_by is 'random'"):
        load(f"csv:{tmp_path / 't.csv'}", **read, split_by="random")
    frame.day = "day " + frame.y.astype(str)
    with pytest.raises(ValueError, match="must hold numbers or dates such as 2020-12-31, got 'day"):
        from_dataframe(frame, client="who", target="y", drop=["day"], time="day")
