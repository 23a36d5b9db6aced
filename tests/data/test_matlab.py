import numpy as np
import pytest
from scipy.io import loadmat, savemat
from support import matlab

from fedjaxsim.data import load_matlab


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Whole files are read here; `test_damaged.py` has the process that reads any file."""
    matlab.read_here(monkeypatch)


def cells(*matrices):
    """A 1×m cell array."""
    array = np.empty((1, len(matrices)), dtype=object)
    for k, matrix in enumerate(matrices):
        array[0, k] = np.asarray(matrix)
    return array


X = cells(np.array([[1, 2], [3, 4]], np.uint8), np.array([[5, 6]], np.uint8))
Y = cells([[7], [8]], [[9]])


def save(path, **variables):
    savemat(path, variables)
    return path


@pytest.mark.parametrize("labels", [Y, cells([[7, 8]], [[9]])], ids=["columns", "rows"])
def test_a_cell_is_a_client(tmp_path, labels):
    population = load_matlab(save(tmp_path / "a.mat", X=X, Y=labels))
    assert population.names.tolist() == [0, 1]
    np.testing.assert_array_equal(population.rows(0)["x"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(population.rows(1)["x"], [[5, 6]])
    np.testing.assert_array_equal(
        population.fields["y"], np.array([7, 8, 9], np.int32), strict=True
    )
    assert population.fields["x"].dtype == np.float32


def test_variables_may_have_other_names(tmp_path):
    path = save(tmp_path / "a.mat", feature=X, score=Y)
    assert load_matlab(path, fields=("feature", "score")).num_clients == 2
    with pytest.raises(ValueError, match=r"a\.mat.*'label'"):
        load_matlab(path, fields=("feature", "label"))
    with pytest.raises(ValueError, match="fields must be two names"):
        load_matlab(path, fields=("feature",))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"X": X}, r"'Y' \(fields\), only X"),
        ({"A": np.eye(2)}, "'X'.* no other"),
        ({"X": X, "Y": np.zeros((2, 1))}, "'Y'"),
        ({"X": X, "Y": cells([[1], [2]])}, "X .* Y"),
        ({"X": X, "Y": cells([[1], [2]], [[1], [2]])}, "client '1': 'x'.*'y'"),
        ({"X": cells([[1.0], [np.nan]], [[1.0]]), "Y": Y}, "client '0', field 'x'.*nan"),
        ({"X": cells(["ab", "cd"], [[5, 6]]), "Y": Y}, "client '0', field 'x'"),
        ({"X": cells(np.zeros((0, 2)), [[5, 6]]), "Y": cells(np.zeros((0, 1)), [[1]])}, "no rows"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, variables, message):
    with pytest.raises(ValueError, match=rf"odd\.mat.*{message}"):
        load_matlab(save(tmp_path / "odd.mat", **variables))


@pytest.mark.thorough
@pytest.mark.parametrize("compressed", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_truncated_file_is_named(tmp_path, compressed, monkeypatch):
    monkeypatch.undo()
    path = tmp_path / "whole.mat"
    savemat(path, {"X": X, "Y": Y}, do_compression=compressed)
    content = path.read_bytes()
    assert load_matlab(path).num_clients == 2
    cut = tmp_path / "cut.mat"
    for length in (0, 100, 130, len(content) - 9):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.mat"):
            load_matlab(cut)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.mat"):
        load_matlab(tmp_path / "absent.mat")


@pytest.mark.thorough
def test_school(real_file):
    path = real_file("school/school.mat")
    population = load_matlab(path)
    assert population.num_clients == 139
    assert population.fields["x"].shape == (15362, 28)
    assert population.splits["train"].count.min() == 22
    assert population.splits["train"].count.max() == 251
    assert population.fields["y"].min() == 1
    assert population.fields["y"].max() == 70
    stored = loadmat(path)
    for k in (0, 138):
        np.testing.assert_array_equal(population.rows(k)["x"], stored["X"][0, k])
        np.testing.assert_array_equal(population.rows(k)["y"], stored["Y"][0, k][:, 0])


@pytest.mark.thorough
def test_landmine(real_file):
    path = real_file("landmine/small.mat")
    population = load_matlab(path)
    assert population.num_clients == 29
    assert population.fields["x"].shape == (1464, 9)
    assert population.splits["train"].count.tolist() == [len(x) for x in loadmat(path)["X"][0]]
    assert set(population.fields["y"]) == {-1, 1}
    assert np.mean(population.fields["y"] == 1) < 0.2  # few positives
