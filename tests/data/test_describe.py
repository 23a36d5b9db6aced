"""Numbers that say who has what, counted by hand or by other libraries."""

import numpy as np
import pytest
from scipy.stats import f_oneway, skew

from fedjaxsim.data import Population, as_classes
from fedjaxsim.data.tables.describe import between_clients, describe, in_words


def population_of(train, test, **more):
    """Clients with these labels to train and to test on."""
    y = np.concatenate([np.asarray([*a, *b]) for a, b in zip(train, test, strict=True)])
    counts = np.array([[len(a), 0, len(b)] for a, b in zip(train, test, strict=True)])
    names = np.arange(len(train)).astype(str)
    return Population({"y": y.astype(np.int32)}, counts, names, **more)


def test_padding_of_tokens_is_no_label():
    rows = [[1, 1, -1], [0, -1, -1]]
    assert describe(Population.from_flat({"y": rows}, [1, 1]))["labels"] == [0, 1]


def test_a_description_names_what_there_is():
    names = ("a", "b", "c", "d")
    found = describe(population_of([[0, 0, 1], [3]], [[0], []], categories={"y": names}))
    assert found["clients"] == 2
    assert (found["rows"], found["rows_train"], found["rows_test"]) == (5, 4, 1)
    assert (found["rows_min"], found["rows_median"], found["rows_max"]) == (1, 2.5, 4)
    assert found["fields"] == {"y": ["int32"]}
    assert found["labels"] == ["a", "b", "d"]
    plain = describe(Population.from_flat({"x": np.zeros((2, 3, 4)), "y": [0.5, 1]}, [2]))
    assert plain["fields"] == {"x": ["float64", 3, 4], "y": ["float32"]}
    assert plain["labels"] is None


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
        "pixels of x: 0 to 0 (readers divide bytes by 255)",
        "labels: 12 different: ' ', class 1, class 2, class 3, class 4, class 5, class 6, class 7, "
        "…, class 11",
        "variance of the target between clients: 0.00 of all (ICC); the larger, the more personal "
        "models can help",
    ]


@pytest.mark.parametrize("binary", [False, True])
def test_the_variance_between_clients_is_that_of_analysis_of_variance(binary):
    rng, sizes = np.random.default_rng(0), np.array([3, 8, 5, 9])
    groups = [rng.normal(k, 1, n) for k, n in enumerate(sizes)]
    groups = [(group > 1.5).astype(np.int32) for group in groups] if binary else groups
    population = Population.from_flat({"y": np.concatenate(groups)}, sizes)
    ratio, rows = f_oneway(*groups).statistic, sizes.sum()
    usual = (rows - np.sum(sizes**2) / rows) / 3  # rows of a client (Donner 1986)
    want = (ratio - 1) / (ratio + usual - 1)
    assert between_clients(population) == pytest.approx(want)
    assert describe(population)["rows_skewness"] == pytest.approx(skew(sizes))
    assert between_clients(Population.from_flat({"y": [1.0, 2.0]}, [1, 1])) is None


def test_many_whole_numbers_vary_as_numbers_and_need_a_loss():
    rng = np.random.default_rng(0)
    scores = (rng.normal(40, 9, size=(30, 1)) + rng.normal(0, 4, size=(30, 12))).round().ravel()
    numbers = Population.from_flat({"x": np.ones((360, 1)), "y": scores}, [12] * 30)
    classes = as_classes(numbers)
    assert between_clients(classes) == pytest.approx(between_clients(numbers))
    assert "a run asks for --loss" in in_words(describe(classes))


def test_several_classes_vary_between_clients_as_their_indicators():
    apart = Population.from_flat({"y": [0, 0, 1, 1, 2, 2]}, [2, 2, 2])
    assert between_clients(apart) == pytest.approx(1)
    alike = Population.from_flat({"y": [0, 1, 2, 0, 1, 2]}, [3, 3])
    # MSB = 0 and n₀ = 3: (0 − MSW) / (0 + 2 MSW).
    assert between_clients(alike) == pytest.approx(-1 / 2)
