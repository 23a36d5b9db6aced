"""Tables, one row per example: data frames, CSV and Parquet files.

A table becomes the arrays of the .npz format; see `fedjaxsim.data.npz`.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from fedjaxsim.data.arrays import merged_integers, to_float32
from fedjaxsim.data.columns import Columns
from fedjaxsim.data.files import in_file
from fedjaxsim.data.npz import arrays_of_columns, assemble, distinct, owners
from fedjaxsim.data.population import Population
from fedjaxsim.data.ranges import SPLITS, split_called
from fedjaxsim.data.table_files import read_csv, read_parquet
from fedjaxsim.data.text import characters, refuse_files, with_padding
from fedjaxsim.extras import importing

if TYPE_CHECKING:
    from narwhals.stable.v2 import DataFrame, Series
    from narwhals.typing import IntoDataFrame
    from pyarrow import Table

_SHOWN = 8
"""Names of columns that fit into a message."""
_FEW = 20
"""Values of a column that may be encoded in any number of rows."""


class Roles(NamedTuple):
    """The roles of columns; the arguments of `from_dataframe`, with client None for none."""

    client: str | None
    target: str | Sequence[str]
    split: str | None = None
    one_hot: Sequence[str] = ()
    drop: Sequence[str] = ()
    x: str | None = None
    length: int | None = None

    @property
    def taken(self) -> list[str]:
        """The columns of clients, targets and splits."""
        named = (self.client, *self.targets, self.split)
        return [name for name in named if name is not None]

    @property
    def targets(self) -> list[str]:
        """The columns to predict."""
        return [self.target] if isinstance(self.target, str) else [*self.target]


class OtherColumns(TypedDict, total=False):
    """The optional arguments of `from_dataframe`."""

    split: str | None
    one_hot: Sequence[str]
    drop: Sequence[str]
    x: str | None
    length: int | None


def from_dataframe(
    frame: "IntoDataFrame",
    *,
    client: str,
    target: str | Sequence[str],
    split: str | None = None,
    one_hot: Sequence[str] = (),
    drop: Sequence[str] = (),
    x: str | None = None,
    length: int | None = None,
) -> Population:
    """Make a population of a table with one row per example: pandas, polars, a pyarrow table.

    Every other column is a feature, in the order of the columns: "x" is (N, d) float32. Clients
    are sorted by name, as numbers where all are whole numbers, and keep the order of their
    rows. A target of numbers stays; a target of text becomes classes 0 … c − 1 in sorted order, or
    that of an ordered categorical, with their names in `categories`. Lists of numbers of different
    lengths are filled up; the field "mask" is 0 there.

    Args:
      frame: a data frame that narwhals knows.
      client: column with the client of each row.
      target: column to predict, or several of numbers, which make "y" (N, k).
      split: column of "train", "validation" and "test", or other usual names of these; by default
        all rows are training rows.
      one_hot: columns to replace by one column of 0 and 1 per value that occurs.
      drop: columns that are no features.
      x: the only column of features. Text becomes its characters, (N, L) integers, as in
        `load_leaf`; lists of numbers stay as they are.
      length: characters of each text to keep, the first ones; by default all.

    Raises:
      TypeError: the argument is no data frame.
      ValueError: names the column that is absent, has missing values or holds no numbers.
    """
    return assemble(arrays_of(frame, Roles(client, target, split, one_hot, drop, x, length)))


def _reader(
    read: Callable[[str | os.PathLike[str], str | None], "Table"],
) -> Callable[..., dict[str, np.ndarray]]:
    """Return the reader of a kind of table, with the settings of the command line."""

    def arrays_of_file(
        path: str | os.PathLike[str],
        *,
        target: str | tuple[str, ...],
        client: str | None = None,
        split: str | None = None,
        one_hot: tuple[str, ...] = (),
        drop: tuple[str, ...] = (),
        x: str | None = None,
        length: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Read clients, rows and targets from a table; see `from_dataframe`.

        A CSV file is UTF-8, with commas and a line of names first; also .gz. Names of clients stay
        as they are written. In a column of numbers an empty cell, NA, NaN and null are missing; in
        text only an empty one is.

        Args:
          path: the file.
          target: Column to predict, or several of numbers.
          client: Column with the client of each row; without it, give --partition.
          split: Column with train, validation or test; needs --client.
          one_hot: Columns to replace by one column of 0 and 1 per value.
          drop: Columns that are no features.
          x: The only column of features; text becomes its characters.
          length: Characters of each text to keep, the first ones.
        """
        roles = Roles(client, target, split, one_hot, drop, x, length)
        with in_file(path):
            return arrays_of(read(path, client), roles)

    return arrays_of_file


arrays_of_csv = _reader(read_csv)
arrays_of_parquet = _reader(read_parquet)


def arrays_of(frame: Any, roles: Roles, pixels: Any = None) -> dict[str, np.ndarray]:
    """Return the arrays of the .npz format of a data frame; `pixels` (N, ...) replace features."""
    if isinstance(frame, str | os.PathLike):
        raise ValueError(f"from_dataframe needs a data frame; data.load reads a file, csv:{frame}")
    try:
        table = _of_plain_columns(of_distinct_columns(_stored(frame)))
        strange = next((name for name in table.columns if not isinstance(name, str)), None)
        if strange is not None:
            raise ValueError(
                f"the names of columns must be strings, got {strange!r}: rename them, in pandas "
                "frame.columns = frame.columns.astype(str)"
            )
        _check_names(table, roles)
    except TypeError as error:
        known = "pandas, polars or pyarrow"
        raise TypeError(
            f"from_dataframe needs a dataframe of {known}, got {type(frame)}"
        ) from error
    features = _features(table, roles) if pixels is None else []
    _check_features(table, features, roles)
    for name in (*roles.taken, *features):
        _require_complete(table[name])
    texts_alone = roles.x in features and is_text(table[roles.x])
    if roles.length is not None and not texts_alone:
        raise ValueError("length cuts texts: name their column as x")
    public = []
    if texts_alone:
        texts = table[features[0]].to_list()
        refuse_files(texts, f"column {features[0]!r}")
        arrays, public = characters(texts, roles.length)
    elif len(features) == 1 and _holds_lists(table[features[0]]):
        arrays = _padded(table[features[0]], "x")
    else:
        arrays = {"x": pixels} if pixels is not None else _numbers(table, features, roles.one_hot)
    if "mask" in arrays:
        public.append("The length of the longest row is read from all clients' rows")
    arrays |= _targets(table, roles.targets)
    if arrays["y"].ndim == max(1, 2 * (len(roles.targets) > 1)):
        arrays |= arrays_of_columns("y", Columns((*roles.targets,)))
    if roles.client is not None:
        arrays |= owners(_texts(table[roles.client]))
    if roles.split is not None:
        arrays["split"] = _splits(table[roles.split])
    if "categories.y" in arrays:
        public.append("The names of the classes are read from all clients' labels")
    if roles.one_hot:
        of = _listed(roles.one_hot)
        public.append(f"Which values {of} may have is read from all clients' rows")
    arrays["public"] = np.array([f"{one} and taken as public." for one in public], dtype=str)
    return arrays


def of_distinct_columns(frame: Any) -> "DataFrame":
    """Return a data frame as narwhals reads it; raise a ValueError for names that stand twice."""
    with importing("tables"):
        import narwhals.stable.v2 as nw
        from narwhals.exceptions import DuplicateError

    try:
        table = nw.from_native(frame, eager_only=True)
        _ = table.columns  # which pyarrow checks late
    except DuplicateError as error:
        raise ValueError(f"columns must have distinct names: {error}") from error
    return table


def _check_names(table: "DataFrame", roles: Roles) -> None:
    for role in ("one_hot", "drop"):
        if isinstance(name := getattr(roles, role), str):
            raise ValueError(f"{role} must be a list of columns, got {name!r}: write [{name!r}]")
    features = [] if roles.x is None else [roles.x]
    if features and (roles.one_hot or roles.drop):
        raise ValueError(f"x names the only feature, {roles.x!r}: leave out one-hot and drop")
    named = [*roles.taken, *features, *roles.one_hot, *roles.drop]
    absent = [name for name in named if name not in table.columns]
    if absent:
        raise ValueError(f"there is no column {absent[0]!r}, only {_listed(table.columns)}")
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise ValueError(
            f"a column is either the client, the target, the split, x, one-hot or dropped, but "
            f"{twice!r} is named twice"
        )
    if "" in table.columns:
        raise ValueError(
            "a column has no name: where it numbers the rows, write the file without it (pandas: "
            "to_csv(index=False)), otherwise give it one"
        )
    if len(table) == 0:
        raise ValueError("the table has no rows")


def _features(table: "DataFrame", roles: Roles) -> list[str]:
    if roles.x is not None:
        return [roles.x]
    others = {*roles.taken, *roles.drop}
    features = [name for name in table.columns if name not in others]
    if not features:
        raise ValueError(f"no column is left for features, of {_listed(table.columns)}")
    return features


def _check_features(table: "DataFrame", features: list[str], roles: Roles) -> None:
    """Check that one column at most holds text or has missing values; name all of them."""
    encoded = (roles.x, *roles.one_hot)
    texts = [name for name in features if name not in encoded and is_text(table[name])]
    missing = [name for name in features if missing_values(table[name]).any()]
    if len({*texts, *missing}) > 1:
        found = [f"hold text ({_listed(texts)})"] if texts else []
        found += [f"have missing values ({_listed(missing)})"] if missing else []
        remedies = ["encode text (one-hot)"] if texts else []
        remedies += ["fill in values"] if missing else []
        raise ValueError(
            f"columns {' and '.join(found)}: {', '.join(remedies)}, or leave the columns out (drop)"
        )


def missing_values(column: "Series") -> np.ndarray:
    """Return whether each value is missing, (N,)."""
    missing = column.is_null()
    if column.dtype.is_float():
        missing = missing | column.is_nan()
    elif is_text(column):
        missing = missing | (column == "")
    return missing.to_numpy().astype(bool)


def _require_complete(column: "Series") -> None:
    missing = missing_values(column)
    if missing.any():
        raise ValueError(
            f"column {column.name!r} has {missing.sum()} missing values in {len(column)} rows, the "
            f"first in row {np.argmax(missing) + 1}: fill them in, or leave out the rows or the "
            "column (drop)"
        )


def is_text(column: "Series") -> bool:
    """Return whether a column holds text."""
    import narwhals.stable.v2 as nw

    return column.dtype in (nw.String, nw.Categorical, nw.Enum)


def _texts(column: "Series") -> np.ndarray:
    """Return the values as strings, (N,); text stays objects, which are not padded."""
    values = column.to_numpy()
    if values.dtype.kind != "O":
        return values.astype(str)
    texts = [each.decode() if isinstance(each, bytes) else str(each) for each in values]
    return np.array(texts, object)


def _levels(column: "Series") -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values by name, in their order, and the place of each row's, (N,)."""
    import narwhals.stable.v2 as nw

    names, place = distinct(_texts(column))
    if isinstance(column.dtype, nw.Enum):
        ordered = [*map(str, column.dtype.categories)]
        order = np.array([ordered.index(name) for name in names.tolist()])
        return np.array(ordered), order[place]
    return names, place


def _stored(frame: Any) -> Any:
    """Return a table of pyarrow with extension types as what they store; other frames as given."""
    if type(frame).__module__.partition(".")[0] != "pyarrow" or not hasattr(frame, "columns"):
        return frame
    import pyarrow

    for place, name in enumerate(frame.column_names):
        kind = frame.schema.field(place).type
        if not isinstance(kind, pyarrow.BaseExtensionType):
            continue
        column = frame.column(place).combine_chunks()
        if isinstance(column, pyarrow.ChunkedArray):
            column = pyarrow.concat_arrays(column.chunks)
        if isinstance(kind, pyarrow.FixedShapeTensorType):
            tensor = column.to_numpy_ndarray()
            stored = pyarrow.array(tensor.reshape(-1))
            for size in reversed(tensor.shape[1:]):
                stored = pyarrow.FixedSizeListArray.from_arrays(stored, size)
        else:
            stored = column.storage
        frame = frame.set_column(place, name, stored)
    return frame


def _of_plain_columns(table: "DataFrame") -> "DataFrame":
    """Replace categoricals of numbers (pandas) by their numbers."""
    import narwhals.stable.v2 as nw

    for column in table.iter_columns():
        of_numbers = isinstance(column.dtype, nw.Categorical | nw.Enum)
        if of_numbers and (values := column.to_numpy()).dtype.kind in "iuf":
            plain = nw.new_series(column.name, values, backend=table.implementation)
            table = table.with_columns(plain)
    return table


def is_numeric(column: "Series") -> bool:
    """Return whether a column holds numbers or truth values."""
    import narwhals.stable.v2 as nw

    return column.dtype.is_numeric() or column.dtype == nw.Boolean


def _numbers(
    table: "DataFrame", features: list[str], one_hot: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the array x, (N, d) float32, and its columns."""
    import narwhals.stable.v2 as nw

    parts, called, exclusive = [], [], 0
    for name in features:
        column = table[name]
        if name in one_hot:
            names, place = _levels(column)
            if not encodable(len(names), len(place)):
                raise ValueError(
                    f"column {name!r} has {len(names)} values in {len(place)} rows, too many to "
                    "encode (one-hot): leave it out (drop)"
                )
            parts.append((place[:, None] == np.arange(len(names))).astype(np.float32))
            called += [(f"{name}={value}", 1.0) for value in names.tolist()]
            exclusive += len(names) - 1
            continue
        if not is_numeric(column):
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
        called.append((name, 1.0 if column.dtype == nw.Boolean else math.inf))
    names, bounds = zip(*called, strict=True)
    return {
        "x": np.concatenate(parts, axis=1),
        **arrays_of_columns("x", Columns(names, bound=bounds, exclusive=exclusive)),
    }


def encodable(values: int, rows: int) -> bool:
    """Return whether distinct values of a column of text become one column each."""
    return values <= max(_FEW, rows / 2)


def _why_no_feature(column: "Series", features: list[str]) -> str:
    if is_text(column):
        values = [str(value) for value in column.to_list()]
        row = next((i for i, value in enumerate(values) if not _is_number(value)), 0)
        return (
            f"holds text, such as {values[row][:40]!r} in row {row + 1}: encode it (one-hot), "
            "leave it out (drop), or read its characters alone (x)"
        )
    if _holds_lists(column):
        return (
            f"holds lists, which must be the only feature, of {_listed(features)}: leave the "
            "others out (drop)"
        )
    return f"holds {column.dtype}, no numbers: make numbers of it, or leave it out (drop)"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _holds_lists(column: "Series") -> bool:
    import narwhals.stable.v2 as nw

    if column.dtype in (nw.List, nw.Array):
        return True
    return column.dtype == nw.Object and isinstance(column[0], list | tuple | np.ndarray)


def _padded(column: "Series", field: str) -> dict[str, np.ndarray]:
    return with_padding(column.to_numpy(), f"column {column.name!r}", field)


def _targets(table: "DataFrame", names: list[str]) -> dict[str, np.ndarray]:
    """Return the array y, (N,), or (N, k) of k columns of numbers."""
    if len(names) == 1:
        return _target(table[names[0]])
    found = [_target(table[name]) for name in names]
    texts = [name for name, each in zip(names, found, strict=True) if "categories.y" in each]
    if texts:
        raise ValueError(f"several targets must be numbers, got text in column {texts[0]!r}")
    return {"y": np.stack([each["y"] for each in found], axis=1)}


def _target(column: "Series") -> dict[str, np.ndarray]:
    """Return the array y, (N,), and for text the names of its classes."""
    if _holds_lists(column):
        return _padded(column, "y")
    values = column.to_numpy()
    if is_text(column):
        names, classes = _levels(column)
        found = {"y": classes.astype(np.int32), "categories.y": names}
    elif is_numeric(column):
        found = {"y": values.astype(np.float64) if values.dtype.kind == "O" else values}
    else:
        raise ValueError(
            f"the target {column.name!r} must hold numbers or text, got {column.dtype}"
        )
    if len(np.unique(found["y"])) == 1:
        raise ValueError(
            f"the target {column.name!r} is {values[0]} in all {len(values)} rows: there is "
            "nothing to predict"
        )
    return found


def _splits(column: "Series") -> np.ndarray:
    """Return the array split, (N,)."""
    places = [split_called(value) for value in _texts(column)]
    if None in places:
        row = places.index(None)
        raise ValueError(
            f"the split {column.name!r} must hold {', '.join(SPLITS)}, got "
            f"{str(column[row])[:40]!r} in row {row + 1}"
        )
    return np.array(places)


def _listed(names: Sequence[str]) -> str:
    """List names of columns for a message, the first of many."""
    more = [f"… ({len(names)} in all)"] if len(names) > _SHOWN else []
    return ", ".join([*map(repr, names[:_SHOWN]), *more])
