"""Names and units of columns follow the data from the reader on."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from fedjaxsim import data
from fedjaxsim.data.transforms import invert


@pytest.fixture
def population():
    frame = pd.DataFrame(
        {
            "who": ["a", "a", "b", "b"],
            "age": [20, 30, 40, 60],
            "ok": [True, False, True, True],
            "kind": ["p", "q", "p", "q"],
            "one": [1, 1, 1, 1],
            "wage": [1.5, 2.0, 2.5, 3.0],
        }
    )
    return data.from_dataframe(frame, client="who", target="wage", one_hot=["kind"])


def test_readers_name_columns_and_know_what_they_encoded(population):
    x, y = population.columns["x"], population.columns["y"]
    assert x.names == ("age", "ok", "kind=p", "kind=q", "one")
    assert y.names == ("wage",)
    assert x.bound == (np.inf, 1, 1, 1, np.inf)
    assert x.norm == np.inf
    assert not x.scaled
    kept = data.drop_constant_columns(population).columns["x"]
    assert kept.names == ("age", "ok", "kind=p", "kind=q")
    unit = data.unit_rows(population).columns["x"]
    assert unit.norm == 1
    assert unit.names[0] == "age / ‖x‖"
    no_names = data.Population.from_flat({"x": np.eye(2), "z": np.ones((2, 2, 2))}, [2])
    assert no_names.columns["x"].names == ("x0", "x1")
    assert "z" not in no_names.columns


def test_affine_changes_compose_to_the_units_of_the_source(population):
    x = population.fields["x"].astype(np.float64)
    centre, half = np.array([40.0, 0, 0, 0, 1]), np.array([20.0, 1, 1, 1, 2])
    columns = population.columns["x"].mapped(centre, half, np.ones(5))
    # One of kind=p and kind=q is 1; only as long as they stay what they are.
    assert columns.norm == pytest.approx(4**0.5)
    assert np.square((x - centre) / half).sum(axis=1).max() <= 4
    assert (
        columns.mapped(np.zeros(5), np.array([1, 1, 0.5, 1, 1]), np.array([1, 1, 2, 1, 1])).norm
        == 8**0.5
    )
    assert columns.chosen(np.arange(5) != 3).norm == 4**0.5
    assert columns.chosen(np.arange(5) != 1).norm == 3**0.5
    np.testing.assert_allclose(columns.original((x - centre) / half), x)
    grey = data.Population.from_flat({"x": np.array([[0.0, 0.25], [1.0, 0.5]])}, [2])
    white = invert(grey)
    np.testing.assert_allclose(
        white.columns["x"].original(white.fields["x"]), grey.fields["x"], atol=1e-7
    )
    one = data.Columns(("y",), (10.0,), (5.0,))
    np.testing.assert_allclose(one.original(np.array([-1.0, 0.5])), [5, 12.5])


def test_columns_are_kept_on_disk_and_with_some_clients(population, tmp_path):
    centre, half = np.array([40.0, 0, 0, 0, 0]), np.array([20.0, 1, 1, 1, 1])
    columns = population.columns["x"].mapped(centre, half, np.ones(5))
    population = population.with_field("x", lambda x: x, columns)
    data.save_npz(tmp_path / "p.npz", population)
    data.save_folder(tmp_path / "folder", population)
    for found in (
        data.load_npz(tmp_path / "p.npz"),
        data.load_folder(tmp_path / "folder"),
        data.split(population, test=0.5).of_clients([1]),
    ):
        assert found.columns == population.columns
    with pytest.raises(ValueError, match="'x' has rows of shape"):
        dataclasses.replace(population, columns={"x": data.Columns(("a",))})
    with pytest.raises(ValueError, match="'a' twice"):
        data.Columns(("a", "a"))


def test_a_value_that_no_model_knows_counts_as_none_of_the_others():
    known = data.Columns(("age", "job=a", "job=b"), bound=(np.inf, 1, 1))
    given = data.Columns(("age", "job=b", "job=new"), bound=(np.inf, 1, 1))
    rows = np.array([[3.0, 1, 0], [4.0, 0, 1]])
    with pytest.warns(UserWarning, match=r"know nothing of 'job=new' \(1 rows\)"):
        found = known.aligned(rows, given)
    np.testing.assert_array_equal(found, [[3, 0, 1], [4, 0, 0]])
    with pytest.raises(ValueError, match="'town=new', which the models do not know"):
        known.aligned(rows, data.Columns(("age", "job=b", "town=new"), bound=(np.inf, 1, 1)))
