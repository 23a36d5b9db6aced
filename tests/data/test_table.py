"""Data frames, CSV and Parquet files with a column of clients."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from pyarrow import parquet

from fedjaxsim.data import (
    Population,
    as_classes,
    from_dataframe,
    load,
    load_npz,
    save_npz,
    scale,
    split,
)
from fedjaxsim.data.tables.table import read_file
from fedjaxsim.factories import make


def load_file(path, **columns: Any) -> Population:
    return make(read_file, path, **columns).population(path)


ROWS = {
    "who": ["10", "9", "10", "9", "9"],
    "age": [1, 2, 3, 4, 5],
    "y": ["yes", "no", "no", "yes", "maybe"],
    "member": [True, False, True, True, False],
    "part": ["train", "test", "test", "train", "validation"],
}
NAMES: dict[str, Any] = {"client": "who", "target": "y"}
CSV = """who,age,y,member,part
10,1,yes,true,train
9,2,no,false,test
10,3,no,true,test
9,4,yes,true,train
9,5,maybe,false,validation
"""


def polars_frame(rows):
    return pytest.importorskip("polars").DataFrame(rows)


FRAMES: dict[str, Callable[[Any], Any]] = {
    "pandas": pd.DataFrame,
    "pyarrow": pa.table,
    "polars": polars_frame,
}


def check(population):
    """That a population is that of `ROWS`: clients as numbers in order, their rows by split."""
    assert population.names.tolist() == ["9", "10"]
    assert_array_equal(population.rows(0, "train")["x"], [[4, 1]])
    assert_array_equal(population.rows(0, "validation")["x"], [[5, 0]])
    assert_array_equal(population.rows(0, "test")["x"], [[2, 0]])
    assert_array_equal(population.rows(1)["x"], [[1, 1], [3, 1]])
    assert population.fields["x"].dtype == "float32"
    assert population.categories == {"y": ("maybe", "no", "yes")}
    assert_array_equal(population.rows(0)["y"], [2, 0, 1])
    assert_array_equal(population.rows(1)["y"], [2, 1])
    assert population.public == (
        "The names of the classes are read from all clients' labels and taken as public.",
    )


@pytest.mark.parametrize("kind", FRAMES)
def test_a_data_frame_is_a_population(kind):
    check(from_dataframe(FRAMES[kind](ROWS), client="who", target="y", split="part"))


def test_files_are_populations(tmp_path):
    columns: dict[str, Any] = {**NAMES, "split": "part"}
    (tmp_path / "a.csv").write_text(CSV)
    parquet.write_table(pa.table(ROWS), tmp_path / "a.parquet")
    check(load_file(tmp_path / "a.csv", **columns))
    check(load_file(tmp_path / "a.parquet", **columns))
    check(load(f"csv:{tmp_path}/a.csv", **columns))
    check(load(f"parquet:{tmp_path}/a.parquet", **columns))
    pd.DataFrame(ROWS).to_csv(tmp_path / "a.csv.gz", index=False)
    check(load_file(tmp_path / "a.csv.gz", **columns))
    save_npz(tmp_path / "a.npz", load_file(tmp_path / "a.csv", **columns))
    check(load_npz(tmp_path / "a.npz"))


@pytest.mark.parametrize("kind", FRAMES)
def test_the_order_of_columns_is_that_of_features_and_one_hot_ones_stay_in_place(kind):
    frame = FRAMES[kind]({
        "z": [1.5, 2.5], "city": ["b", "a"], "a": [3, 4], "y": [0.5, -1], "k": ["u", "v"],
        "id": [8, 9],
    })  # fmt: skip
    population = from_dataframe(frame, client="k", target="y", one_hot=["city"], drop=["id"])
    assert_array_equal(population.fields["x"], [[1.5, 0, 1, 3], [2.5, 1, 0, 4]])
    assert_array_equal(population.fields["y"], [0.5, -1])
    assert population.categories == {}
    assert population.public == (
        "Which values 'city' may have is read from all clients' rows and taken as public.",
    )


def test_several_targets_are_named_columns_of_numbers():
    frame = pd.DataFrame(
        {"who": ["a", "b"], "n": [1, 2], "x": [5, 6], "z": [0.5, 0.0], "t": ["u", "v"]}
    )
    drop = ["t"]
    population = from_dataframe(frame, client="who", target=["z", "n"], drop=drop)
    assert_array_equal(population.fields["y"], [[0.5, 1], [0, 2]])
    assert population.columns["y"].names == ("z", "n")
    assert population.columns["x"].names == ("x",)
    with pytest.raises(ValueError, match="several targets must hold numbers, got 't'"):
        from_dataframe(frame, client="who", target=["z", "t"])
    with pytest.raises(ValueError, match=r"the target 'n' is 1\.0 in all 2 rows"):
        from_dataframe(frame.assign(n=1), client="who", target=["z", "n"], drop=drop)
    with pytest.raises(ValueError, match="'z' is named twice"):
        from_dataframe(frame, client="who", target=["z", "z"], drop=drop)


@pytest.mark.parametrize("kind", FRAMES)
def test_one_column_of_lists_is_x_as_it_is(kind):
    rows = {"who": ["a", "b"], "y": [1, 2], "x": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]}
    population = from_dataframe(FRAMES[kind](rows), client="who", target="y")
    assert_array_equal(population.fields["x"], np.array(rows["x"], np.int32), strict=True)
    flat = FRAMES[kind]({**rows, "x": [[0.5, 1.0], [1.5, 2.0]], "z": [1, 2]})
    fractions = from_dataframe(flat, client="who", target="y", drop=["z"])
    assert_array_equal(fractions.fields["x"], [[0.5, 1], [1.5, 2]])
    with pytest.raises(ValueError, match="'x'"):
        from_dataframe(flat, client="who", target="y")


def test_categories_and_numbers_of_pandas_count_as_text_and_numbers():
    frame = pd.DataFrame({
        "who": pd.Categorical(["b", "a"]),
        "y": pd.Categorical(["no", "yes"], categories=["yes", "no"]),
        "x": pd.array([1, 2], dtype="Int64"),
    })  # fmt: skip
    population = from_dataframe(frame, client="who", target="y")
    assert population.names.tolist() == ["a", "b"]
    assert population.categories == {"y": ("no", "yes")}
    assert_array_equal(population.fields["y"], [1, 0])
    assert_array_equal(population.fields["x"], [[2], [1]])


def test_categories_of_polars_are_text():
    pl = pytest.importorskip("polars")
    who = pl.Series(["b", "a"], dtype=pl.Categorical)
    y = pl.Series(["no", "yes"], dtype=pl.Enum(["yes", "no"]))
    population = from_dataframe(
        pl.DataFrame({"who": who, "kind": who, "y": y}), client="who", target="y", one_hot=["kind"]
    )
    assert population.names.tolist() == ["a", "b"]
    assert population.categories == {"y": ("no", "yes")}
    assert_array_equal(population.fields["y"], [1, 0])
    assert_array_equal(population.fields["x"], np.eye(2))


def test_numbers_that_no_column_can_hold_are_refused():
    frame = pd.DataFrame({"who": ["a", "b"], "y": [0, 1], "x": [1j, 2j]})
    with pytest.raises(ValueError, match="column x"):
        from_dataframe(frame, client="who", target="y")


def test_a_target_of_categories_that_are_numbers_keeps_the_numbers():
    frame = pd.DataFrame({"who": ["a", "a", "b"], "x": [1, 2, 3], "y": pd.Categorical([1, 2, 10])})
    population = from_dataframe(frame, client="who", target="y")
    assert_array_equal(population.fields["y"], [1, 2, 10])
    assert population.categories == {}
    with pytest.raises(ValueError, match=r"'y' holds text, such as '1' in row 1: encode it"):
        from_dataframe(frame, client="who", target="x")
    encoded = from_dataframe(frame, client="who", target="x", one_hot=["y"])
    assert_array_equal(encoded.fields["x"], np.eye(3)[[0, 2, 1]])


def test_the_names_of_clients_stay_as_they_are_written(tmp_path):
    (tmp_path / "a.csv").write_text("who,x,y\n007,1,0\n7,2,1\nNA,3,1\n")
    population = load_file(tmp_path / "a.csv", client="who", target="y")
    assert population.names.tolist() == ["007", "7", "NA"]


def test_a_type_is_that_of_the_whole_column_however_late_its_first_fraction(tmp_path):
    lines = [f"{k % 2},{k},{k % 3}" for k in range(150_000)]  # more than the megabyte of a block
    (tmp_path / "a.csv").write_text("\n".join(["who,x,y", *lines, "1,0.5,0"]))
    population = load_file(tmp_path / "a.csv", client="who", target="y")
    assert population.fields["x"][-1, 0] == 0.5


def test_a_table_without_clients_is_divided(tmp_path):
    (tmp_path / "a.csv").write_text("age,y\n" + "".join(f"{k},{'ab'[k % 2]}\n" for k in range(20)))
    population = load(f"csv:{tmp_path}/a.csv", target="y", partition="iid", num_clients=4, test=0.2)
    assert population.splits["train"].count.tolist() == [4] * 4
    assert_array_equal(population.fields["y"], population.fields["x"][:, 0] % 2)
    assert population.categories == {"y": ("a", "b")}


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"client": "whom"}, "'whom'"),
        ({}, {"drop": ["part", "nope"]}, "'nope'"),
        ({}, {"client": "y"}, "'y'"),
        ({}, {"drop": ["age", "member", "part"]}, "features"),
        (
            {},
            {},
            "'part'.*'train' in row 1",
        ),
        ({"part": ["1", "-2e3", "many", "3", "4"]}, {}, "'part'.*'many' in row 3"),
        ({}, {"drop": "part"}, r"drop must be a list of columns, got 'part'"),
        ({"age": [1, None, 2, None, 2]}, {}, "'age' has 2 missing values in 5 rows.* in row 2"),
        ({"part": [1, None, 3, None, 5]}, {}, "'part'.* missing"),
        ({"part": [1.0, math.nan, 3.0, 4.0, 5.0]}, {}, "'part'.* missing"),
        ({"who": ["a", None, "b", "b", ""]}, {"drop": ["part"]}, "'who'.* missing"),
        ({"y": ["a", None, "b", "b", "b"]}, {"drop": ["part"]}, "'y'.* missing"),
        ({"part": [1.0, 2.0, 3.0, 4.0, math.inf]}, {}, "'part'.*inf"),
        ({"part": [1.0, 2.0, 3.0, 4.0, 1e39]}, {}, r"'part'.*1e\+39"),
        ({"part": pd.date_range("2020", periods=5)}, {}, "'part'.*timestamp"),
        ({"y": ["a"] * 5}, {"drop": ["part"]}, "'y'"),
        ({"y": [2] * 5}, {"drop": ["part"]}, "'y'"),
        ({"y": pd.date_range("2020", periods=5)}, {"drop": ["part"]}, "'y'"),
        ({"part": ["train"] * 4 + ["extra"]}, {"split": "part"}, "'part'.*'extra' in row 5"),
        ({"part": ["test"] * 5}, {"split": "part"}, "no client has training rows"),
        (
            {"part": [2**25, 2**25 + 1, 3, 4, 5]},
            {},
            r"'part' holds integers .* cannot tell apart.*drop",
        ),
        ({"y": [2**33, 2**33 + 1, 3, 4, 5]}, {"drop": ["part"]}, "field 'y' holds integers"),
    ],
)
@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_what_is_wrong_in_a_table_is_named(kind, changes, arguments, message):
    with pytest.raises(ValueError, match=message):
        from_dataframe(FRAMES[kind]({**ROWS, **changes}), **{**NAMES, **arguments})


def test_what_is_no_table_is_refused():
    with pytest.raises(TypeError, match="dataframe"):
        from_dataframe([1, 2], **NAMES)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="distinct names"):
        from_dataframe(pd.DataFrame([[1, 2]], columns=["y", "y"]), **NAMES)
    with pytest.raises(ValueError, match="no rows"):
        from_dataframe(pd.DataFrame(ROWS).head(0), **NAMES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Empty CSV"),
        ("who,x,y\n", "no rows"),
        (CSV[:-24], "5 columns"),
        ('who,x,y\n1,2,"yes', "UTF-8: unexpected end of data"),
        (",who,x,y\n0,1,2,3\n", r"a column has no name.*to_csv\(index=False\)"),
        ("who,who,y\n0,1,2\n", "distinct names"),
        ("who;x;y\n0;1;2\n", "'who'.*'who;x;y'"),
        ("who,x,y\n0,1,a\n1,NA,b\n", "'x'"),
    ],
)
def test_what_is_wrong_in_a_csv_file_is_named(tmp_path, content, message):
    (tmp_path / "odd.csv").write_text(content)
    with pytest.raises(ValueError, match=rf"odd\.csv: .*{message}"):
        load_file(tmp_path / "odd.csv", **NAMES)


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "odd.csv").write_bytes("who,x,y\nJosé,1,a\nb,2,b\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"odd\.csv: .*UTF"):
        load_file(tmp_path / "odd.csv", **NAMES)
    (tmp_path / "odd.csv").write_bytes("who,x,y\na,1,José\nb,2,b\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"odd\.csv: .*UTF-8: .*'utf-8' codec"):
        load_file(tmp_path / "odd.csv", **NAMES)


def test_a_truncated_parquet_file_is_named(tmp_path):
    parquet.write_table(pa.table(ROWS), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for end in range(0, len(content), 97):
        (tmp_path / "cut.parquet").write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"cut\.parquet: "):
            load_file(tmp_path / "cut.parquet", **NAMES)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        load_file(tmp_path / "absent", **NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "--target"),
        ({"target": "y"}, "--client"),
        (
            {"target": "y", "client": "who", "drop": ["part"], "partition": "iid"},
            "has its own clients",
        ),
    ],
)
def test_a_table_needs_a_target_and_clients_or_a_partition(tmp_path, arguments, message):
    (tmp_path / "a.csv").write_text("who,part,age,y\na,train,1,0\nb,test,2,1\n")
    with pytest.raises(ValueError, match=message):
        load(f"csv:{tmp_path}/a.csv", **arguments)


COLUMNS = st.one_of(
    *(
        st.lists(values, min_size=6, max_size=6).map(make)
        for values, make in [
            (st.integers(-(2**20), 2**20), pd.Series),
            (st.floats(-(2.0**90), 2.0**90, width=32), lambda v: pd.Series(v, dtype="float32")),
            (st.booleans(), pd.Series),
            (st.integers(0, 9), lambda v: pd.Series(v, dtype="Int64")),
        ]
    )
)


@pytest.mark.filterwarnings("ignore:column")
@settings(deadline=None, max_examples=60)
@given(
    columns=st.lists(COLUMNS, min_size=1, max_size=3),
    clients=st.lists(st.sampled_from([b"a", b"b", "c"]), min_size=6, max_size=6),
)
def test_random_frames_are_read_as_pandas_reads_them(columns, clients):
    frame = pd.DataFrame({f"x{k}": column for k, column in enumerate(columns)})
    names = [each.decode() if isinstance(each, bytes) else each for each in clients]
    order = np.argsort(names, kind="stable")
    frame = frame.assign(who=pd.Series(clients, dtype=object), y=[0, 1, 0, 1, 0, 1])
    population = from_dataframe(frame, client="who", target="y")
    expected = frame.drop(columns=["who", "y"]).astype("float64").to_numpy()[order]
    np.testing.assert_array_equal(population.fields["x"], expected.astype(np.float32))
    assert population.names.tolist() == sorted(set(names))


def frame_of(seed):
    """Return a random frame: clients in any order, gaps, text, labels and a shuffled index."""
    rng, n = np.random.default_rng(seed), 40
    frame = pd.DataFrame({
        "year": rng.integers(1950, 2020, n),
        "who": rng.permutation(np.resize(["10", "9", "b", "a b"], n)),
        "dose": rng.lognormal(3, 1, n),
        "smokes": rng.random(n) < 0.5,
        "city": rng.choice(["Ulm", "Bern", "Metz"], n),
        "label": rng.permutation(np.resize([[1, 2, 5], [-1, 1, 7], ["u", "v", "w"]][seed % 3], n)),
    })  # fmt: skip
    frame = frame[rng.permutation(frame.columns)]
    frame.loc[rng.choice(n, 4, replace=False), "dose"] = np.nan
    frame.index = rng.permutation(n) + 100
    return frame


@pytest.mark.filterwarnings("ignore:4 of 40 rows have missing values:UserWarning")
@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 300), marks=pytest.mark.thorough)]
)
def test_rows_values_order_units_and_labels_of_random_frames_are_those_of_pandas(seeds):
    for seed in seeds:
        frame = frame_of(seed)
        read = from_dataframe(
            frame, client="who", target="label", one_hot=["city"], drop_missing=True
        )
        ranges = {"year": (1950.0, 2020.0), "dose": (0.0, float(np.nanmax(frame["dose"])))}
        population = split(scale(as_classes(read), ranges), test=0.3, seed=seed)
        # What pandas says, at the positions that the rows say they come from.
        rows = frame.iloc[population.source_row]
        complete = frame.dropna()
        assert sorted(rows.index) == sorted(complete.index)
        clients = complete.groupby("who").size()
        assert population.names.tolist() == clients.index.tolist()
        assert_array_equal(population.counts.sum(axis=1), clients)
        assert_array_equal(np.repeat(population.names, clients), rows.who)
        assert np.all(np.abs(population.splits["test"].count - 0.3 * clients) < 1)
        features = rows.drop(columns=["who", "label"])
        order = [
            name
            for column in features
            for name in (["city=Bern", "city=Metz", "city=Ulm"] if column == "city" else [column])
        ]
        wanted = pd.get_dummies(features, columns=["city"], prefix_sep="=")[order].astype(float)
        columns = population.columns["x"]
        assert list(columns.names) == order
        stored = population.fields["x"]
        assert np.abs(stored).max() <= 1
        np.testing.assert_allclose(columns.original(stored), wanted, rtol=1e-5, atol=1e-3)
        names = np.array(population.categories["y"])
        assert_array_equal(names[population.fields["y"]], rows.label.astype(str))


def test_a_stray_quote_is_read(tmp_path):
    (tmp_path / "a.csv").write_text('who,size,b,y\nA,5" pipe,0,2\nB,6 pipe,1,3\n')
    population = load_file(tmp_path / "a.csv", client="who", target="y", drop=["size"])
    assert population.fields["y"].tolist() == [2, 3]


@pytest.mark.filterwarnings("ignore:column")
@settings(deadline=None, max_examples=60)
@given(
    cells=st.lists(st.tuples(*[st.integers(-99, 99)] * 3), min_size=6, max_size=6),
    row=st.integers(0, 5),
    column=st.integers(0, 2),
    bad=st.sampled_from(["", "NaN", "inf", "-inf", "1e39", "word", "5 m", "12:30"]),
)
def test_a_bad_cell_of_a_random_table_is_refused_by_its_row_and_column(
    tmp_path_factory, cells, row, column, bad
):
    table = [[*map(str, each)] for each in cells]
    table[row][column] = bad
    path = tmp_path_factory.getbasetemp() / "bad.csv"
    lines = [",".join([*each, "ab"[k % 2], str(k // 3)]) for k, each in enumerate(table)]
    path.write_text("\n".join(["u,v,w,who,y", *lines]) + "\n")
    with pytest.raises(ValueError, match=rf"'{'uvw'[column]}'.*in row {row + 1}\b") as raised:
        load_file(path, client="who", target="y")
    assert "\n" not in str(raised.value)


def test_a_series_is_refused_by_what_is_read():
    with pytest.raises(TypeError, match="needs a dataframe of pandas, polars or pyarrow"):
        from_dataframe(pd.Series([1, 2]), client="who", target="y")  # type: ignore[arg-type]


def test_a_column_called_split_is_the_split_unless_it_has_another_role():
    split = ["train", "test", "train", "val"]
    x = [1.0, 2.0, 3.0, 4.0]
    frame = pd.DataFrame({"who": [1, 1, 2, 2], "x": x, "y": [0, 1, 1, 0], "split": split})
    found = from_dataframe(frame, client="who", target="y")
    np.testing.assert_array_equal(found.counts, [[1, 0, 1], [1, 1, 0]])
    assert found.columns["x"].names == ("x",)
    dropped = from_dataframe(frame, client="who", target="y", drop=["split"])
    np.testing.assert_array_equal(dropped.counts, [[2, 0, 0], [2, 0, 0]])
    lengths = frame.assign(split=[3.0, 4.0, 5.0, 6.0])  # of something else
    assert from_dataframe(lengths, client="who", target="y").columns["x"].names == ("x", "split")


def test_rows_with_missing_values_are_left_out_and_counted(tmp_path):
    frame = pd.DataFrame(
        {
            "who": [1, 1, 2, 2, 2],
            "age": [1.0, np.nan, 3, 4, 5],
            "note": [np.nan] * 5,
            "y": [0, 1, 1, 0, 1],
        }
    )
    with pytest.raises(ValueError, match="'age' has 1 missing values in 5 rows"):
        from_dataframe(frame, client="who", target="y", drop=["note"])
    with pytest.warns(UserWarning, match="1 of 5 rows have missing values .*: 'age' 1"):
        found = from_dataframe(frame, client="who", target="y", drop=["note"], drop_missing=True)
    complete = frame.dropna(subset=["age"])
    np.testing.assert_array_equal(found.fields["x"][:, 0], complete.age)
    np.testing.assert_array_equal(found.source_row, complete.index)
    assert found.public == ()
    with pytest.warns(UserWarning, match="1 of 5 rows"):
        by_day = from_dataframe(
            frame.assign(day=[5, 4, 3, 2, 1]),
            client="who", target="y", drop=["note", "day"], time="day", drop_missing=True,
        )  # fmt: skip
    np.testing.assert_array_equal(by_day.fields["x"][:, 0], [1, 5, 4, 3])
    np.testing.assert_array_equal(by_day.source_row, [0, 4, 3, 2])
    with pytest.warns(UserWarning, match="2 of 5 rows"):
        alone = from_dataframe(
            frame.assign(age=frame.age.where(frame.who == 2)),
            client="who", target="y", drop=["note"], drop_missing=True,
        )  # fmt: skip
    assert alone.num_clients == 1
    [sentence] = alone.public
    assert sentence.startswith("Clients without a complete row, 1 of them, were left out")
    frame.drop(columns=["who", "note"]).to_csv(tmp_path / "a.csv", index=False)
    arguments: dict[str, Any] = {"target": "y", "partition": "iid", "num_clients": 2, "test": 0.0}
    with pytest.warns(UserWarning, match="1 of 5 rows"):
        dealt = load(f"csv:{tmp_path / 'a.csv'}", drop_missing=True, **arguments)
    np.testing.assert_array_equal(dealt.fields["x"][:, 0], frame.age[dealt.source_row])


def test_other_marks_of_cells_are_read_as_pandas_reads_them(tmp_path):
    text = "who;age;pay;y\n1;1,5;999;0\n1;.;3,25;1\n2;2,5;4,5;1\n2;3,5;4;0\n"
    (tmp_path / "a.csv").write_text(text)
    names: dict[str, Any] = {"client": "who", "target": "y"}
    with pytest.warns(UserWarning, match=r"2 of 4 rows .*: 'age' 1, 'pay' 1"):
        found = load_file(
            tmp_path / "a.csv",
            sep=";",
            decimal=",",
            missing=(".", "999"),
            drop_missing=True,
            **names,
        )
    marks: dict[str, Any] = {"sep": ";", "decimal": ",", "na_values": [".", "999"]}
    want = pd.read_csv(tmp_path / "a.csv", **marks).dropna()
    np.testing.assert_array_equal(found.fields["x"], want[["age", "pay"]])
    (tmp_path / "b.csv").write_text(text.replace(".", "2,5"))
    with pytest.raises(ValueError, match="decimal comma, such as '1,5'"):
        load_file(tmp_path / "b.csv", sep=";", **names)
    with pytest.raises(ValueError, match=r"numbers except '\.' in 1 rows, the first .* row 2"):
        load_file(tmp_path / "a.csv", sep=";", decimal=",", **names)
    with pytest.raises(ValueError, match="sep and decimal must differ"):
        load_file(tmp_path / "a.csv", decimal=",", **names)


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ([20, 35, 999, 999], 999),
        ([20, 35, 80, -9, -9], -9),
        ([1, 2, 3, 9, 9], 9),
        ([20, 35, 999], None),  # once
        ([*range(10), 9], None),  # not far
        ([90, 97, 98, 99, 99], None),
        ([5, 5], None),
        ([0.5, 99.5, 99.5], None),
    ],
)
def test_repeated_nines_at_the_end_of_a_column_are_named(values, number):
    frame = pd.DataFrame({"x": values, "who": 0, "y": np.arange(len(values)) % 2})
    with warnings.catch_warnings(record=True, action="always") as told:
        from_dataframe(frame, client="who", target="y")
    said = [str(each.message) for each in told]
    assert len(said) == (number is not None)
    if number is not None:
        count = values.count(number)
        assert f"column 'x' holds {number} in {count} rows" in said[0]


def test_a_partition_keeps_the_splits_of_a_table(tmp_path):
    rng, rows = np.random.default_rng(0), 40
    split = rng.choice(["train", "test"], rows)
    frame = pd.DataFrame({"age": np.arange(rows), "y": rng.integers(0, 2, rows), "part": split})
    frame.to_csv(tmp_path / "a.csv", index=False)
    arguments: dict[str, Any] = {"partition": "iid", "num_clients": 3, "split": "part"}
    found = load(f"csv:{tmp_path}/a.csv", target="y", **arguments)
    for name in ("train", "test"):
        ages = found.fields["x"][found.splits[name].all_rows(), 0]
        assert sorted(ages) == sorted(frame.age[split == name])


def test_weights_of_rows_are_a_field_and_bounded():
    frame = pd.DataFrame({"who": [1, 1, 2], "x": [1.0, 2, 3], "y": [0, 1, 1], "w": [0.5, 1, 0.25]})
    found = from_dataframe(frame, client="who", target="y", row_weights="w")
    np.testing.assert_array_equal(found.fields["row_weight"], frame.w)
    assert found.columns["x"].names == ("x",)
    with pytest.raises(ValueError, match="'w' must be positive and at most 1, got 2 in row 2"):
        from_dataframe(frame.assign(w=frame.w * 2), client="who", target="y", row_weights="w")
