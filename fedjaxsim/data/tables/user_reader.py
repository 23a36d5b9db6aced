"""Rows of a user's own reader: whatever it returns is read as our readers read their files."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjaxsim.data.files import in_file
from fedjaxsim.data.npz import source_of_arrays
from fedjaxsim.data.population import Population
from fedjaxsim.data.source import Source
from fedjaxsim.data.tables.table import Roles, read_frame

PUBLIC = (
    "The rows come from your own reader {}: what it computes from all clients' rows, such as which "
    "columns or classes there are, is taken as public."
)


def is_frame(rows: Any) -> bool:
    """Return whether rows are a data frame of pandas, polars or pyarrow."""
    return hasattr(rows, "__arrow_c_stream__") and hasattr(rows, "columns")


def source_of_rows(rows: Any, name: str, roles: Mapping[str, Any]) -> Source:
    """Return a data frame, a population or a dict of arrays as a source.

    Args:
      rows: what the reader returned; a dict has the arrays of a .npz file.
      name: the reader's.
      roles: fields of `Roles`; those that are given need a data frame.
    """
    explicit = {role: value for role, value in roles.items() if value not in (None, (), False)}
    if is_frame(rows):
        if "target" not in explicit:
            raise ValueError(
                f"data {name} returns a data frame, which needs --target, the column to predict, "
                "and --client, the column with the client of each row, or --partition"
            )
        with in_file(name):
            source = read_frame(rows, Roles(**explicit))
    elif explicit:
        raise ValueError(
            f"{next(iter(explicit))} names a column of a data frame, but data {name} returns a "
            f"{type(rows).__name__}: leave it out"
        )
    else:
        source = source_of_object(rows, name)
    public = (PUBLIC.format(name), *source.about.get("public", ()))
    return dataclasses.replace(source, about={**source.about, "public": public})


def source_of_object(rows: Any, name: str) -> Source:
    """Return a population, or a dict of arrays, as a source."""
    if isinstance(rows, Population):
        return Source.of(rows)
    if isinstance(rows, Mapping):
        with in_file(name):
            return source_of_arrays({field: _as_array(values) for field, values in rows.items()})
    raise ValueError(
        f"data {name} must return a data frame, a Population, or a dict of arrays such as x, y and "
        f"client, got {type(rows).__name__}"
    )


def _as_array(values: Any) -> np.ndarray:
    """Return an array; text of a data frame, which holds objects, becomes strings."""
    array = np.asarray(values)
    is_text = array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat)
    return array.astype(str) if is_text else array
