"""Tables of rows as files: Parquet or CSV."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedjaxsim import store
from fedjaxsim.extras import importing
from fedjaxsim.report.files import write_csv

_ENDINGS = (".parquet", ".csv")


def check_table(path: Path) -> None:
    """Check that a table can be written there, before it is computed.

    Raises:
      ValueError: for another ending, or a folder that does not exist.
      MissingExtraError: if pyarrow is missing.
    """
    if path.suffix not in _ENDINGS or not path.parent.is_dir():
        raise ValueError(f"out must be .parquet or .csv, in a folder that exists, got {path}")
    if path.suffix == ".parquet":
        with importing("tables"):
            import pyarrow.parquet  # noqa: F401


def write_table(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write columns (N,) by name as a table."""
    if path.suffix == ".csv":
        write_csv(path, columns)
        return
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: pyarrow.array(each) for name, each in columns.items()})
    stream = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, stream)
    store.write(path, stream.getvalue().to_pybytes())
