import dataclasses
import itertools

import numpy as np
import pytest

from fedjaxsim.data import Population, split
from fedjaxsim.data.population import has_same_clients, with_other_counts, with_other_rows


def test_clients_follow_one_another():
    population = Population.from_clients(
        [{"x": [[1, 2]], "y": [5]}, {"x": [[3, 4], [5, 6]], "y": [7, 8]}], ["ann", "bob"]
    )
    assert population.num_clients == 2
    assert population.num_rows == 3
    np.testing.assert_array_equal(population.fields["x"], [[1, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(population.fields["y"], [5, 7, 8])
    np.testing.assert_array_equal(population.splits["train"].start, [0, 1])
    np.testing.assert_array_equal(population.splits["train"].count, [1, 2])
    np.testing.assert_array_equal(population.splits["test"].count, [0, 0])
    np.testing.assert_array_equal(population.splits["validation"].count, [0, 0])
    assert population.names.tolist() == ["ann", "bob"]
    np.testing.assert_array_equal(population.rows(1)["x"], [[3, 4], [5, 6]])
    assert population.rows(1, "test")["x"].shape == (0, 2)


def test_both_constructors_agree_and_name_clients_by_position():
    flat = Population.from_flat({"x": [[1.5], [2.5], [3.5]], "y": [0, 1, 1]}, [2, 1])
    clients = Population.from_clients(
        [{"x": [[1.5], [2.5]], "y": [0, 1]}, {"x": [[3.5]], "y": [1]}]
    )
    for field in ("x", "y"):
        np.testing.assert_array_equal(flat.fields[field], clients.fields[field])
        assert flat.fields[field].dtype == clients.fields[field].dtype
    assert flat.names.tolist() == clients.names.tolist() == [0, 1]


def test_what_nobody_can_write_to_is_kept_and_all_else_copied():
    def field(x):
        return Population.from_flat({"x": x}, [1, 2]).fields["x"]

    writable = np.array([[1.5], [2.5], [3.5]], np.float32)
    frozen, view = writable.copy(), writable.view()
    frozen.flags.writeable = view.flags.writeable = False
    assert field(frozen) is frozen
    for x in (writable, view):
        kept = field(x)
        writable[0] += 1
        np.testing.assert_array_equal(kept[0], writable[0] - 1)
        assert kept.ctypes.data % 64 == 0
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            kept.flags.writeable = True


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([[1], [2]], np.float16), np.float32),
        (np.array([[1], [2]], np.float64), np.float64),
        ([[1.0], [2.0]], np.float32),
        (np.array([[True], [False]]), np.float32),
    ],
)
def test_fractions_become_float32_unless_given_in_float64(values, dtype):
    x = Population.from_flat({"x": values, "y": [0, 1]}, [1, 1]).fields["x"]
    assert x.dtype == dtype
    assert x.shape == (2, 1)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([np.array([[1], [2]], np.uint8), np.array([[3]], np.uint8)], np.uint8),
        ([np.array([[1], [2]], np.uint8), np.array([[-3]], np.int8)], np.int16),
        ([[[1], [2]], [[3]]], np.int32),
        ([np.array([[1], [2**31]]), [[3]]], np.float32),
        ([[[1], [2]], [[0.5]]], np.float32),
    ],
)
def test_integers_stay_integers(values, dtype):
    clients = [{"x": x, "y": [0] * len(x)} for x in values]
    x = Population.from_clients(clients).fields["x"]
    np.testing.assert_array_equal(x, np.concatenate(values).astype(dtype), strict=True)


def test_a_row_may_have_a_label_for_each_token():
    tokens, labels = np.arange(6, dtype=np.uint8).reshape(2, 3), [[1, 2, -1], [0, -1, -1]]
    population = Population.from_flat({"x": tokens, "y": labels}, [1, 1])
    np.testing.assert_array_equal(population.rows(1)["x"], [[3, 4, 5]])
    np.testing.assert_array_equal(population.fields["y"], np.array(labels, np.int32), strict=True)


@pytest.mark.parametrize(
    ("field", "names"), [("x", ("a", "b")), ("y", ("a",)), ("y", ("a", "a")), ("z", ("a", "b"))]
)
def test_categories_name_the_integers_of_a_field(field, names):
    population = Population.from_flat({"x": [0.5, 1.0], "y": [0, 1]}, [1, 1])
    assert dataclasses.replace(population, categories={"y": ("a", "b", "c")}).categories
    with pytest.raises(ValueError, match=f"categories.*{field!r}"):
        dataclasses.replace(population, categories={field: names})


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([1, 0], np.uint8), np.int32),
        (np.array([1, 0], np.int64), np.int32),
        (np.array([1.0, -1.0]), np.int32),
        (np.array([[1.0], [-1.0]], np.float16), np.int32),
        (np.array([True, False]), np.int32),
        (np.array([1.5, 1.0], np.float32), np.float32),
        ([[1.5], [1.0]], np.float32),
        (np.array([1.5, 1.0]), np.float64),
        (np.array([2**31, 1]), np.float32),
        (np.array([-(2**63), 1]), np.float32),
        (np.array([2**31, 1], np.float32), np.float32),
    ],
)
def test_integral_labels_become_int32_and_others_stay_floats(values, dtype):
    y = Population.from_flat({"x": [0, 0], "y": values}, [1, 1]).fields["y"]
    assert y.dtype == dtype
    np.testing.assert_allclose(y, np.asarray(values, np.float64).reshape(-1), rtol=1e-7)


def test_one_fractional_label_makes_all_clients_labels_floats():
    population = Population.from_clients([{"y": np.array([1, 2])}, {"y": [0.5]}])
    assert population.fields["y"].dtype == np.float32
    assert population.fields["y"].tolist() == [1, 2, 0.5]


good = {"x": [[1.0, 2.0]], "y": [1]}


@pytest.mark.parametrize(
    ("clients", "names", "message"),
    [
        ([], None, "at least one client"),
        ([good, {"x": [[1.0, 2.0]], "y": [1, 2]}], ["a", "b"], "client 'b': 'x'.*'y'"),
        ([good, {"x": np.zeros((0, 2)), "y": []}], ["a", "b"], "client 'b'"),
        ([{}], ["a"], "client 'a'"),
        ([good, {"x": [[1.0, 2.0]]}], ["a", "b"], "client 'b'"),
        ([good, {"x": [[1.0, np.nan]], "y": [1]}], ["a", "b"], "client 'b', field 'x'.*nan"),
        ([{"x": [[1.0, 2.0]], "y": [np.inf]}, good], ["a", "b"], "client 'a', field 'y'.*inf"),
        ([good, {"x": [[1e300, 1.0]], "y": [1]}], ["a", "b"], "client 'b', field 'x'.*inf"),
        ([good, {"x": [[1.0]], "y": [1]}], ["a", "b"], "client 'b', field 'x'"),
        ([good, {"x": [[1.0, 2.0], [1.0]], "y": [1, 1]}], ["a", "b"], "client 'b', field 'x'"),
        ([good, {"x": ["left"], "y": [1]}], ["a", "b"], "client 'b', field 'x'"),
        ([good, {"x": 1.0, "y": [1]}], ["a", "b"], "client 'b', field 'x'"),
        ([{"x": [1.0], "y": [[[0, 1]]]}], ["a"], "client 'a', field 'y'"),
        ([good, good], ["a", "a"], "names"),
        ([good, good], ["a"], "names"),
    ],
)
def test_wrong_clients_are_refused(clients, names, message):
    with pytest.raises(ValueError, match=message):
        Population.from_clients(clients, names)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 1], "counts"),
        ([2, 0, 1], "client '1'"),
        ([4, -1], "client '1'"),
        ([], "counts"),
        ([1.5, 1.5], "counts"),
        ([[1, 2]], "counts"),
    ],
)
def test_wrong_counts_are_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        Population.from_flat({"x": [1, 2, 3]}, counts)


def test_counts_may_be_of_every_split():
    population = Population.from_flat({"x": range(6)}, [[1, 0, 2], [1, 2, 0]])
    assert population.rows(0, "test")["x"].tolist() == [1, 2]
    assert population.rows(1, "validation")["x"].tolist() == [4, 5]
    np.testing.assert_array_equal(population.counts, [[1, 0, 2], [1, 2, 0]])
    with pytest.raises(ValueError, match="client '1'"):
        Population.from_flat({"x": range(6)}, [[1, 0, 2], [0, 2, 1]])


def test_rows_are_sorted_by_client_and_split():
    client, part = np.array([1, 0, 1, 1, 0]), np.array([2, 0, 0, 2, 0])
    population = Population.from_rows({"x": range(5)}, client, ["ann", "bob"], part)
    assert population.names.tolist() == ["ann", "bob"]
    assert population.rows(0)["x"].tolist() == [1, 4]
    assert population.rows(1)["x"].tolist() == [2, 0, 3]
    np.testing.assert_array_equal(population.counts, [[2, 0, 0], [1, 0, 2]])
    assert Population.from_rows({"x": range(5)}, client, 2).names.tolist() == [0, 1]
    with pytest.raises(ValueError, match="client '2'"):
        Population.from_rows({"x": range(5)}, client, 3)


def test_ids_of_a_small_integer_type_are_not_multiplied_in_it():
    client = np.arange(60, dtype=np.int8)  # times three splits: 177
    population = Population.from_rows({"x": np.arange(60)}, client, 60)
    assert population.fields["x"].tolist() == list(range(60))
    np.testing.assert_array_equal(population.counts[:, 0], 1)


def test_clients_are_chosen_with_their_splits():
    population = split(
        Population.from_flat({"x": range(18)}, [3, 5, 4, 6]), validation=0.2, test=0.3
    )
    chosen = population.of_clients(np.array([3, 1]))
    for k, client in enumerate((3, 1)):
        for name in population.splits:
            np.testing.assert_array_equal(
                chosen.rows(k, name)["x"], population.rows(client, name)["x"]
            )


def test_flat_fields_that_disagree_in_length_are_refused():
    with pytest.raises(ValueError, match=r"'x'.*'y'"):
        Population.from_flat({"x": [1, 2, 3], "y": [1, 2]}, [3])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[2, 0, 0], [2, 0, 0]], "counts must sum to the 3 rows.* got 4"),
        ([[1, 0, 0], [1, 0, 0]], "counts must sum to the 3 rows.* got 2"),
        ([[1, 1, 0], [2, 0, -1]], "each 0 or more"),
        ([[3, 0, 0], [0, 0, 0]], "client 'b'"),
        ([[1, 0, 0]], r"\(2, 3\)"),
        ([[1.0, 0, 0], [2.0, 0, 0]], "integers"),
        ([[1], [2]], r"\(2, 3\)"),
    ],
)
def test_every_row_must_belong_to_one_client_and_split(counts, message):
    population = Population.from_flat({"x": [1, 2, 3]}, [1, 2], ["a", "b"])
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(population, counts=np.array(counts))


@pytest.mark.parametrize(
    ("client", "which", "message"),
    [(2, None, r"\[0, 1\], got 2"), (-1, None, "got -1"), (0, "dev", "split")],
)
def test_rows_refuses_strangers(client, which, message):
    with pytest.raises(ValueError, match=message):
        Population.from_flat({"x": [1, 2]}, [1, 1]).rows(client, which)


def test_a_population_says_its_clients_rows_and_fields():
    population = split(Population.from_flat({"x": range(10), "y": range(10)}, [4, 6]), test=0.5)
    assert repr(population).splitlines() == [
        "Population of 2 clients, 10 rows (5 train, 0 validation, 5 test)",
        "  x: int32 (10,)",
        "  y: int32 (10,)",
    ]


def test_rows_without_numbers_are_refused():
    with pytest.raises(ValueError, match=r"field 'x' holds no numbers: rows have shape \(0,\)"):
        Population.from_flat({"x": np.zeros((4, 0)), "y": np.arange(4)}, [2, 2])


def test_integers_that_would_become_one_are_refused_and_others_stay():
    far, features = [3_000_000_000, 3_000_000_001, 5, 7], np.array([[2**24], [2**24 + 1], [7], [8]])
    for fields in ({"x": np.zeros((4, 1)), "y": np.array(far)}, {"x": np.array(far)[:, None]}):
        with pytest.raises(ValueError, match="cannot tell apart, such as 3000000000"):
            Population.from_flat(fields, [2, 2])
    kept = Population.from_flat({"x": features}, [2, 2]).fields["x"]
    np.testing.assert_array_equal(kept, features)


@pytest.mark.parametrize("most", [1, 2, 3, 6])
def test_a_client_with_other_counts_keeps_its_rows_and_the_public_bound(most):
    for counts in itertools.product(range(1, most + 1), range(most + 1), range(most + 1)):
        total = sum(counts)
        fields = {"x": np.zeros((total, 1), np.float32)}
        population = Population(fields, np.array([counts]), np.array(["a"]), max_rows=most)
        [new] = with_other_counts(population, 0).counts
        assert new.sum() == total
        assert 1 <= new[0] <= new.max() <= most
        assert new.min() >= 0
        possible = range(max(1, total - 2 * most), min(total, most) + 1)
        assert (new[0] == counts[0]) == (len(possible) == 1)


def test_other_rows_of_a_client_are_as_a_task_takes_them():
    signed, times = np.linspace(-1, 1, 8)[:, None], np.linspace(0.5, 4, 8)
    population = Population.from_flat({"x": signed, "y": times}, [4, 4])
    fields = with_other_rows(population, [1], seed=0).fields
    for name, values in population.fields.items():
        np.testing.assert_array_equal(fields[name][:4], values[:4])
        assert np.all(fields[name][4:] != values[4:])
    assert fields["x"].min() < -10
    assert fields["y"].min() > 0


def test_clients_are_the_same_where_no_row_of_a_source_is_of_another():
    fields, client = {"x": np.arange(6.0)}, np.array([0, 0, 1, 1, 2, 2])
    population = Population.from_rows(fields, client, 3)
    split_anew = Population.from_rows(fields, client, 3, split=np.array([0, 2] * 3))
    for alike in (population, split_anew, split_anew.of_clients([0, 2])):
        assert has_same_clients(population, alike)
    dealt_anew = Population.from_rows(fields, client[::-1], 3)
    assert not has_same_clients(population, dealt_anew)
    assert has_same_clients(dealt_anew, dealt_anew.of_clients([1]))
