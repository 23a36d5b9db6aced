import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.data import dirichlet, iid, pathological, quantity

PARTITIONS = {
    "iid": lambda fields, m, seed: iid(fields, m, seed),
    "dirichlet": lambda fields, m, seed: dirichlet(fields, m, 0.1, seed),
    "pathological": lambda fields, m, seed: pathological(
        fields, m, 1 + len(fields["x"]) // (2 * m), seed
    ),
    "quantity": lambda fields, m, seed: quantity(fields, m, 0.1, seed),
}


@pytest.mark.parametrize("kind", PARTITIONS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_row_goes_to_exactly_one_client(kind, data):
    n = data.draw(st.integers(1, 40))
    m = data.draw(st.integers(1, n))
    seed = data.draw(st.integers(0, 2**32))
    labels = np.asarray(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    fields = {"x": np.arange(n), "y": labels}
    population = PARTITIONS[kind](fields, m, seed)
    rows = population.fields["x"].astype(int)
    np.testing.assert_array_equal(np.sort(rows), np.arange(n))
    np.testing.assert_array_equal(population.fields["y"], labels[rows])
    assert population.num_clients == m
    assert population.splits["train"].count.min() >= 1
    assert population.splits["train"].count.sum() == n


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "quantity", "pathological"])
def test_partitions_are_seeded(kind):
    fields = {"x": np.arange(200), "y": np.arange(200) % 4}
    rows = [PARTITIONS[kind](fields, 5, seed).fields["x"] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_iid_sizes_differ_by_at_most_one():
    population = iid({"x": np.arange(11)}, 4, seed=0)
    assert sorted(population.splits["train"].count) == [2, 3, 3, 3]


def test_dirichlet_counts_follow_the_beta_binomial_law():
    # Of the 10 rows of a class, client 0 gets Beta-Binomial(10, α, (m − 1) α) many. Over 3,000
    # classes no client is near empty, so no row was moved. False alarm 1e-6.
    classes, rows, m, alpha = 3000, 10, 3, 0.7
    fields = {"y": np.repeat(np.arange(classes), rows)}
    mine = dirichlet(fields, m, alpha, seed=0).rows(0)["y"]
    observed = np.bincount(np.bincount(mine, minlength=classes), minlength=rows + 1)
    law = scipy.stats.betabinom.pmf(np.arange(rows + 1), rows, alpha, (m - 1) * alpha)
    assert scipy.stats.chisquare(observed, classes * law).pvalue > 1e-6


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 100.0])
def test_dirichlet_leaves_no_client_below_its_least(alpha):
    labels = np.arange(300) % 3
    counts = dirichlet({"y": labels}, 60, alpha, seed=2, min_rows=5).splits["train"].count
    assert counts.tolist() == [5] * 60  # 60 · 5 = 300 forces equality
    assert dirichlet({"y": labels}, 60, alpha, seed=2, min_rows=3).splits["train"].count.min() >= 3


def test_the_sizes_of_a_quantity_skew_are_of_a_dirichlet_law():
    # With two clients the share of the first is Beta(α, α): of 20,000 rows, rounding is nothing.
    fields = {"x": np.zeros(20_000)}
    shares = [
        quantity(fields, 2, 0.5, seed).splits["train"].count[0] / 20_000 for seed in range(300)
    ]
    assert scipy.stats.kstest(shares, scipy.stats.beta(0.5, 0.5).cdf).pvalue > 1e-6


def test_a_quantity_skew_leaves_classes_as_they_are():
    labels = np.arange(10_000) % 4
    population = quantity({"y": labels}, 5, 1.0, seed=3, min_rows=200)
    assert population.splits["train"].count.min() >= 200
    for k in range(5):
        observed = np.bincount(population.rows(k)["y"], minlength=4)
        assert scipy.stats.chisquare(observed).pvalue > 1e-6


def test_quantity_leaves_no_client_below_its_least():
    assert (
        quantity({"x": np.zeros(30)}, 6, 1e-3, seed=2, min_rows=5).splits["train"].count.tolist()
        == [5] * 6
    )


def test_shards_give_two_classes_per_client():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 12))
    population = pathological({"y": labels}, 10, 2, seed=0)  # 20 shards of 6, each within one class
    assert population.splits["train"].count.tolist() == [12] * 10
    for k in range(10):
        classes, rows = np.unique(population.rows(k)["y"], return_counts=True)
        assert len(classes) <= 2
        assert set(rows) <= {6, 12}


FIELDS = {"x": np.zeros((6, 2)), "y": np.arange(6)}
ODD = np.array([0.0, np.nan, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(FIELDS, 0, 0), "num_clients"),
        (lambda: iid(FIELDS, 7, 0), "num_clients"),
        (lambda: iid(FIELDS, 2.0, 0), "num_clients"),  # pyright: ignore
        (lambda: iid(FIELDS, 2, -1), "seed"),
        (lambda: iid({"x": np.zeros(3), "y": np.zeros(2)}, 2, 0), "'x'.*'y'"),
        (lambda: iid({}, 2, 0), "no fields"),
        (lambda: dirichlet(FIELDS, 2, 0.0, 0), "alpha"),
        (lambda: dirichlet(FIELDS, 2, float("nan"), 0), "alpha"),
        (lambda: dirichlet(FIELDS, 3, 1.0, 0, min_rows=3), "num_clients"),
        (lambda: dirichlet({"x": np.zeros(6)}, 3, 1.0, 0), "'y'"),
        (lambda: dirichlet({"y": np.zeros((6, 2))}, 3, 1.0, 0), "one value per row"),
        (lambda: pathological({"y": ODD}, 3, 1, 0), "finite"),
        (lambda: pathological(FIELDS, 3, 3, 0), "shards_per_client"),
        (lambda: quantity(FIELDS, 2, -1.0, 0), "alpha"),
        (lambda: quantity(FIELDS, 3, 1.0, 0, min_rows=3), "num_clients"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
