"""Formats of the files of results: strict JSON, JSON lines, CSV, Parquet, TOML."""

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjaxsim import store
from fedjaxsim.checks import Name, SettingError

_BLOCK = 1 << 16
"""Rows of a table in one write."""
KINDS = {"config.toml": "run", "sweep.toml": "sweep", "path.json": "tuning"}
"""What a folder holds, by a file in it."""
SEVERAL_RUNS = "folder of several runs"
"""What `run --seeds` makes: a folder `seed-N` for each run."""


def not_a_run(path: Path, file: str) -> FileNotFoundError:
    """Return the error for a path where a `file` of a run is missing: it tells what is there."""
    if path.is_file():
        return FileNotFoundError(f"{path} is a file: give the directory of a run")
    if not path.is_dir():
        return FileNotFoundError(f"no directory {path}")
    for name, kind in KINDS.items():
        if kind != "run" and (path / name).exists():
            return FileNotFoundError(f"{path} holds a {kind}: give the directory of a run")
    runs = sorted(config.parent for config in path.glob("*/config.toml"))
    if runs:
        return FileNotFoundError(f"{path} holds several runs: give one of them, as {runs[0]}")
    return FileNotFoundError(f"{path} holds no {file}: not a run, or not a finished one")


def check_place(path: Path, kind: str) -> None:
    """Check that a path for results of a `kind` is no file, nor a folder with another kind."""
    file = next((part for part in (path, *path.parents) if part.is_file()), None)
    if file is not None:
        raise SettingError(Name("out"), f" must be a directory, got {path}: {file} is a file")
    for file, other in KINDS.items():
        if other != kind and (path / file).exists():
            raise ValueError(f"{path} holds a {other}, and is no place for a {kind}: give another")
    if kind != SEVERAL_RUNS and (inside := next(path.glob("seed-*/config.toml"), None)):
        raise ValueError(
            f"{path} holds several runs ({inside.parent.name}, …), and is no place for a {kind}: "
            "give another"
        )


def check_vacant(path: Path, names: Sequence[str], kind: str) -> None:
    """Check that a path for results of a `kind` has none of these `names` of files and folders."""
    check_place(path, kind)
    if present := [name for name in names if (path / name).exists()]:
        what = f"{path} already holds a {kind} ({', '.join(present)})"
        raise ValueError(f"{what}: choose another directory or say --overwrite")


def make_directory(
    path: Path, names: Sequence[str], kind: str, *, overwrite: bool, pictures: Sequence[str] = ()
) -> None:
    """Make and hold a directory for results of a `kind`, which `names` of files and folders show.

    With `overwrite`, existing results and `pictures` are removed; other files stay. A directory
    that cannot be made or held, or has results otherwise, is a ValueError.
    """
    check_place(path, kind)
    try:
        store.lock_folder(path)
        if not overwrite:
            check_vacant(path, names, kind)
            return
        for stale in (*names, *pictures):
            store.remove(path / stale)
    except store.StorageError as error:
        raise ValueError(str(error)) from error


def strict(value: Any) -> Any:
    """Return a value as strict JSON: arrays become lists, numbers that are not finite null."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if hasattr(value, "__array__"):
        return strict(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_text(value: Any) -> str:
    """Return a value as strict JSON."""
    return json.dumps(strict(value), indent=2, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON."""
    store.write(path, f"{json_text(value)}\n".encode())


def lines(records: Iterable[Mapping[str, Any]], *, exact: bool = False) -> bytes:
    """Return records as lines of strict JSON or, if `exact`, of JSON with NaN and Infinity."""
    values = records if exact else map(strict, records)
    return "".join(f"{json.dumps(value, allow_nan=exact)}\n" for value in values).encode()


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write_csv(path: Path, columns: Mapping[str, Any]) -> None:
    """Write a table; numbers that are not finite stay empty."""
    arrays = [np.asarray(column) for column in columns.values()]

    def parts() -> Iterator[bytes]:
        yield csv_text([list(columns)]).encode()
        for begin in range(0, max(map(len, arrays)), _BLOCK):
            block = (strict(array[begin : begin + _BLOCK]) for array in arrays)
            yield csv_text(zip(*block, strict=True)).encode()

    store.write(path, parts)


def read_json(path: Path) -> Any:
    """Read JSON; raise ValueError if it is damaged."""
    return parse_json(path.read_text(encoding="utf-8"), path)


def parse_json(text: str | bytes, path: Path) -> Any:
    """Parse JSON text of a file; raise ValueError if it is damaged."""
    with intact(path):
        return json.loads(text)


@contextlib.contextmanager
def intact(path: Path, remedy: str = "") -> Iterator[None]:
    """Raise a ValueError that a file is damaged if its content is not what is read from it."""
    try:
        yield
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged: {reason}{remedy}") from error


def tables_text(tables: Mapping[str, Any]) -> str:
    """Return tables as TOML."""
    import tomli_w

    return tomli_w.dumps(tables)


def write_tables(path: Path, tables: Mapping[str, Any]) -> None:
    """Write TOML."""
    store.write(path, tables_text(tables).encode())
