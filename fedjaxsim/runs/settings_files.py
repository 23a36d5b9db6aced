"""Settings in TOML files: reading them, with what a flag displaces."""

import contextlib
import math
import tomllib
import typing
from collections.abc import Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fedjaxsim.data.files import in_file
from fedjaxsim.runs.numbers import integers, words
from fedjaxsim.runs.parts import check_parts
from fedjaxsim.runs.settings import (
    EXCLUSIVE,
    RunConfig,
    fields_of,
    flag,
    require_read,
    run_config,
)

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
        return run_config(**typed(raw, raw, path))


def read_raw(path: Path) -> dict[str, Any]:
    """Read the keys of a TOML file as field names, with their values as they stand there.

    Raises:
      FileNotFoundError, ValueError: as `read_toml`.
    """
    raw = dict(named(content(path), f"{path}: ", {"sweep": "is for `fedjaxsim sweep`"}))
    with in_file(path):
        check_parts(raw)
    return raw


def typed(raw: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Convert values of a TOML file to the types of their fields; unread keys are left out.

    Args:
      raw: values by field name.
      given: settings that name the parts of the run.
      path: of the file, in errors.

    Raises:
      ValueError: for a value of the wrong type.
    """
    hints = fields_of(given)
    return {
        name: convert(flag(name), value, hints[name], path)
        for name, value in raw.items()
        if name in hints
    }


def content(path: Path) -> dict[str, Any]:
    """All that a TOML file holds.

    Raises:
      FileNotFoundError, ValueError: as `read_toml`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no configuration file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error


def named(
    table: Mapping[str, Any], place: str, refused: Mapping[str, str] = {}
) -> Iterator[tuple[str, Any]]:
    """Yield the field names and values of a table, each key once.

    Args:
      table: keys take - or _; what a run adds (`RECORDS`) is left out.
      place: where the table stands, as an error begins.
      refused: by field name, why a key does not belong there.
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


def convert(key: str, value: Any, hint: Any, path: Path) -> Any:
    """One TOML value as the type of its field: 1e6 may be a whole number, `true` is none.

    Raises:
      ValueError: naming the key, what is wanted and what was got.
    """
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if type(None) in typing.get_args(hint):
        return convert(key, value, kinds[0], path)
    if typing.get_origin(hint) is Literal:
        if value not in kinds:
            raise ValueError(f"{path}: {key} must be one of {', '.join(kinds)}, got {value!r}")
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
    raise ValueError(f"{path}: {key} must be {wanted}, got {value!r}")


def excluded(given: Container[str]) -> set[str]:
    """The settings that exclude some that are given."""
    return {pair[1 - place] for pair in EXCLUSIVE for place in (0, 1) if pair[place] in given}


def displaced(settings: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Settings without those that exclude some that are given."""
    return {name: value for name, value in settings.items() if name not in excluded(given)}
