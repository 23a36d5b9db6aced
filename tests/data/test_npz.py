import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.data import Population, load_npz, save_npz, split

X = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
Y = np.array([0, 1, 2, 3])


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path


def rows(population):
    return [population.rows(k)["x"].ravel().tolist() for k in range(population.num_clients)]


def test_a_client_column_groups_rows(tmp_path):
    path = saved(tmp_path / "a.npz", x=X, y=Y, client=np.array([7, -2, 7, 30]))
    population = load_npz(path)
    assert population.names.tolist() == [-2, 7, 30]
    assert rows(population) == [[2], [1, 3], [4]]
    assert population.fields["y"].tolist() == [1, 0, 2, 3]


def test_clients_may_be_strings(tmp_path):
    population = load_npz(saved(tmp_path / "a.npz", x=X, client=np.array(["b", "a", "b", "a"])))
    assert population.names.tolist() == ["a", "b"]
    assert rows(population) == [[2, 4], [1, 3]]


def test_counts_cut_consecutive_clients(tmp_path):
    population = load_npz(saved(tmp_path / "a.npz", x=X, counts=np.array([1, 3])))
    assert population.names.tolist() == [0, 1]
    assert rows(population) == [[1], [2, 3, 4]]


def test_a_split_column_divides_each_clients_rows(tmp_path):
    path = saved(
        tmp_path / "a.npz", x=X, client=np.array([0, 1, 0, 1]), split=np.array([2, 0, 0, 1])
    )
    population = load_npz(path)
    assert population.rows(0, "train")["x"].tolist() == [[3]]
    assert population.rows(0, "test")["x"].tolist() == [[1]]
    assert population.rows(1, "train")["x"].tolist() == [[2]]
    assert population.rows(1, "validation")["x"].tolist() == [[4]]
    assert population.splits["test"].count.tolist() == [1, 0]


@settings(deadline=None, max_examples=25)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    validation=st.sampled_from([0.0, 0.3]),
    test=st.sampled_from([0.0, 0.3]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_what_is_saved_is_loaded(tmp_path_factory, counts, validation, test, dtype):
    rng = np.random.default_rng(0)
    n = sum(counts)
    # Fields named like arguments of np.savez are fields like others.
    fields = {"x": rng.normal(size=(n, 2, 3)).astype(dtype), "y": np.arange(n), "file": np.ones(n)}
    population = Population.from_flat(fields, counts, [f"user {k}" for k in range(len(counts))])
    population = split(population, validation=validation, test=test)
    population = dataclasses.replace(population, public=("Known.",))
    path = tmp_path_factory.mktemp("npz") / "name without suffix"
    save_npz(path, population)
    loaded = load_npz(path)
    assert loaded.names.tolist() == population.names.tolist()
    assert (set(loaded.fields), loaded.public) == (set(population.fields), population.public)
    for field, values in population.fields.items():
        np.testing.assert_array_equal(loaded.fields[field], values, strict=True)
    np.testing.assert_array_equal(loaded.counts, population.counts, strict=True)
    with pytest.raises(ValueError, match="leave out held-out-clients"):
        save_npz(path, dataclasses.replace(population, held_out=population))


def test_reserved_names_are_not_saved(tmp_path):
    population = Population.from_flat({"client": [1]}, [1])
    with pytest.raises(ValueError, match=r"got \['client'\]"):
        save_npz(tmp_path / "a.npz", population)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "'client' and 'counts'"),
        ({"x": X, "client": Y, "counts": np.array([4])}, "'client' may not be given with 'counts'"),
        ({"client": Y}, "no fields"),
        ({"x": np.float32(1), "counts": np.array([1])}, "no rows"),
        ({"x": X, "y": Y[:3], "client": Y}, "'x'.*'y'"),
        ({"x": X, "client": Y[:3]}, "client"),
        ({"x": X, "client": Y + 0.5}, "client"),
        ({"x": X, "counts": np.array([1, 2])}, "counts"),
        ({"x": X, "counts": np.array([5, -1])}, "no training rows"),
        ({"x": X, "counts": np.array([[4, 0]])}, "counts"),
        ({"x": X, "counts": np.array(4.0)}, "counts"),
        ({"x": X, "client": Y, "names": np.array(["a"])}, "'names' may not be given without"),
        ({"x": X, "counts": np.array([1, 3]), "names": np.array("a")}, "names"),
        ({"x": X, "counts": np.array([1, 3]), "names": np.array(["a", "a"])}, "names"),
        ({"x": X, "counts": np.array([4]), "split": Y}, "'split' may not be given with"),
        ({"x": X, "split": Y * 0}, "rows need their clients"),
        ({"x": X, "client": Y * 0, "split": Y}, "split must hold 0, 1 or 2"),
        ({"x": X, "client": Y * 0, "split": Y * 0 + 1}, "no client has training rows"),
        (
            {"x": X, "counts": np.array([4]), "about": np.array([*b"{"], np.uint8)},
            "JSON of attributes",
        ),
        (
            {"x": X, "counts": np.array([4]), "about": np.array([*b"{}"], np.uint8)},
            "JSON of attributes",
        ),
        ({"x": X / np.float32(2) * np.nan, "client": Y}, "client '0', field 'x'.*nan"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=rf"odd\.npz: .*{message}"):
        load_npz(saved(tmp_path / "odd.npz", **arrays))


def test_python_objects_are_refused(tmp_path):
    path = saved(tmp_path / "odd.npz", x=np.array([{}, {}], dtype=object), counts=np.array([2]))
    with pytest.raises(ValueError, match=r"odd\.npz.*'x' holds Python objects: store") as refused:
        load_npz(path)
    assert "allow_pickle" not in str(refused.value)


@pytest.mark.parametrize("content", [pickle.dumps({"x": X}), b"x,y\n1,2\n", b""])
def test_a_file_of_another_format_is_refused_without_advice_to_unpickle_it(tmp_path, content):
    (tmp_path / "odd.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"odd\.npz: .*np\.savez") as refused:
        load_npz(tmp_path / "odd.npz")
    assert "allow_pickle" not in str(refused.value)


@pytest.mark.parametrize("fraction", [0.0, 0.4, 0.95])
def test_a_truncated_file_is_named(tmp_path, fraction):
    content = saved(tmp_path / "a.npz", x=X, client=Y).read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(ValueError, match=r"cut\.npz"):
        load_npz(tmp_path / "cut.npz")


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        load_npz(tmp_path / "absent.npz")


def test_pictures_of_bytes_are_divided_and_text_names_classes(tmp_path):
    rng = np.random.default_rng(0)
    pictures, client = rng.integers(0, 256, (4, 5, 6, 3), np.uint8), np.array([0, 0, 1, 1])
    words = np.array(["cat", "dog", "cat", "ant"])
    path = saved(tmp_path / "a.npz", x=pictures, y=words, client=client)
    population = load_npz(path)
    assert population.fields["x"].dtype == np.float32
    np.testing.assert_allclose(population.fields["x"], pictures / 255.0, rtol=1e-6)
    classes = np.array(population.categories["y"])
    assert classes[population.fields["y"]].tolist() == words.tolist()
    # What the package wrote keeps its types.
    save_npz(tmp_path / "b.npz", Population.from_flat({"x": pictures}, [2, 2]))
    np.testing.assert_array_equal(load_npz(tmp_path / "b.npz").fields["x"], pictures)


def test_splits_have_numbers_or_names(tmp_path):
    client, more = np.array([0, 0, 0, 0]), {"x": X}
    numbers = saved(tmp_path / "a.npz", client=client, split=np.array([0, 2, 1, 0]), **more)
    names = np.array(["train", "Test", "val", "training"])
    named = saved(tmp_path / "b.npz", client=client, split=names, **more)
    np.testing.assert_array_equal(load_npz(numbers).counts, [[2, 1, 1]])
    np.testing.assert_array_equal(load_npz(named).counts, [[2, 1, 1]])
