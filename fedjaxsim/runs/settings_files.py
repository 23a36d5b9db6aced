"""Settings in TOML files; errors name the file."""

import contextlib
import math
import typing
from collections.abc import Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fedjaxsim.data.files import in_file, read_tables
from fedjaxsim.runs.folders import CONFIG, kind_of, looking_at
from fedjaxsim.runs.numbers import integers, words
from fedjaxsim.runs.parts import check_parts
from fedjaxsim.runs.settings import EXCLUSIVE, RunConfig, fields_of, flag, require_read, run_config

RECORDS = ("resolved", "versions", "stages")
"""Tables that a run adds to the configuration it writes; reading one back ignores them."""


def read_toml(path: Path) -> RunConfig:
    """Read the settings of a run from a TOML file.

    Args:
      path: a file with the keys of a run; also one that a run wrote.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a file that is not TOML, an unknown key (with the closest known one), a key
        that no part of the run reads, or a value of the wrong type.
    """
    raw = read_raw(path)
    with in_file(path):
        require_read(raw, raw)
    settings = typed(raw, raw, path)
    with in_file(path):
        return run_config(**settings)


def read_raw(path: Path) -> dict[str, Any]:
    """Read the keys of a TOML file as field names, with their values unconverted."""
    table = content(path)
    with in_file(path):
        raw = dict(entries(table, {"sweep": "is for `fedjaxsim sweep`"}))
        check_parts(raw)
    return raw


def typed(raw: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Convert values of a TOML file to the types of their fields; unread keys are left out.

    `given` names the parts of the run, and errors the file `path`.
    """
    hints = fields_of(given)
    with in_file(path):
        return {n: convert(flag(n), value, hints[n]) for n, value in raw.items() if n in hints}


def content(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    folder = path if path.is_dir() else path.parent
    if not path.is_file() and (kind := kind_of(folder)) != "run":
        raise ValueError(f"{folder} holds a {kind}: {looking_at(folder)}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a file, as {path / CONFIG}")
    if not path.is_file():
        listed = "" if path.suffix else "; in the value of a flag, commas separate several"
        raise FileNotFoundError(f"no configuration file {path}{listed}")
    return read_tables(path, "is not a TOML file")


def entries(
    table: Mapping[str, Any], refused: Mapping[str, str], place: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the field names and values of a table; its keys take - or _.

    Args:
      table: the table; those that a run adds (`RECORDS`) are left out.
      refused: by field name, the reason why a key does not belong there.
      place: place of the table, as an error begins.
    """
    seen = set()
    for key, value in table.items():
        if key in RECORDS and isinstance(value, dict | list):
            continue
        name = key.replace("-", "_")
        if name in refused:
            raise ValueError(f"{place}{key} {refused[name]}")
        if name in seen:
            raise ValueError(f"{place}{flag(name)} is given twice, with - and with _")
        seen.add(name)
        yield name, value


def convert(key: str, value: Any, hint: Any) -> Any:
    """Convert a TOML value to the type of its field; 1e6 may be a whole number, `true` is none.

    Raises:
      ValueError: naming the key, what is wanted and what was got.
    """
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if type(None) in typing.get_args(hint):
        return convert(key, value, kinds[0])
    if typing.get_origin(hint) is Literal:
        if value not in kinds:
            raise ValueError(f"{key} must be one of {', '.join(kinds)}, got {value!r}")
        return value
    if typing.get_origin(hint) is tuple:
        parse = integers if kinds[0] is int else words
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return parse(value)
        if isinstance(value, list) and all(type(item) is kinds[0] for item in value):
            return tuple(value)
    elif hint is float and type(value) in (int, float):
        with contextlib.suppress(OverflowError):
            return float(value)
    elif hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif hint is float and value in ("inf", "∞"):
        return math.inf
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif type(value) is hint:
        return value
    called = {int: "a whole number", float: "a number"}
    wanted = f"a list of {kinds[0].__name__}" if kinds else called.get(hint, hint.__name__)
    raise ValueError(f"{key} must be {wanted}, got {value!r}")


def excluded(given: Container[str]) -> set[str]:
    """Return the settings that exclude some of the given ones."""
    return {pair[1 - place] for pair in EXCLUSIVE for place in (0, 1) if pair[place] in given}


def displaced(settings: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return settings without those that exclude some of the given ones."""
    left_out = excluded(given)
    return {name: value for name, value in settings.items() if name not in left_out}
