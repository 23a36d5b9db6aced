"""Which arrays are taken for rows of clients, by hand."""

import numpy as np
import pytest

from fedjaxsim.data.contained_rows import contained_rows

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 5)).astype(np.float32)
Y = RNG.normal(size=60).astype(np.float32)
SHUFFLED = RNG.permutation(60)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_rows_of_any_length_are_found_in_any_order(size):
    rows = RNG.normal(size=(60, size)).astype(np.float32)
    for array in (rows[SHUFFLED], rows[SHUFFLED].T, rows[SHUFFLED].astype(np.float64)):
        assert contained_rows(array, {"x": rows}) == "x"
    assert contained_rows(RNG.normal(size=(60, size)).astype(np.float32), {"x": rows}) is None


def test_labels_are_found_in_any_order_if_they_are_numbers_of_many_digits():
    fields = {"x": X, "y": Y}
    assert contained_rows(Y[SHUFFLED], fields) == "y"
    assert contained_rows(Y[SHUFFLED[:7]], fields) is None  # fewer than 8
    halves = np.round(2 * Y) / 2
    assert contained_rows(halves[SHUFFLED], fields | {"y": halves}) is None
    whole = np.arange(60) % 3
    assert contained_rows(whole[SHUFFLED], {"y": whole}) is None


def test_each_row_of_a_large_field_counts():
    many = RNG.normal(size=(300_000, 5)).astype(np.float32)
    assert many.size > 2**20
    for row in (0, 1, 12_345, 299_999):
        assert contained_rows(many[row], {"x": many}) == "x"
    wide = RNG.normal(size=(2_000, 700)).astype(np.float32)
    wide[:, :300] = 0  # as the border of pictures
    for row in (0, 1, 777, 1_999):
        assert contained_rows(wide[row], {"x": wide}) == "x"


@pytest.mark.parametrize(
    "array",
    [2 * X, X.round(3), X[:, ::2], np.linspace(0, 1, 50), np.eye(5), np.zeros((60, 5))],
    ids=["twice", "rounded", "every other column", "a line", "ones", "zeros"],
)
def test_numbers_made_of_rows_are_not_told_from_others(array):
    assert contained_rows(array, {"x": X, "y": Y}) is None


def test_a_field_is_hashed_once_for_all_arrays_of_a_type_whatever_the_blocks(monkeypatch):
    monkeypatch.setattr("fedjaxsim.data.contained_rows._AT_ONCE", 7)
    rows = RNG.normal(size=(50, 6)).astype(np.float32)
    fields, hashes = {"x": rows}, {}
    for _ in range(3):
        assert contained_rows(RNG.normal(size=40).astype(np.float32), fields, hashes) is None
    assert len(hashes) == 1
    for row in range(50):
        assert contained_rows(rows[row], fields, hashes) == "x"
    assert len(hashes) == 1
    assert contained_rows(rows[7].astype(np.float16), fields, hashes) == "x"
    assert len(hashes) == 2


def test_numbers_beyond_those_of_a_field_need_no_hashes_of_it():
    labels, hashes = RNG.integers(0, 10, size=500).astype(np.int32), {}
    words = RNG.integers(2**32, size=(9, 5, 4), dtype=np.uint32)  # a sampler's table
    assert contained_rows(words, {"y": labels}, hashes) is None
    assert not hashes
    assert contained_rows(labels[100:140].astype(np.uint32), {"y": labels}, hashes) == "y"
    # Of a narrower type, whole numbers overflow: 300 is 44.
    assert contained_rows((labels + 300).astype(np.int8), {"y": labels + 300}) == "y"
    tall = RNG.normal(size=(60, 5)).astype(np.float32) * 1e6  # as float16, infinite
    tall[0] = np.arange(5) ** 2
    assert contained_rows(tall[0].astype(np.float16), {"x": tall}) == "x"


def test_rows_that_occur_twice_are_found():
    rows = np.concatenate([X, X[:30]])
    assert contained_rows(X[SHUFFLED], {"x": rows}) == "x"
    assert contained_rows(Y[SHUFFLED], {"y": np.concatenate([Y, Y])}) == "y"
    assert contained_rows(np.repeat(Y[:7], 3), {"y": Y}) is None  # 7 labels, however often
