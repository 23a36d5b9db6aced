"""Files of tables, as tables of pyarrow."""

import codecs
import gzip
import os
import zlib
from typing import TYPE_CHECKING

from fedjaxsim.data.files import check_size, existing, reading
from fedjaxsim.data.npz import UNPACKING
from fedjaxsim.extras import importing

if TYPE_CHECKING:
    from pyarrow import Buffer, Table

_BLOCK = 1 << 24
"""Bytes of a CSV file that are read at once."""
_COPIES, _CELL = 2, 8
"""A table takes at least twice the bytes of its CSV file, and eight for a cell."""


def read_csv(path: str | os.PathLike[str], client: str | None) -> "Table":
    """Read a CSV file; the column `client` stays text.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty, cut, no CSV or not in UTF-8.
    """
    with importing("tables"):
        import pyarrow
        from pyarrow import csv

    existing(path, "CSV file")
    content = _content(path)
    text = {} if client is None else {client: pyarrow.string()}
    return csv.read_csv(
        pyarrow.BufferReader(content),
        # In one block, since the first of several would decide the types.
        read_options=csv.ReadOptions(block_size=content.size, use_threads=False),
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(column_types=text),
    )


def _content(path: str | os.PathLike[str]) -> "Buffer":
    """Read a CSV file into memory of pyarrow.

    After an error its thread may still hold the memory when Python ends, and then could not release
    memory of Python's.
    """
    import pyarrow

    sink, decoder = pyarrow.BufferOutputStream(), codecs.getincrementaldecoder("utf-8")()
    lines, quotes, blank = 1, 0, True
    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    with reading("CSV file", OSError, EOFError, zlib.error), opened(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            sink.write(block)
            check_size(_COPIES * sink.tell(), "the table")
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                lines += block.count(b"\n", 0, error.start)
                raise ValueError(f"line {lines} is not UTF-8: save the file in UTF-8") from error
            lines, quotes = lines + block.count(b"\n"), quotes + block.count(b'"')
            blank = blank and not block.strip()
    if blank:
        raise ValueError("the file is empty")
    if quotes % 2:
        raise ValueError("a quoted cell does not end: the file is truncated or not CSV")
    return sink.getvalue()


def read_parquet(path: str | os.PathLike[str], client: str | None) -> "Table":
    """Read a Parquet file; errors are those of `read_csv`."""
    del client
    existing(path, "Parquet file")
    with importing("tables"):
        from pyarrow import parquet

    with reading("Parquet file", *UNPACKING):
        file = parquet.ParquetFile(os.fspath(path))
        check_size(_CELL * file.metadata.num_rows * file.metadata.num_columns, "the table")
        return file.read()
