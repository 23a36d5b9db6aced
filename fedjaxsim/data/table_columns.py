"""The columns of a table as they come, with the flags that make features of them."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjaxsim.data.describe import readable
from fedjaxsim.data.files import in_file
from fedjaxsim.data.table import (
    Roles,
    encodable,
    is_numeric,
    is_text,
    missing_values,
    of_distinct_columns,
)
from fedjaxsim.data.table_files import read_csv, read_parquet

if TYPE_CHECKING:
    from narwhals.stable.v2 import Series

READERS = {"csv": read_csv, "parquet": read_parquet}
"""Readers of tables, by the name of their source."""
_SHOWN = 3
"""Values of a text column that are shown."""


def columns_of(
    source: str,
    path: str | os.PathLike[str],
    arguments: Mapping[str, Any],
    scaled: Collection[str] | None = (),
) -> list[dict[str, Any]]:
    """Describe each column of a table: type, values, what is missing, and how to use it.

    Args:
      source: one of `READERS`.
      path: the file.
      arguments: those of the reader; they give columns their roles.
      scaled: columns whose ranges are known; None for all.

    Returns:
      for each column its "name", "role", "type", "values" (the smallest and the largest, or the
      first few of text), numbers of "distinct" and "missing" ones, and the "flag" that it needs,
      or None. All of it is read from the rows: nothing of it is private.
    """
    with in_file(path):
        table = of_distinct_columns(READERS[source](path, arguments.get("client")))
    known = {name: value for name, value in arguments.items() if name in Roles._fields}
    roles = Roles(**{"client": None, **known})
    named: dict[str | None, str] = dict.fromkeys(roles.targets, "target")
    named |= {roles.client: "client", roles.split: "split", roles.x: "x"}
    named |= dict.fromkeys(roles.one_hot, "one-hot") | dict.fromkeys(roles.drop, "dropped")
    return [
        _facts(table[name], named.get(name, "feature"), scaled is None or name in scaled)
        for name in table.columns
    ]


def _facts(column: "Series", role: str, scaled: bool) -> dict[str, Any]:
    absent = missing_values(column)
    missing = int(absent.sum())
    ends: list[Any] = []
    if is_numeric(column):
        found = np.unique(column.to_numpy()[~absent].astype(np.float64))
        ends = [float(found[0]), float(found[-1])] if len(found) else []
    else:
        values = zip(column.to_list(), absent, strict=True)
        found = sorted({str(value) for value, gone in values if not gone})
        ends = found[:_SHOWN] if is_text(column) else []
    distinct = len(found)
    needed = None
    of_numbers = role == "feature" or (role == "target" and column.dtype.is_float())
    if role == "feature" and (missing or distinct < 2):
        needed = f"--drop {column.name}"
    elif role == "feature" and not is_numeric(column) and not column.dtype.is_nested():
        encodes = is_text(column) and encodable(distinct, len(column))
        needed = f"--{'one-hot' if encodes else 'drop'} {column.name}"
    elif of_numbers and not scaled and is_numeric(column) and max(map(abs, ends), default=0) > 1:
        needed = f"--range {column.name}=LOW:HIGH"
    return {
        "name": column.name,
        "role": role,
        "type": str(column.dtype).lower(),
        "values": ends,
        "distinct": distinct,
        "missing": missing,
        "flag": needed,
    }


def in_words(columns: Sequence[Mapping[str, Any]]) -> str:
    """Format the columns as a table, and the flags to paste below it."""
    rows = [("column", "role", "type", "values", "distinct", "missing", "")]
    for each in columns:
        numbers = [f"{end:.6g}" for end in each["values"] if isinstance(end, float)]
        values = " to ".join(numbers) or ", ".join(readable(text) for text in each["values"])
        values += ", …" if not numbers and each["distinct"] > len(each["values"]) > 0 else ""
        facts = (each["type"], values, str(each["distinct"]), str(each["missing"]))
        rows.append((readable(each["name"]), each["role"], *facts, each["flag"] or ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    flags: dict[str, list[str]] = {}
    for each in columns:
        name, _, of = (each["flag"] or "").partition(" ")
        if name:
            flags.setdefault(name, []).append(of)
    pasted = [f"{name} {','.join(of)}" for name, of in flags.items() if name != "--range"]
    pasted += [f"--range {of}" for of in flags.get("--range", ())]
    if pasted:
        lines.append(f"flags: {' '.join(pasted)}")
    if "--range" in flags:
        lines.append("ranges must be public knowledge: those above are read from the rows")
    return "\n".join(lines)
