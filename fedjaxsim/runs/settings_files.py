"""Settings from flags, TOML files and earlier runs; errors name the file."""

import shlex
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.data.files import in_file, read_tables
from fedjaxsim.factories import flag
from fedjaxsim.runs.parts import check_parts
from fedjaxsim.runs.settings import (
    EXCLUSIVE,
    IN_FILES_ONLY,
    RunConfig,
    filled,
    require_read,
    table_of,
    unread,
)

CONFIG = "config.toml"
"""The settings of a run in its directory."""
_OF_RELEASES = ("sampling", "schedule", "passes")
"""Settings that a stage without a release, such as fine-tuning, does not inherit."""
OUTPUT = dict.fromkeys(
    ("out", "overwrite", "quiet", "no_client_table"), "belongs on the command line, not in a file"
)
"""Flags of commands that write results, with the reason why files refuse them."""
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
    return resolve({}, path)


def resolve(
    flags: dict[str, Any],
    path: Path | None = None,
    earlier: Path | None = None,
    notes: list[str] | None = None,
    without: Mapping[str, str] = {},
) -> RunConfig:
    """Make the settings of a run from flags, a file and an earlier run, of which the first wins.

    Args:
      flags: settings by name, as typed or converted.
      path: TOML file.
      earlier: directory of a run; the settings that this run does not read are left out.
      notes: list that gets a note of the settings in the file that this run does not read; None to
        refuse them.
      without: settings that the caller does not read, with the reason.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: for an unknown part or setting, a flag that the run does not read, a value of the
        wrong type, or settings that contradict each other.
    """
    for name, why in {**dict.fromkeys(IN_FILES_ONLY, "is for files alone"), **without}.items():
        if name in flags:
            raise ValueError(f"{flag(name)} {why}")
    check_parts(flags)
    inherited = {} if earlier is None else read_raw(earlier / CONFIG)
    file = {} if path is None else read_raw(path)
    system = SYSTEMS.get(str((inherited | file | flags).get("algorithm")))
    if system is not None and not system.sends:
        inherited = {name: inherited[name] for name in inherited if name not in _OF_RELEASES}
    given = displaced(displaced(inherited, file) | file, flags) | flags
    table = table_of(given)
    require_read(flags, given)
    with in_file(path):
        left = unread(file, given)
        left += [
            f"{flag(name)} {without[name]}"
            for name, value in file.items()
            if name in without and name in table.keys and value != table.keys[name].default
        ]
        if left and notes is None:
            raise ValueError("; ".join(left))
        if left and notes is not None:
            notes.append(f"{path}: {'; '.join(left)}")
    places = dict.fromkeys(inherited, earlier and earlier / CONFIG) | dict.fromkeys(file, path)
    values = {}
    for name in [name for name in table.keys if name in given and name not in without]:
        with in_file(None if name in flags else places[name]):
            values[name] = table.keys[name].convert(given[name])
    with in_file(None if flags else path):
        return filled(table, values)


def read_raw(path: Path) -> dict[str, Any]:
    """Read the keys of a TOML file as names of settings, with their values unconverted."""
    table = content(path)
    with in_file(path):
        raw = dict(entries(table, OUTPUT | {"sweep": "is for `fedjaxsim sweep`"}))
        check_parts(raw)
    return raw


def kind_of(path: Path) -> str:
    """Return the kind of results in a directory: "sweep", "tuning" or, by default, "run"."""
    kinds = {"sweep": "sweep.toml", "tuning": "path.json"}
    return next((kind for kind, name in kinds.items() if (path / name).exists()), "run")


def looking_at(path: Path) -> str:
    """Return how to see the results of a sweep or a tuning, and which file runs again."""
    kind = kind_of(path)
    file = {"sweep": "sweep.toml", "tuning": "tuned.toml", "run": CONFIG}[kind]
    again = f"fedjaxsim {'sweep' if kind == 'sweep' else 'run'} {shlex.quote(str(path / file))}"
    if kind == "sweep":
        return f"its runs are in results.parquet, and {again} repeats it"
    where = "its steps are in path.json, and " if kind == "tuning" else ""
    return f"{where}{again} {'runs with its result' if kind == 'tuning' else 'repeats it'}"


def content(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    folder = path.parent if path.name == CONFIG else path
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
    """Yield the names of settings and values of a table; its keys take - or _.

    Args:
      table: the table; those that a run adds (`RECORDS`) are left out.
      refused: by name, the reason why a key does not belong there.
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


def excluded(given: Container[str]) -> set[str]:
    """Return the settings that exclude some of the given ones."""
    return {pair[1 - place] for pair in EXCLUSIVE for place in (0, 1) if pair[place] in given}


def displaced(settings: Mapping[str, Any], given: Container[str]) -> dict[str, Any]:
    """Return settings without those that exclude some of the given ones."""
    left_out = excluded(given)
    return {name: value for name, value in settings.items() if name not in left_out}
