"""Windows of a series: how they are found, and a split in time that keeps raw data apart."""

import json

import numpy as np
import pytest

from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import split
from fedjaxsim.data.tables.describe import describe, in_words
from fedjaxsim.data.tables.load import load
from fedjaxsim.data.windows import shared_windows, window_step

LENGTH = 9


def series(step, rows=(40, 25), channels=()):
    """Windows of the times 0, 1, 2, … of each client, and the time behind each as its label."""
    clients = []
    for n in rows:
        times = step * np.arange(n)[:, None] + np.arange(LENGTH)
        x = np.broadcast_to(times.reshape(n, LENGTH, *[1] * len(channels)), (n, LENGTH, *channels))
        clients.append({"x": x.astype(np.float32), "y": (times[:, -1] + 1).astype(np.float32)})
    return Population.from_clients(clients)


def times_of(population, client, name):
    rows = population.rows(client, name)
    return {*np.ravel(rows["x"]).tolist(), *rows["y"].tolist()}


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("channels", [(), (2,)])
def test_splits_in_time_share_no_raw_data_and_lose_no_row_more(step, channels):
    population = series(step, channels=channels)
    assert window_step(population) == step
    divided = split(population, validation=0.2, test=0.2, by="time")
    for client, n in enumerate((40, 25)):
        parts = [times_of(divided, client, name) for name in ("train", "validation", "test")]
        assert max(parts[0]) < min(parts[1]) <= max(parts[1]) < min(parts[2])
        assert len(divided.rows(client, "test")["y"]) == n // 5
        # One row fewer between them, and they would meet.
        closer = split(population, test=0.2, by="time", gap=-(-(LENGTH + 1) // step) - 2)
        assert times_of(closer, client, "train") & times_of(closer, client, "test")
    assert shared_windows(divided) == 0
    assert (shared_windows(split(population, test=0.2)) or 0) > 0.9


def test_rows_of_a_table_are_no_windows():
    rng = np.random.default_rng(0)
    features, codes = rng.normal(size=(40, 9)), np.eye(9)[rng.integers(0, 9, 40)]
    constant = np.repeat(rng.normal(size=(2, 9)), 20, axis=0)  # a client's rows are all alike
    encoded = np.tile([1.0, 0, 1, 0, 0, 0, 0, 1, 0], (40, 1))  # which end as they begin
    encoded[:, 4] = features[:, 0]
    numbered = np.arange(160.0).reshape(40, 4)
    for x in (features, codes, constant, encoded, np.ones((40, 9)), numbered):
        population = Population.from_flat({"x": x, "y": np.zeros(40)}, counts=[20, 20])
        assert window_step(population) is None
        assert not shared_windows(split(population, test=0.25))
        divided = split(population, test=0.25, by="time")  # without a gap
        np.testing.assert_array_equal(divided.rows(1, "test")["x"], x[35:])
        np.testing.assert_array_equal(divided.counts, [[15, 0, 5]] * 2)


def test_rows_that_are_for_testing_already_stay_behind_new_ones():
    population = split(series(1), test=0.2, by="time")
    divided = split(population, validation=0.25, by="time", gap=2)
    np.testing.assert_array_equal(divided.rows(0, "test")["y"], population.rows(0, "test")["y"])
    of_train = population.rows(0, "train")["y"]
    np.testing.assert_array_equal(divided.rows(0, "validation")["y"], of_train[-6:])
    np.testing.assert_array_equal(divided.rows(0, "train")["y"], of_train[:-8])


def test_text_is_split_in_time_unless_asked_otherwise(tmp_path):
    rng, data = np.random.default_rng(0), {}
    for user in ("a", "b"):
        text = "".join(rng.choice([*"abcdefghijklmnop"], size=120))
        data[user] = {"x": [text[k : k + 10] for k in range(100)], "y": [*text[10:110]]}
    document = {"users": [*data], "num_samples": [100, 100], "user_data": data}
    (tmp_path / "text.json").write_text(json.dumps(document))
    leaf = f"leaf:{tmp_path / 'text.json'}"
    found = load(leaf)
    np.testing.assert_array_equal(found.counts, [[70, 0, 20]] * 2)
    assert "--split-by" not in in_words(describe(found))
    asked = load(leaf, split_by="random")
    np.testing.assert_array_equal(asked.counts, [[80, 0, 20]] * 2)
    assert "of test rows share half of x with training rows" in in_words(describe(asked))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"test": 0.2, "gap": 3}, "gap needs by='time'"),
        ({"test": 0.2, "by": "place"}, "by must be"),
        ({"test": 0.2, "by": "time", "gap": 40}, "no client has rows enough for test rows"),
        ({"test": 0.2, "by": "time", "gap": -1}, "gap"),
    ],
)
def test_what_cannot_be_split_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        split(series(1), **settings)


def test_a_split_that_is_not_made_is_refused():
    with pytest.raises(ValueError, match="has no effect"):
        load("digits", test=0.0, split_by="time")
