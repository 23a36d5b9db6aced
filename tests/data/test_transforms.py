import numpy as np
import pytest

from fedjaxsim.data import Population, drop_constant_columns, load_matlab, split, unit_rows
from fedjaxsim.data.transforms import as_classes, invert


def population(x):
    return Population.from_flat({"x": x, "y": np.arange(len(x))}, [1] * len(x))


def test_constant_columns_are_dropped():
    dropped = drop_constant_columns(population([[1, 5, 0], [1, 6, 0], [1, 5, 1]]))
    np.testing.assert_array_equal(dropped.fields["x"], [[5, 0], [6, 0], [5, 1]])
    np.testing.assert_array_equal(dropped.fields["y"], [0, 1, 2])


def test_a_column_that_varies_only_between_clients_stays():
    assert drop_constant_columns(population([[1, 2], [1, 3]])).fields["x"].tolist() == [[2], [3]]


def test_dropping_all_columns_is_refused():
    with pytest.raises(ValueError, match="columns of x"):
        drop_constant_columns(population([[1, 2], [1, 2]]))


def test_rows_get_norm_one_and_zero_rows_stay():
    x = np.array([[3, 4], [0, 0], [0, -2], [1e-30, 0], [3e30, 4e30]], np.float32)
    unit = unit_rows(population(x)).fields["x"]
    expected = [[0.6, 0.8], [0, 0], [0, -1], [1, 0], [0.6, 0.8]]
    np.testing.assert_allclose(unit, expected, rtol=1e-6)
    assert unit.dtype == np.float32


def test_rows_of_integers_get_norm_one_as_floats():
    unit = unit_rows(population(np.array([[3, 4], [0, 0]], np.uint8))).fields["x"]
    np.testing.assert_array_equal(unit, np.array([[0.6, 0.8], [0, 0]], np.float32), strict=True)


def test_splits_and_names_stay():
    divided = split(Population.from_flat({"x": np.eye(4)}, [4], ["a"]), test=0.5)
    changed = unit_rows(divided)
    np.testing.assert_array_equal(changed.counts, divided.counts)
    assert changed.names is divided.names


@pytest.mark.parametrize("transform", [drop_constant_columns, unit_rows])
def test_features_must_be_a_matrix(transform):
    with pytest.raises(ValueError, match="x must have shape"):
        transform(population([1, 2]))
    with pytest.raises(ValueError, match="x must have shape"):
        transform(Population.from_flat({"y": [1]}, [1]))


@pytest.mark.thorough
def test_school(real_file):
    school = unit_rows(drop_constant_columns(load_matlab(real_file("school/school.mat"))))
    assert school.fields["x"].shape == (15362, 27)
    np.testing.assert_allclose(np.linalg.norm(school.fields["x"], axis=1), 1, rtol=1e-6)


def test_images_are_turned_over():
    turned = invert(population([[0.0, 0.25], [1.0, 0.5]]))
    np.testing.assert_array_equal(turned.fields["x"], [[1.0, 0.75], [0.0, 0.5]])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        invert(population([[0.0], [2.0]]))


@pytest.mark.parametrize("numbers", [[-1, 1], [1, 2, 3], [0, 1, 7]])
def test_integer_labels_are_the_classes_of_scikit_learn(numbers):
    encoder = pytest.importorskip("sklearn.preprocessing").LabelEncoder()
    labels = np.random.default_rng(0).choice(numbers, 30)
    population = Population.from_flat({"x": np.ones((30, 1)), "y": labels}, [10, 20])
    found = as_classes(population)
    np.testing.assert_array_equal(found.fields["y"], encoder.fit_transform(labels))
    assert found.categories["y"] == tuple(map(str, encoder.classes_))
    assert as_classes(found) is found


def test_fractions_and_positions_are_no_names_of_classes():
    for labels in ([0.5, 2.0], [0, 1]):
        population = Population.from_flat({"x": np.ones((2, 1)), "y": np.array(labels)}, [1, 1])
        assert as_classes(population) is population
