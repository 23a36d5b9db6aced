"""Tables, one row per example: data frames, CSV and Parquet files."""

import collections
import csv
import dataclasses
import io
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.arrays import merged_integers, split_called, to_float32
from fedjaxsim.data.columns import Columns
from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.population import Population
from fedjaxsim.data.source import Source, listed, numbered, splits_of
from fedjaxsim.data.text import encode
from fedjaxsim.extras import importing
from fedjaxsim.factories import Options

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, Table

_FEW_ODD = 3
"""Distinct texts among numbers that may stand for missing values."""
_MOST_NINES = 1e8
_LARGEST = float(np.finfo(np.float32).max)
_SPLIT = "split"
"""The column that is read as the split, if it holds names of splits."""
_FEW = 20
"""Values of a column that may be encoded in any number of rows."""


Target = Annotated[str, "Column to predict."]
Client = Annotated[str | None, "Column with the client of each row; without it, give --partition."]
OneHot = Annotated[Sequence[str], "Columns to replace by one column of 0 and 1 per value."]
Drop = Annotated[Sequence[str], "Columns that are no features."]
OnlyFeature = Annotated[str | None, "The only column of features; text becomes its characters."]


@dataclasses.dataclass(frozen=True)
class Roles(Options):
    """The roles of columns; see `from_dataframe`."""

    target: Annotated[
        str | Sequence[str] | None,
        "Column to predict, or several of numbers; without it, columns can be shown.",
    ] = None
    client: Client = None
    split: Annotated[str | None, "Column with train, validation or test."] = None
    one_hot: OneHot = ()
    drop: Drop = ()
    x: OnlyFeature = None
    exposure: Annotated[
        str | None, "Column of exposures, such as years at risk, of loss poisson."
    ] = None
    row_weights: Annotated[
        str | None, "Column of weights of rows in the loss, above 0 and at most 1."
    ] = None
    time: Annotated[
        str | None, "Column by which rows are sorted and split; a feature unless dropped."
    ] = None
    drop_missing: Annotated[bool, "Leave out rows with a missing value; else they are refused."] = (
        False
    )

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns to predict."""
        return (self.target,) if isinstance(self.target, str) else tuple(self.target or ())

    @property
    def taken(self) -> list[str]:
        """The columns of clients, targets, splits, exposures and weights."""
        named = (self.client, *self.targets, self.split, self.exposure, self.row_weights)
        return [name for name in named if name is not None]

    def with_split(self, names: list[str], values: Callable[[str], np.ndarray]) -> "Roles":
        """Return the roles with the column `split` as the split, if it holds names of splits.

        Another role of the column leaves the roles as they are.
        """
        taken = {self.split, *self.targets, self.x, *self.one_hot, *self.drop}
        if self.split or self.client == _SPLIT or _SPLIT in taken or _SPLIT not in names:
            return self
        distinct = {*values(_SPLIT).tolist()}
        is_split = all(split_called(value) is not None for value in distinct)
        return dataclasses.replace(self, split=_SPLIT) if is_split else self


def from_dataframe(
    frame: Any,
    *,
    client: str,
    target: str | Sequence[str] | None,
    split: str | None = None,
    one_hot: Sequence[str] = (),
    drop: Sequence[str] = (),
    x: str | None = None,
    exposure: str | None = None,
    drop_missing: bool = False,
    row_weights: str | None = None,
    time: str | None = None,
) -> Population:
    """Make a population of a table with one row per example: pandas, polars, a pyarrow table.

    Every other column is a feature, in the order of the columns: "x" is (N, d) float32. Clients
    are sorted by name, as numbers where all are whole numbers, and keep the order of their
    rows. A target of numbers stays; a target of text becomes classes 0 … c − 1 in sorted order,
    with their names in `categories`. Several targets are numbers, (N, t).

    Args:
      frame: a data frame that pyarrow reads.
      client: column with the client of each row.
      target: column to predict, or several; None for rows whose target nobody knows yet.
      split: column of "train", "validation" and "test", or other usual names of these; by default
        a column called split that holds these, else all rows are training rows.
      one_hot: columns to replace by one column of 0 and 1 per value that occurs.
      drop: columns that are no features.
      x: the only column of features. Text becomes its characters, (N, L) integers, as in
        `load_leaf`; lists of numbers of one length stay as they are.
      exposure: column of positive exposures, such as years at risk, for `tasks.poisson`.
      drop_missing: whether rows with a missing value are left out, with a warning that counts them;
        else they are refused.
      row_weights: column of the weights of rows in the loss of training, in (0, 1].
      time: column of numbers, dates or texts such as 2020-12-31 by which each client's rows are
        sorted, for `split` by "time". It stays a feature unless it is dropped.

    Raises:
      TypeError: the argument is no data frame.
      ValueError: names the column that is absent, has missing values or holds no numbers.
    """
    roles = Roles(
        target, client, split, one_hot, drop, x, exposure, row_weights, time, drop_missing
    )
    return read_frame(frame, roles).population()


def read_frame(frame: Any, roles: Roles) -> Source:
    """Read clients, rows and targets from a data frame; see `from_dataframe`."""
    return _varied(source_of(frame, roles), roles.targets)


def read_file(
    path: str | os.PathLike[str],
    roles: Roles,
    *,
    missing: Annotated[tuple[str, ...], "Cells that stand for a missing number, as 999,-9"] = (),
    sep: Annotated[str, "Character between the cells of a CSV file, or tab."] = ",",
    decimal: Annotated[str, "Decimal point of a CSV file."] = ".",
) -> Source:
    """Read clients, rows and targets from a CSV or Parquet file; see `from_dataframe`.

    A CSV file is UTF-8, with a line of names first; also .gz. Names of clients stay as they are
    written. In a column of numbers an empty cell, NA, NaN, null and `missing` cells are missing; in
    text only an empty one is.
    """
    with in_file(path):
        return read_frame(read_table(path, roles.client, missing, sep, decimal), roles)


def read_table(
    path: str | os.PathLike[str],
    client: str | None,
    missing: Sequence[str] = (),
    sep: str = ",",
    decimal: str = ".",
) -> "Table":
    """Read a Parquet file, known by its first bytes, or CSV, whose column `client` stays text."""
    sep = "\t" if sep in ("tab", "\\t") else sep
    for name, mark in (("sep", sep), ("decimal", decimal)):
        if len(mark) != 1:
            raise SettingError(Name(name), f" must be one character, got {mark!r}")
    if sep == decimal:
        raise ValueError(f"sep and decimal must differ, got {sep!r} for both: give --sep")
    with importing("tables"):
        import pyarrow
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet

    with open(existing(path, "table"), "rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    if is_parquet:
        if missing or (sep, decimal) != (",", "."):
            raise ValueError("missing, sep and decimal are for CSV files: leave them out")
        with reading("Parquet file"):
            return parquet.ParquetFile(os.fspath(path)).read()
    with reading("CSV file in UTF-8"), pyarrow.input_stream(os.fspath(path)) as stream:
        content = stream.read()
        text = content.decode()
        if text.count('"') % 2:  # pyarrow would take a quoted cell without an end
            collections.deque(csv.reader(io.StringIO(text, newline=""), strict=True), maxlen=0)
    # In memory of pyarrow: a thread of its reader may hold it after Python's memory is gone.
    sink = pyarrow.BufferOutputStream()
    sink.write(content)
    with reading("CSV file"):
        return arrow_csv.read_csv(
            pyarrow.BufferReader(sink.getvalue()),
            # In one block, since the first of several would decide the types.
            read_options=arrow_csv.ReadOptions(block_size=max(1, len(content)), use_threads=False),
            parse_options=arrow_csv.ParseOptions(delimiter=sep, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types={} if client is None else {client: pyarrow.string()},
                null_values=[*arrow_csv.ConvertOptions().null_values, *missing],
                decimal_point=decimal,
            ),
        )


def source_of(frame: Any, roles: Roles, pixels: Any = None) -> Source:
    """Return the rows of a data frame; `pixels` (N, ...) replace features."""
    table = table_of(frame)
    roles = roles.with_split(table.column_names, lambda name: texts(table[name]))
    check_names(table.column_names, len(table), roles)
    if roles.x is not None or pixels is not None:
        features = [] if roles.x is None else [roles.x]
    else:
        excluded = {*roles.taken, *roles.drop}
        features = [name for name in table.column_names if name not in excluded]
        if not features:
            raise ValueError(f"no column is left for features, of {listed(table.column_names)}")
    source_row, used, dropped = None, [*roles.taken, *features], 0
    if roles.time is not None and roles.time not in used:
        used.append(roles.time)
    if roles.drop_missing:
        complete, source_row = _without_missing(table, used)
        if roles.client is not None:
            dropped = _clients(table, roles.client) - _clients(complete, roles.client)
        table = complete
    for name in used:
        require_complete(name, table[name])
    if roles.time is not None:
        order = np.argsort(_times(roles.time, table[roles.time]), kind="stable")
        table = table.take(order)
        source_row = order if source_row is None else source_row[order]
    kinds = [kind_of(table[name].type) for name in features]
    public, categories, columns = [], {}, {}
    if dropped:
        public.append(
            f"Clients without a complete row, {dropped} of them, were left out: which, and how "
            "many are left, is read from all clients' rows and taken as public."
        )
    if pixels is not None:
        x = pixels
    elif roles.x is not None and kinds == ["text"]:
        arrays, categories, assumptions = encode({"x": [np.array(table[roles.x].to_pylist())]}, [])
        x, public = arrays["x"], [*assumptions]
    elif kinds == ["list"]:
        x = _stacked(table[features[0]], f"column {features[0]!r}")
    else:
        x, columns["x"] = _numbers(table, features, roles.one_hot)
    labels = {}
    if roles.targets:
        y, classes = _targets(roles.targets, table)
        labels = {"y": y}
        if classes:
            categories["y"] = classes
            public.append(
                "The names of the classes are read from all clients' labels and taken as public."
            )
        if y.ndim == 1 or len(roles.targets) > 1:
            columns["y"] = Columns(roles.targets)
    if roles.one_hot:
        of = listed(roles.one_hot)
        public.append(
            f"Which values {of} may have is read from all clients' rows and taken as public."
        )
    fields = {"x": x, **labels}
    if roles.exposure is not None:
        fields["exposure"] = _positive("exposure", roles.exposure, table[roles.exposure])
    if roles.row_weights is not None:
        column = table[roles.row_weights]
        fields["row_weight"] = _positive("row-weights", roles.row_weights, column, most=1.0)
    names, client = None, None
    if roles.client is not None:
        names, client = numbered(texts(table[roles.client]), by_number=True)
    return Source(
        fields,
        client,
        names,
        None
        if roles.split is None
        else splits_of(texts(table[roles.split]), f"the split {roles.split!r}"),
        {"public": tuple(public), "categories": categories, "columns": columns},
        source_row,
        in_time=roles.time is not None,
    )


def _varied(source: Source, targets: Sequence[str]) -> Source:
    """Check that the targets of rows to train on differ."""
    y = source.fields.get("y", np.empty(0))
    for target, values in zip(targets, y.T if len(targets) > 1 else [y], strict=False):
        if values.ndim == 1 and np.all(values == values[0]):
            classes = source.about["categories"].get("y")
            only = values[0] if classes is None else classes[values[0]]
            raise ValueError(
                f"the target {target!r} is {only} in all {len(values)} rows: there is nothing to "
                "predict"
            )
    return source


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
        raise ValueError(f"columns must have distinct names, got {listed(names)}")
    for name, column in zip(names, table.columns, strict=True):
        kind = column.type
        if isinstance(kind, pyarrow.BaseExtensionType):
            column = column.cast(kind.storage_type)
        coded = pyarrow.types.is_dictionary(kind) and kind_of(kind.value_type) != "number"
        if coded or pyarrow.types.is_string_view(kind):  # polars' views have no cast in pyarrow
            column = pyarrow.table({name: column.to_pylist()})[name]
        columns.append(column)
    return pyarrow.table(columns, names)


def check_names(names: list[str], rows: int, roles: Roles) -> None:
    """Check that columns `names` of `rows` rows can have the roles."""
    for role in ("one_hot", "drop"):  # the letters of a name may be columns, too
        if isinstance(name := getattr(roles, role), str):
            raise ValueError(f"{role} must be a list of columns, got {name!r}: write [{name!r}]")
    features = [] if roles.x is None else [roles.x]
    if features and (roles.one_hot or roles.drop):
        raise ValueError(f"x names the only feature, {roles.x!r}: leave out one-hot and drop")
    named = [*roles.taken, *features, *roles.one_hot, *roles.drop]
    sorted_by = [] if roles.time is None else [roles.time]
    absent = [name for name in [*named, *sorted_by] if name not in names]
    if absent:
        raise ValueError(f"there is no column {absent[0]!r}, only {listed(names)}")
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise ValueError(
            "a column is either the client, the target, the split, the exposure, the row-weights, "
            f"x, one-hot or dropped, but {twice!r} is named twice"
        )
    if "" in names:
        raise ValueError(
            "a column has no name: where it numbers the rows, write the file without it (pandas: "
            "to_csv(index=False)), otherwise give it one"
        )
    if rows == 0:
        raise ValueError("the table has no rows")


def kind_of(held: Any) -> Literal["number", "text", "list", "other"]:
    """Return the kind of a column's type; truth values are numbers, categories of numbers text."""
    from pyarrow import types

    kinds: Any = {
        "number": (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean),
        "text": (types.is_string, types.is_large_string, types.is_dictionary),
        "list": (types.is_list, types.is_large_list, types.is_fixed_size_list),
    }
    return next((kind for kind, of in kinds.items() if any(f(held) for f in of)), "other")


def missing_values(column: "ChunkedArray") -> np.ndarray:
    """Return whether each value is missing, (N,)."""
    missing = column.is_null(nan_is_null=True).to_numpy()
    return missing | (column.to_numpy() == "") if kind_of(column.type) == "text" else missing


def require_complete(name: str, column: "ChunkedArray") -> None:
    """Check that no value of a column is missing."""
    missing = missing_values(column)
    if missing.any():
        raise ValueError(
            f"column {name!r} has {missing.sum()} missing values in {len(column)} rows, the "
            f"first in row {np.argmax(missing) + 1}: fill them in, or leave out the rows "
            "(drop-missing) or the column (drop)"
        )


def _without_missing(table: "Table", names: Sequence[str]) -> tuple["Table", np.ndarray | None]:
    """Return the rows with values in all columns `names`, and their positions; warn of others."""
    missing = {name: missing_values(table[name]) for name in names}
    complete = ~np.any([*missing.values()], axis=0)
    if complete.all():
        return table, None
    if not complete.any():
        raise ValueError("each row has a missing value: leave out columns (drop)")
    counts = ", ".join(f"{name!r} {where.sum()}" for name, where in missing.items() if where.any())
    warnings.warn(
        f"{(~complete).sum()} of {len(table)} rows have missing values and are left out: {counts}",
        stacklevel=2,
    )
    return table.filter(complete), np.flatnonzero(complete)


def _clients(table: "Table", name: str) -> int:
    """Return the number of clients with rows."""
    column = table[name]
    return len(set(texts(column)[~missing_values(column)].tolist()))


def sentinel(values: np.ndarray) -> float | None:
    """Return a number that may stand for a missing value: 9, 99, 999, … or a negative one of these.

    It is the largest or smallest value, occurs twice or more, and lies far from the others, or is
    the only negative one.
    """
    for sign in (1, -1):
        extreme = sign * np.max(sign * values)
        digits = str(int(abs(extreme))) if abs(extreme) < _MOST_NINES else ""
        inner = values[values != extreme]
        if {*digits} != {"9"} or abs(extreme) % 1 or len(inner) > len(values) - 2 or not len(inner):
            continue
        low, high = float(inner.min()), float(inner.max())
        gap = extreme - high if sign > 0 else low - extreme
        if gap > (high - low) / 4 or (sign < 0 and low >= 0):
            return float(extreme)
    return None


def warn_of_sentinel(name: str, values: np.ndarray) -> None:
    """Warn of a number in a column that may stand for a missing value."""
    number = sentinel(values) if len(values) else None
    if number is not None:
        count = np.count_nonzero(values == number)
        warnings.warn(
            f"column {name!r} holds {number:g} in {count} rows, far from its other values: if it "
            f"stands for a missing value, make it one (missing {number:g})",
            stacklevel=2,
        )


def texts(column: "ChunkedArray") -> np.ndarray:
    """Return the values as strings, (N,); text stays objects, which are not padded."""
    values = column.to_numpy()
    if values.dtype.kind != "O":
        return values.astype(str)
    texts = [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    return np.array(texts, object)


def _times(name: str, column: "ChunkedArray") -> np.ndarray:
    """Return the values of a column of times as numbers or dates, which can be sorted."""
    values = column.to_numpy()
    if values.dtype.kind in "iufM":
        return values
    try:
        return np.array(texts(column), "datetime64")
    except ValueError:
        raise ValueError(
            f"the time {name!r} must hold numbers or dates such as 2020-12-31, got "
            f"{str(values[0])[:40]!r} in row 1"
        ) from None


def _numbers(
    table: "Table", features: list[str], one_hot: Sequence[str]
) -> tuple[np.ndarray, Columns]:
    """Return the array x, (N, d) float32, and its columns."""
    parts, called = [], []
    for name in features:
        column = table[name]
        if name in one_hot:
            names, place = numbered(texts(column))
            if not encodable(len(names), len(place)):
                raise ValueError(
                    f"column {name!r} has {len(names)} values in {len(place)} rows, too many to "
                    "encode (one-hot): leave it out (drop)"
                )
            parts.append((place[:, None] == np.arange(len(names))).astype(np.float32))
            called += [(f"{name}={value}", 1.0) for value in names.tolist()]
            continue
        if kind_of(column.type) != "number":
            raise ValueError(f"column {name!r} {_why_no_feature(column)}")
        raw = column.to_numpy()
        values = to_float32(raw)
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values)))
            raise ValueError(
                f"column {name!r} must hold finite numbers that fit into float32, got {raw[row]} "
                f"in row {row + 1}"
            )
        if (merged := merged_integers(raw)) is not None:
            raise ValueError(
                f"column {name!r} holds integers that float32 cannot tell apart, such as {merged}: "
                "if they are ids, leave the column out (drop), or else divide it"
            )
        warn_of_sentinel(name, values)
        parts.append(values[:, None])
        # A name with "=" is that of an encoded column.
        called.append((name, 1.0 if raw.dtype == bool and "=" not in name else math.inf))
    names, bounds = zip(*called, strict=True)
    return np.concatenate(parts, axis=1), Columns(names, bound=bounds)


def encodable(values: int, rows: int) -> bool:
    """Return whether distinct values of a column of text become one column each."""
    return values <= max(_FEW, rows / 2)


def _why_no_feature(column: "ChunkedArray") -> str:
    if kind_of(column.type) != "text":
        return f"holds {column.type}: make numbers of it, leave it out (drop), or all others (x)"
    values = [*map(str, column.to_pylist())]
    if all(map(_is_number, values)) and any("," in value for value in values):
        return f"holds numbers with a decimal comma, such as {values[0]!r}: say so (decimal ,)"
    row = next((row for row, value in enumerate(values) if not _is_number(value)), 0)
    if odd := odd_cells(column):
        return (
            f"holds numbers except {listed(sorted(odd))} in {sum(odd.values())} rows, the first "
            f"{values[row][:40]!r} in row {row + 1}: if they are missing values, make them so "
            f"(missing {','.join(sorted(odd))}) and leave out their rows (drop-missing)"
        )
    return (
        f"holds text, such as {values[row][:40]!r} in row {row + 1}: encode it (one-hot), "
        "leave it out (drop), or read its characters alone (x)"
    )


def odd_cells(column: "ChunkedArray") -> dict[str, int]:
    """Return how often each of the few texts among numbers occurs; empty for any other column.

    Levels such as "3+" or "<1", texts with a digit among few values, make the column a category.
    """
    counts = collections.Counter(map(str, texts(column)[~missing_values(column)]))
    odd = {text: count for text, count in counts.items() if not _is_number(text)}
    few = len(odd) <= _FEW_ODD and sum(odd.values()) * 2 < sum(counts.values())
    levels = len(counts) <= _FEW and any(any(map(str.isdigit, text)) for text in odd)
    return odd if few and not levels else {}


def _is_number(text: str) -> bool:
    """Return whether a text is a number, with a decimal point or comma."""
    try:
        float(text.replace(",", ".", 1))
    except ValueError:
        return False
    return True


def _stacked(column: "ChunkedArray", where: str) -> np.ndarray:
    """Return N lists of numbers of one length, or nested ones, as an array (N, L, ...)."""
    from pyarrow.compute import call_function

    shape, values = [len(column)], column.combine_chunks()
    while kind_of(values.type) == "list" and len(values):
        lengths = call_function("list_value_length", [values]).to_numpy(zero_copy_only=False)
        if len(uneven := np.flatnonzero(lengths != lengths[0])):
            row = uneven[0] * len(column) // len(lengths) + 1
            raise ValueError(
                f"{where} must hold lists of one length, got {lengths[uneven[0]]:g} in row {row} "
                f"after {lengths[0]:g}: fill up the shorter ones, labels with −1"
            )
        shape.append(int(lengths[0]))
        values = values.flatten()
    array = values.to_numpy(zero_copy_only=False).reshape(shape)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{where} must hold lists of numbers, got {column.type}")
    return to_float32(array) if array.dtype.kind == "f" else array


def _targets(names: Sequence[str], table: "Table") -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the array y, (N,) or of several targets (N, t), and for text its classes' names."""
    columns = [_target(name, table[name]) for name in names]
    if len(columns) == 1:
        return columns[0]
    for name, (y, classes) in zip(names, columns, strict=True):
        if classes or y.ndim > 1:
            raise ValueError(
                f"several targets must hold numbers, got {name!r} of {table[name].type}"
            )
    return np.stack([y for y, _ in columns], axis=1), ()


def _target(name: str, column: "ChunkedArray") -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the array y, (N,), and for text the names of its classes."""
    if (kind := kind_of(column.type)) == "list":
        return _stacked(column, f"column {name!r}"), ()
    y, names = column.to_numpy(), ()
    if kind == "number" or y.dtype.kind in "iuf":  # pandas has categories that are numbers
        y = y.astype(np.float64) if y.dtype.kind == "O" else y
    elif kind == "text":
        classes, y = numbered(texts(column))
        names, y = tuple(classes.tolist()), y.astype(np.int32)
    else:
        raise ValueError(f"the target {name!r} must hold numbers or text, got {column.type}")
    return y, names


def _positive(role: str, name: str, column: "ChunkedArray", most: float = _LARGEST) -> np.ndarray:
    """Return a column of positive numbers, (N,) float32."""
    if kind_of(column.type) != "number":
        raise ValueError(f"the {role} {name!r} must hold numbers, got {column.type}")
    values = to_float32(column.to_numpy())
    if not (allowed := (values > 0) & (values <= most)).all():
        row = int(np.argmin(allowed))
        bound = "finite" if most == _LARGEST else f"at most {most:g}"
        got = f"{values[row]:g} in row {row + 1}"
        raise ValueError(f"the {role} {name!r} must be positive and {bound}, got {got}")
    return values
