import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.data import Population, limit_training_rows, split


def numbered(counts, **kwargs):
    """A population whose feature is the row's number and whose label is the client's."""
    total = int(np.sum(counts))
    owners = np.repeat(np.arange(len(counts)), counts)
    return Population.from_flat({"x": np.arange(total), "y": owners}, counts, **kwargs)


@pytest.mark.parametrize(
    ("rows", "validation", "test", "expected"),
    [
        (10, 0.1, 0.2, (7, 1, 2)),
        (10, 0.0, 0.0, (10, 0, 0)),
        (4, 0.0, 0.1, (4, 0, 0)),
        (5, 0.0, 0.1, (4, 0, 1)),  # half a row is rounded up
        (1, 0.4, 0.5, (1, 0, 0)),
        (2, 0.4, 0.5, (1, 0, 1)),  # validation gives up its row first
        (3, 0.45, 0.5, (1, 0, 2)),
    ],
)
def test_split_rounds_and_keeps_a_training_row(rows, validation, test, expected):
    divided = split(numbered([rows]), validation=validation, test=test)
    assert tuple(int(r.count[0]) for r in divided.splits.values()) == expected


@settings(deadline=None, max_examples=50)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    validation=st.floats(0, 0.49),
    test=st.floats(0, 0.49),
    seed=st.integers(0, 2**32),
)
def test_split_conserves_every_clients_rows(counts, validation, test, seed):
    population = numbered(counts)
    divided = split(population, validation=validation, test=test, seed=seed)
    np.testing.assert_array_equal(divided.names, population.names)
    for k, count in enumerate(counts):
        parts = [divided.rows(k, name) for name in ("train", "validation", "test")]
        assert len(parts[0]["x"]) >= 1
        rows = np.concatenate([part["x"] for part in parts])
        np.testing.assert_array_equal(rows, divided.rows(k)["x"])
        np.testing.assert_array_equal(np.sort(rows), population.rows(k)["x"])
        assert divided.rows(k)["y"].tolist() == [k] * count


@pytest.mark.parametrize("others", [[11, 9, 1], [9, 9], [1, 9, 9, 2000, 7]])
def test_split_of_a_client_does_not_depend_on_the_others(others):
    first = split(numbered([3, 9, 4]), validation=0.2, test=0.3, seed=5)
    second = split(numbered(others), validation=0.2, test=0.3, seed=5)
    for name in ("train", "validation", "test"):
        np.testing.assert_array_equal(
            first.rows(1, name)["x"] - 3, second.rows(1, name)["x"] - others[0], strict=True
        )


def test_split_of_many_clients_is_that_of_each(monkeypatch):
    counts = np.random.default_rng(0).integers(1, 9, 200)
    whole = split(numbered(counts), test=0.4, seed=3)
    monkeypatch.setattr("fedjaxsim.data.splitting._BLOCK", 10)
    blocks = split(numbered(counts), test=0.4, seed=3)
    np.testing.assert_array_equal(whole.fields["x"], blocks.fields["x"])


def test_split_of_nothing_leaves_a_population_as_it_is():
    population = numbered([3, 4])
    assert split(population, seed=1) is population


def test_split_is_seeded():
    population = numbered([50, 50])
    again = [split(population, test=0.5, seed=seed).fields["x"] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(again[0], again[1])
    assert not np.array_equal(again[0], again[2])
    clients = split(population, test=0.5)
    assert not np.array_equal(clients.rows(0)["x"], clients.rows(1)["x"] - 50)


def test_split_takes_every_row_equally_often():
    # Which of 5 rows is tested on, for 2,000 clients: false alarm 1e-6.
    divided = split(numbered([5] * 2000), test=0.2, seed=0)
    tested = divided.fields["x"][divided.splits["test"].start] % 5
    observed = np.bincount(tested.astype(int), minlength=5)
    assert scipy.stats.chisquare(observed).pvalue > 1e-6


def test_orders_of_neighbours_are_uniform_and_independent():
    # The order of 3 rows in a client and in the next one, 36 cells: false alarm 1e-6.
    divided = split(numbered([3] * 20_000), test=0.4, seed=1)
    ranks = divided.fields["x"].reshape(-1, 6) % 3
    order = ranks[:, [0, 3]] * 2 + (ranks[:, [1, 4]] > ranks[:, [2, 5]])
    observed = np.bincount((order[:, 0] * 6 + order[:, 1]).astype(int), minlength=36)
    assert scipy.stats.chisquare(observed).pvalue > 1e-6


def test_split_keeps_the_rows_that_a_split_has_already():
    once = split(numbered([10, 20]), test=0.2, seed=3)
    twice = split(once, validation=0.25, seed=4)
    for k in range(2):
        np.testing.assert_array_equal(twice.rows(k, "test")["x"], once.rows(k, "test")["x"])
        assert sorted(np.r_[twice.rows(k, "train")["x"], twice.rows(k, "validation")["x"]]) == (
            sorted(once.rows(k, "train")["x"])
        )
    assert twice.splits["validation"].count.tolist() == [2, 4]
    with pytest.raises(ValueError, match="test"):
        split(once, test=0.1)


def test_a_limit_leaves_random_training_rows_and_all_others():
    whole = split(numbered([10, 3, 20]), validation=0.2, test=0.2)
    limited, fewer = limit_training_rows(whole, 5), limit_training_rows(whole, 2)
    assert limited.counts.tolist() == [[5, 2, 2], [1, 1, 1], [5, 4, 4]]
    for client in range(3):
        rows = {name: whole.rows(client, name)["x"].tolist() for name in whole.splits}
        left = limited.rows(client, "train")["x"].tolist()
        assert left == [row for row in rows["train"] if row in left]  # in their order
        assert {*fewer.rows(client, "train")["x"].tolist()} <= {*left}
        for name in ("validation", "test"):
            assert limited.rows(client, name)["x"].tolist() == rows[name]
    alone = limit_training_rows(whole.of_clients([0]), 5)
    np.testing.assert_array_equal(alone.rows(0)["x"], limited.rows(0)["x"])
    # Each of 4 rows is left equally often, for 2,000 clients: false alarm 1e-6.
    left = limit_training_rows(numbered([4] * 2000), 1).fields["x"] % 4
    assert scipy.stats.chisquare(np.bincount(left.astype(int))).pvalue > 1e-6
    with pytest.raises(ValueError, match="most"):
        limit_training_rows(whole, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"test": 1.0}, "test"),
        ({"validation": -0.1}, "validation"),
        ({"test": float("nan")}, "test"),
        ({"test": 0.5, "validation": 0.5}, "0.5"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_split_checks_its_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        split(numbered([4]), **arguments)
