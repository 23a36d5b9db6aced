"""Numbers that say who has what, counted by hand or by other libraries."""

import math

import numpy as np
import pytest
import scipy.stats
from sklearn.dummy import DummyClassifier

import fedjaxsim as fjs
from fedjaxsim.data import Population, invert
from fedjaxsim.data.describe import (
    describe,
    in_words,
    label_counts,
    majority_accuracy,
    skewness,
)


def population_of(train, test, **more):
    """Clients with these labels to train and to test on."""
    y = np.concatenate([np.asarray([*a, *b]) for a, b in zip(train, test, strict=True)])
    counts = np.array([[len(a), 0, len(b)] for a, b in zip(train, test, strict=True)])
    names = np.arange(len(train)).astype(str)
    return Population({"y": y.astype(np.int32)}, counts, names, **more)


LABELS = [[3, 3, 5], [5, 3], [9]], [[3, 5], [], [9, 3, 5]]


def test_labels_are_counted_by_client():
    population = population_of(*LABELS)
    for splits, expected in (
        ((), [[3, 2, 0], [1, 1, 0], [1, 1, 2]]),
        (("train",), [[2, 1, 0], [1, 1, 0], [0, 0, 1]]),
        (("test",), [[1, 1, 0], [0, 0, 0], [1, 1, 1]]),
    ):
        labels, counts = label_counts(population, *splits)
        assert labels.tolist() == [3, 5, 9]
        np.testing.assert_array_equal(counts, expected)
    with pytest.raises(ValueError, match="labels"):
        label_counts(Population.from_flat({"y": [0.5]}, [1]))


def test_a_label_per_token_counts_but_for_padding():
    rows = [[1, 1, -1], [0, -1, -1]]
    labels, counts = label_counts(Population.from_flat({"y": rows}, [1, 1]))
    assert labels.tolist() == [0, 1]
    np.testing.assert_array_equal(counts, [[0, 2], [1, 0]])


def test_the_constant_answer_is_the_most_frequent_training_label():
    population = population_of(*LABELS)
    # All say 3: right in 1 of 2 and 1 of 3 rows; the client without test rows does not count.
    assert majority_accuracy(population) == pytest.approx((1 / 2 + 1 / 3) / 2)
    # Client 0 says 3, and client 2 says 9.
    assert majority_accuracy(population, own=True) == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert majority_accuracy(population, "train", own=True) == pytest.approx(
        (2 / 3 + 1 / 2 + 1) / 3
    )
    assert math.isnan(majority_accuracy(population, "validation"))


def test_it_is_the_dummy_classifier_of_scikit_learn():
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 3, (4, 9)) for _ in range(2))
    dummy = DummyClassifier(strategy="most_frequent").fit(np.zeros((36, 1)), train.ravel())
    score = dummy.score(np.zeros((36, 1)), test.ravel())
    assert majority_accuracy(population_of(train, test)) == pytest.approx(score)


@pytest.mark.parametrize("values", [[1, 2, 3, 10], [4, 4, 4], [0, 1]])
def test_skewness_is_that_of_scipy(values):
    values = np.array(values)
    expected = scipy.stats.skew(values) if np.ptp(values) else 0.0
    assert skewness(values) == pytest.approx(expected)


def test_a_description_names_what_there_is():
    names = ("a", "b", "c", "d")
    found = describe(population_of([[0, 0, 1], [3]], [[0], []], categories={"y": names}))
    assert found["clients"] == 2
    assert (found["rows"], found["rows_train"], found["rows_test"]) == (5, 4, 1)
    assert (found["rows_min"], found["rows_median"], found["rows_max"]) == (1, 2.5, 4)
    assert found["fields"] == {"y": ["int32"]}
    assert found["labels"] == ["a", "b", "d"]
    assert found["majority_accuracy"] == 1
    plain = describe(Population.from_flat({"x": np.zeros((2, 3, 4)), "y": [0.5, 1]}, [2]))
    assert plain["fields"] == {"x": ["float64", 3, 4], "y": ["float32"]}
    assert plain["labels"] is plain["majority_accuracy"] is None


def test_white_paper_is_named_until_it_is_inverted():
    rng = np.random.default_rng(0)
    ink = np.where(rng.random((40, 28, 28)) < 0.9, 1.0, rng.random((40, 28, 28)))
    white = Population.from_flat({"x": ink, "y": rng.integers(0, 3, 40)}, [20, 20])
    said = in_words(describe(white))
    assert f"the mean of x is {ink.mean():.2f}, as of images on white paper" in said
    assert "--preprocess invert" in said
    black = invert(white)
    assert "white paper" not in in_words(describe(black))
    task = fjs.tasks.softmax(fjs.models.linear((28, 28), 3), 3)
    parts = (fjs.full_participation(), fjs.Minibatches(10, epochs=1))
    with pytest.warns(UserWarning, match=r"fjs\.data\.invert"):
        fjs.Simulation(fjs.fedavg(task), white, *parts)
    fjs.Simulation(fjs.fedavg(task), black, *parts)


def test_a_description_is_readable():
    names = (" ", *(f"class {k}" for k in range(1, 12)))
    y = np.arange(12)
    population = Population.from_flat({"x": np.zeros((12, 2, 3)), "y": y}, [4, 8])
    found = describe(
        Population(population.fields, population.counts, population.names, None, (), {"y": names})
    )
    assert in_words(found).splitlines() == [
        "clients: 2",
        "rows: 12 (train 12, validation 0, test 0)",
        "rows per client: min 4, median 6, max 8, skewness 0.00",
        "x: float64, 2 × 3 per row",
        "y: int32, one per row",
        "labels: 12 different: ' ', class 1, class 2, class 3, class 4, class 5, class 6, class 7, "
        "…, class 11",
    ]
