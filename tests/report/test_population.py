"""The picture of who has what shows the numbers that it should."""

from typing import Any

import numpy as np

from fedjaxsim.data import Population
from fedjaxsim.data.describe import describe, in_words
from fedjaxsim.report.figures import population_figure


def drawn(population) -> list[Any]:
    """The panels of the figure, after everything is laid out."""
    figure = population_figure(population)
    figure.draw_without_rendering()
    return figure.axes


def test_few_clients_stand_under_their_names():
    clients = [{"y": [0, 0, 1]}, {"y": [1]}]
    rows, labels, _ = drawn(Population.from_clients(clients, ["ann", "bob"]))
    np.testing.assert_array_equal(rows.patches[0].get_data().values, [3, 1])
    np.testing.assert_allclose(labels.images[0].get_array(), [[2 / 3, 0], [1 / 3, 1]])
    assert [text.get_text() for text in labels.get_xticklabels()] == ["ann", "bob"]
    assert [text.get_text() for text in labels.get_yticklabels()] == ["0", "1"]


def test_many_clients_are_sorted_by_what_they_have_most_of():
    rng = np.random.default_rng(0)
    clients = [{"y": np.r_[np.full(k % 3 + 1, k % 3), rng.integers(0, 3, 2)]} for k in range(40)]
    rows, labels, _ = drawn(Population.from_clients(clients))
    shares = np.asarray(labels.images[0].get_array())
    assert shares.shape == (3, 40)
    first = shares.argmax(axis=0)
    assert np.all(np.diff(first) >= 0)
    for label in range(3):
        assert np.all(np.diff(shares.max(axis=0)[first == label]) <= 0)
    sizes = sorted(len(client["y"]) for client in clients)
    assert sorted(rows.patches[0].get_data().values) == sizes
    assert labels.get_xlabel() == "40 clients, sorted by their most frequent label"


def test_the_rarest_of_many_labels_are_left_out():
    y = np.r_[np.arange(100), np.arange(50, 100)]
    _, labels, _ = drawn(Population.from_flat({"y": y}, [150]))
    shares = np.asarray(labels.images[0].get_array())[:, 0]
    np.testing.assert_allclose(shares, [1 / 150] * 14 + [2 / 150] * 50)
    assert labels.get_ylabel() == "label, without the 36 rarest"


def test_targets_are_drawn_as_ranges_and_data_without_any_as_rows():
    values = np.arange(11.0)
    _, targets = drawn(Population.from_clients([{"y": values + 0.5}, {"y": 2 * values + 0.5}]))
    np.testing.assert_allclose(targets.lines[0].get_ydata(), [5.5, 10.5])
    segments = targets.collections[0].get_segments()
    np.testing.assert_allclose([segment[:, 1] for segment in segments], [[1.5, 9.5], [2.5, 18.5]])
    (rows,) = drawn(Population.from_flat({"theta": [0.5, 1.0]}, [2]))
    assert rows.get_ylabel() == "rows"


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
