"""Random rows: their shapes and sizes, which are all that matters."""

import numpy as np
import pytest

from fedjaxsim.data import load
from fedjaxsim.data.synthetic import random_rows


def test_rows_have_the_shape_and_the_labels_asked_for():
    found = random_rows(5, (4, 3), (20,), labels=7, seed=1)
    assert found.fields["x"].shape == (100, 4, 3)
    assert found.fields["x"].dtype == np.float32
    assert found.splits["train"].count.tolist() == [20] * 5
    assert set(np.unique(found.fields["y"])) == set(range(7))
    again = random_rows(5, (4, 3), (20,), labels=7, seed=1)
    np.testing.assert_array_equal(found.fields["x"], again.fields["x"])


def test_writers_are_as_many_and_as_large_as_those_of_femnist():
    counts = random_rows(206, (1,), (5, 69)).splits["train"].count
    assert (counts.min(), counts.max()) == (5, 69)
    # The 206 writers have 6,237 images.
    assert counts.sum() == pytest.approx(6237, rel=0.01)


def test_every_token_has_a_label():
    found = random_rows(2, (6,), (3,), labels=4, tokens=9)
    assert found.fields["x"].shape == found.fields["y"].shape == (6, 6)
    assert found.fields["x"].max() < 9
    assert found.fields["y"].max() < 4


def test_a_fifth_of_the_rows_is_for_testing():
    splits = load("random", num_clients=3, rows=(10,)).splits
    assert splits["test"].count.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_clients": 0}, "clients"),
        ({"shape": (3, 0)}, "shape"),
        ({"shape": ()}, "shape"),
        ({"labels": 1}, "labels"),
        ({"rows": (5, 2)}, "rows"),
        ({"rows": (1, 2, 3)}, "rows"),
    ],
)
def test_sizes_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        random_rows(**settings)
