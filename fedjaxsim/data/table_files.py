"""Files of tables, as tables of pyarrow."""

import collections
import contextlib
import csv
import functools
import io
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fedjaxsim.data.files import existing, reading
from fedjaxsim.extras import importing

if TYPE_CHECKING:
    from pyarrow import Table


_kept: list[dict[Any, Any]] = []


@contextlib.contextmanager
def reading_once() -> Iterator[None]:
    """Keep the tables that are read inside, for whoever reads them again there."""
    _kept.append({})
    try:
        yield
    finally:
        _kept.pop()


def _once(read: Callable[[Any, str | None], "Table"]) -> Callable[[Any, str | None], "Table"]:
    @functools.wraps(read)
    def reader(path: Any, client: str | None) -> "Table":
        if not _kept:
            return read(path, client)
        key = read.__name__, os.fspath(path), client
        if key not in _kept[-1]:
            _kept[-1][key] = read(path, client)
        return _kept[-1][key]

    return reader


@_once
def read_csv(path: str | os.PathLike[str], client: str | None) -> "Table":
    """Read a CSV file; the column `client` stays text."""
    with importing("tables"):
        import pyarrow
        from pyarrow import csv as arrow_csv

    existing(path, "CSV file")
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


@_once
def read_parquet(path: str | os.PathLike[str], client: str | None) -> "Table":
    """Read a Parquet file; errors are those of `read_csv`."""
    del client
    existing(path, "Parquet file")
    with importing("tables"):
        from pyarrow import parquet

    with reading("Parquet file"):
        return parquet.ParquetFile(os.fspath(path)).read()
