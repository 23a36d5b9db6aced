"""Tables, one row per example: data frames, CSV and Parquet files.

A table becomes the arrays of the .npz format; see `fedjaxsim.data.npz`.
"""

import collections
import csv
import io
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fedjaxsim.data.arrays import SPLITS, merged_integers, split_called, to_float32
from fedjaxsim.data.columns import Columns
from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.npz import arrays_of_columns, assemble, distinct, owners
from fedjaxsim.data.population import Population
from fedjaxsim.data.text import encode, stacked
from fedjaxsim.extras import importing

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, Table

_SHOWN = 8
"""Names of columns that fit into a message."""
_FEW = 20
"""Values of a column that may be encoded in any number of rows."""


class Roles(NamedTuple):
    """The roles of columns; the arguments of `from_dataframe`, with client None for none."""

    client: str | None
    target: str
    split: str | None = None
    one_hot: Sequence[str] = ()
    drop: Sequence[str] = ()
    x: str | None = None

    @property
    def taken(self) -> list[str]:
        """The columns of clients, the target and splits."""
        named = (self.client, self.target, self.split)
        return [name for name in named if name is not None]


def from_dataframe(
    frame: Any,
    *,
    client: str,
    target: str,
    split: str | None = None,
    one_hot: Sequence[str] = (),
    drop: Sequence[str] = (),
    x: str | None = None,
) -> Population:
    """Make a population of a table with one row per example: pandas, polars, a pyarrow table.

    Every other column is a feature, in the order of the columns: "x" is (N, d) float32. Clients
    are sorted by name, as numbers where all are whole numbers, and keep the order of their
    rows. A target of numbers stays; a target of text becomes classes 0 … c − 1 in sorted order,
    with their names in `categories`.

    Args:
      frame: a data frame that pyarrow reads.
      client: column with the client of each row.
      target: column to predict.
      split: column of "train", "validation" and "test", or other usual names of these; by default
        all rows are training rows.
      one_hot: columns to replace by one column of 0 and 1 per value that occurs.
      drop: columns that are no features.
      x: the only column of features. Text becomes its characters, (N, L) integers, as in
        `load_leaf`; lists of numbers of one length stay as they are.

    Raises:
      TypeError: the argument is no data frame.
      ValueError: names the column that is absent, has missing values or holds no numbers.
    """
    return assemble(arrays_of(frame, Roles(client, target, split, one_hot, drop, x)))


def arrays_of_file(
    path: str | os.PathLike[str],
    *,
    target: str,
    client: str | None = None,
    split: str | None = None,
    one_hot: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    x: str | None = None,
) -> dict[str, np.ndarray]:
    """Read clients, rows and targets from a CSV or Parquet file; see `from_dataframe`.

    A CSV file is UTF-8, with commas and a line of names first; also .gz. Names of clients stay
    as they are written. In a column of numbers an empty cell, NA, NaN and null are missing; in
    text only an empty one is.

    Args:
      path: the file.
      target: Column to predict.
      client: Column with the client of each row; without it, give --partition.
      split: Column with train, validation or test; needs --client.
      one_hot: Columns to replace by one column of 0 and 1 per value.
      drop: Columns that are no features.
      x: The only column of features; text becomes its characters.
    """
    roles = Roles(client, target, split, one_hot, drop, x)
    with in_file(path):
        return arrays_of(read_table(path, client), roles)


def read_table(path: str | os.PathLike[str], client: str | None) -> "Table":
    """Read a Parquet file, known by its first bytes, or CSV, whose column `client` stays text."""
    with importing("tables"):
        import pyarrow
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet

    with open(existing(path, "table"), "rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    if is_parquet:
        with reading("Parquet file"):
            return parquet.ParquetFile(os.fspath(path)).read()
    with reading("CSV file"), pyarrow.input_stream(os.fspath(path)) as stream:
        content = stream.read()
    if not content.strip():
        raise ValueError("the file is empty")
    _check_text(content)
    # In memory of pyarrow: a thread of its reader may hold it after Python's memory is gone.
    sink = pyarrow.BufferOutputStream()
    sink.write(content)
    with reading("CSV file"):
        return arrow_csv.read_csv(
            pyarrow.BufferReader(sink.getvalue()),
            # In one block, since the first of several would decide the types.
            read_options=arrow_csv.ReadOptions(block_size=len(content), use_threads=False),
            parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types={} if client is None else {client: pyarrow.string()}
            ),
        )


def _check_text(content: bytes) -> None:
    """Check that a CSV file is in UTF-8 and does not end in a quoted cell."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise ValueError(f"line {line} is not UTF-8: save the file in UTF-8") from error
    if text.count('"') % 2 == 0:
        return
    try:
        collections.deque(csv.reader(io.StringIO(text, newline=""), strict=True), maxlen=0)
    except csv.Error as error:
        if "end of data" in str(error):
            raise ValueError(
                "a quoted cell does not end: the file is truncated or not CSV"
            ) from error


def arrays_of(frame: Any, roles: Roles, pixels: Any = None) -> dict[str, np.ndarray]:
    """Return the arrays of the .npz format of a data frame; `pixels` (N, ...) replace features."""
    table = table_of(frame)
    _check_names(table, roles)
    if roles.x is not None or pixels is not None:
        features = [] if roles.x is None else [roles.x]
    else:
        others = {*roles.taken, *roles.drop}
        features = [name for name in table.column_names if name not in others]
        if not features:
            raise ValueError(f"no column is left for features, of {_listed(table.column_names)}")
    for name in (*roles.taken, *features):
        _require_complete(name, table[name])
    kinds = [kind_of(table[name]) for name in features]
    public = []
    if pixels is not None:
        arrays = {"x": pixels}
    elif roles.x is not None and kinds == ["text"]:
        arrays, public = encode({"x": [np.array(table[roles.x].to_pylist())]}, [])
    elif kinds == ["list"]:
        arrays = {"x": stacked(table[features[0]].to_numpy(), f"column {features[0]!r}")}
    else:
        arrays = _numbers(table, features, roles.one_hot)
    arrays |= _target(roles.target, table[roles.target])
    if arrays["y"].ndim == 1:
        arrays |= arrays_of_columns("y", Columns((roles.target,)))
    if roles.client is not None:
        arrays |= owners(_texts(table[roles.client]))
    if roles.split is not None:
        arrays["split"] = _splits(roles.split, table[roles.split])
    if "categories.y" in arrays:
        public.append("The names of the classes are read from all clients' labels")
    if roles.one_hot:
        of = _listed(roles.one_hot)
        public.append(f"Which values {of} may have is read from all clients' rows")
    arrays["public"] = np.array([f"{one} and taken as public." for one in public], dtype=str)
    return arrays


def table_of(frame: Any) -> "Table":
    """Return a data frame as a table of pyarrow: no extension types, dictionaries of numbers."""
    with importing("tables"):
        import pyarrow

    if not hasattr(frame, "__arrow_c_stream__") or not hasattr(frame, "columns"):
        raise TypeError(
            f"from_dataframe needs a dataframe of pandas, polars or pyarrow, got {type(frame)}"
        )
    try:
        # The index of a frame of pandas is no column.
        table = pyarrow.table(
            frame.reset_index(drop=True) if hasattr(frame, "reset_index") else frame
        )
    except (TypeError, ValueError, pyarrow.ArrowNotImplementedError) as error:
        raise ValueError(
            f"columns must have distinct names and values of one type each: {error}"
        ) from error
    names, columns = table.column_names, []
    if len(set(names)) < len(names):
        raise ValueError(f"columns must have distinct names, got {_listed(names)}")
    for column in table.columns:
        if isinstance(column.type, pyarrow.BaseExtensionType):
            parts = [part.storage for part in column.chunks]
            column = pyarrow.chunked_array(parts, column.type.storage_type)
        if pyarrow.types.is_dictionary(kind := column.type):
            if pyarrow.types.is_string_view(kind.value_type):  # of polars; it has no cast to text
                kind = pyarrow.dictionary(kind.index_type, pyarrow.string(), kind.ordered)
                column = column.cast(kind)
            if not _is_number(kind.value_type):
                column = column.cast(kind.value_type)
        elif pyarrow.types.is_string_view(kind):
            column = column.cast(pyarrow.string())
        columns.append(column)
    return pyarrow.table(columns, names)


def _check_names(table: "Table", roles: Roles) -> None:
    names = table.column_names
    for role in ("one_hot", "drop"):
        if isinstance(name := getattr(roles, role), str):
            raise ValueError(f"{role} must be a list of columns, got {name!r}: write [{name!r}]")
    features = [] if roles.x is None else [roles.x]
    if features and (roles.one_hot or roles.drop):
        raise ValueError(f"x names the only feature, {roles.x!r}: leave out one-hot and drop")
    named = [*roles.taken, *features, *roles.one_hot, *roles.drop]
    absent = [name for name in named if name not in names]
    if absent:
        raise ValueError(f"there is no column {absent[0]!r}, only {_listed(names)}")
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise ValueError(
            f"a column is either the client, the target, the split, x, one-hot or dropped, but "
            f"{twice!r} is named twice"
        )
    if "" in names:
        raise ValueError(
            "a column has no name: where it numbers the rows, write the file without it (pandas: "
            "to_csv(index=False)), otherwise give it one"
        )
    if len(table) == 0:
        raise ValueError("the table has no rows")


def kind_of(column: "ChunkedArray") -> Literal["number", "text", "list", "other"]:
    """Return what a column holds; truth values are numbers, and numbers of categories text."""
    from pyarrow import types

    kinds: Any = {
        "number": (_is_number,),
        "text": (types.is_string, types.is_large_string, types.is_dictionary),
        "list": (types.is_list, types.is_large_list, types.is_fixed_size_list),
    }
    return next((kind for kind, of in kinds.items() if any(f(column.type) for f in of)), "other")


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    known = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
    return any(is_of(kind) for is_of in known)


def missing_values(column: "ChunkedArray") -> np.ndarray:
    """Return whether each value is missing, (N,)."""
    missing = column.is_null(nan_is_null=True).to_numpy()
    return missing | (column.to_numpy() == "") if kind_of(column) == "text" else missing


def _require_complete(name: str, column: "ChunkedArray") -> None:
    missing = missing_values(column)
    if missing.any():
        raise ValueError(
            f"column {name!r} has {missing.sum()} missing values in {len(column)} rows, the "
            f"first in row {np.argmax(missing) + 1}: fill them in, or leave out the rows or the "
            "column (drop)"
        )


def _texts(column: "ChunkedArray") -> np.ndarray:
    """Return the values as strings, (N,); text stays objects, which are not padded."""
    values = column.to_numpy()
    if values.dtype.kind != "O":
        return values.astype(str)
    texts = [each.decode() if isinstance(each, bytes) else str(each) for each in values]
    return np.array(texts, object)


def _numbers(table: "Table", features: list[str], one_hot: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the array x, (N, d) float32, and its columns."""
    parts, called, exclusive = [], [], 0
    for name in features:
        column = table[name]
        if name in one_hot:
            names, place = distinct(_texts(column))
            if not encodable(len(names), len(place)):
                raise ValueError(
                    f"column {name!r} has {len(names)} values in {len(place)} rows, too many to "
                    "encode (one-hot): leave it out (drop)"
                )
            parts.append((place[:, None] == np.arange(len(names))).astype(np.float32))
            called += [(f"{name}={value}", 1.0) for value in names.tolist()]
            exclusive += len(names) - 1
            continue
        if kind_of(column) != "number":
            raise ValueError(f"column {name!r} {_why_no_feature(column, features)}")
        given = column.to_numpy()
        values = to_float32(given)
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values)))
            raise ValueError(
                f"column {name!r} must hold finite numbers that fit into float32, got {given[row]} "
                f"in row {row + 1}"
            )
        if (merged := merged_integers(given)) is not None:
            raise ValueError(
                f"column {name!r} holds integers that float32 cannot tell apart, such as {merged}: "
                "if they are ids, leave the column out (drop), or else divide it"
            )
        parts.append(values[:, None])
        called.append((name, 1.0 if given.dtype == bool else math.inf))
    names, bounds = zip(*called, strict=True)
    return {
        "x": np.concatenate(parts, axis=1),
        **arrays_of_columns("x", Columns(names, bound=bounds, exclusive=exclusive)),
    }


def encodable(values: int, rows: int) -> bool:
    """Return whether distinct values of a column of text become one column each."""
    return values <= max(_FEW, rows / 2)


def _why_no_feature(column: "ChunkedArray", features: list[str]) -> str:
    kind = kind_of(column)
    if kind == "text":
        import pandas

        values = [*map(str, column.to_pylist())]
        row = int(np.argmax(pandas.isna(pandas.to_numeric(values, errors="coerce"))))
        return (
            f"holds text, such as {values[row][:40]!r} in row {row + 1}: encode it (one-hot), "
            "leave it out (drop), or read its characters alone (x)"
        )
    if kind == "list":
        return f"holds lists, which must be the only feature, of {_listed(features)}: drop others"
    return f"holds {column.type}, no numbers: make numbers of it, or leave it out (drop)"


def _target(name: str, column: "ChunkedArray") -> dict[str, np.ndarray]:
    """Return the array y, (N,), and for text the names of its classes."""
    kind, values = kind_of(column), column.to_numpy()
    if kind == "list":
        return {"y": stacked(values, f"column {name!r}")}
    if kind == "number" or values.dtype.kind in "iuf":  # pandas has categories that are numbers
        found = {"y": values.astype(np.float64) if values.dtype.kind == "O" else values}
    elif kind == "text":
        names, classes = distinct(_texts(column))
        found = {"y": classes.astype(np.int32), "categories.y": names}
    else:
        raise ValueError(f"the target {name!r} must hold numbers or text, got {column.type}")
    if len(np.unique(found["y"])) == 1:
        raise ValueError(
            f"the target {name!r} is {values[0]} in all {len(values)} rows: there is "
            "nothing to predict"
        )
    return found


def _splits(name: str, column: "ChunkedArray") -> np.ndarray:
    """Return the array split, (N,)."""
    values = _texts(column)
    places = [split_called(value) for value in values]
    if None in places:
        row = places.index(None)
        raise ValueError(
            f"the split {name!r} must hold {', '.join(SPLITS)}, got "
            f"{values[row][:40]!r} in row {row + 1}"
        )
    return np.array(places)


def _listed(names: Sequence[str]) -> str:
    """List names of columns for a message, the first of many."""
    more = [f"… ({len(names)} in all)"] if len(names) > _SHOWN else []
    return ", ".join([*map(repr, names[:_SHOWN]), *more])
