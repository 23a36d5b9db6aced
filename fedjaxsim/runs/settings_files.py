"""Settings in TOML files, also those that runs wrote; errors name the file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedjaxsim.data.files import in_file, read_tables
from fedjaxsim.factories import flag, settings_of
from fedjaxsim.runs.output import RunOutput
from fedjaxsim.runs.parts import check_parts
from fedjaxsim.runs.settings import Layer, RunConfig, layered

CONFIG = "config.toml"
"""The settings of a run in its directory."""
OUTPUT = dict.fromkeys(
    (
        "out", "overwrite", "from", "seeds", "name", "tags", "devices", "processes", "process",
        "coordinator", *settings_of(RunOutput),
    ),
    "belongs on the command line, not in a file",
)  # fmt: skip
"""Flags of commands that write results, with the reason why files refuse them."""
RECORDS = ("resolved", "versions", "stages", "known_as")
"""Tables that a run adds to the configuration it writes; reading one back ignores them."""


def read_toml(path: Path) -> RunConfig:
    """Read the settings of a run from a TOML file; also one that a run wrote.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a file that is not TOML, an unknown key (with the closest known one), a key
        that no part of the run reads, or a value of the wrong type.
    """
    return layered(Layer(read_raw(path), path))


def read_raw(path: Path) -> dict[str, Any]:
    """Read the keys of a TOML file as names of settings, with their values unconverted."""
    table = content(path)
    with in_file(path):
        raw = dict(settings_in(table, OUTPUT | {"sweep": "is for `fedjaxsim sweep`"}))
        check_parts(raw)
    return raw


def content(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    if path.is_dir():
        file = next((name for name in (CONFIG, "sweep.toml") if (path / name).is_file()), CONFIG)
        raise ValueError(f"{path} is a folder: give a file, as {path / file}")
    if not path.is_file():
        if path.name == CONFIG:
            from fedjaxsim.report.files import not_a_run  # late, as it imports numpy

            raise not_a_run(path.parent, CONFIG)
        raise FileNotFoundError(f"no configuration file {path}")
    return read_tables(path, "is not a TOML file")


def settings_in(
    table: Mapping[str, Any], refused: Mapping[str, str], place: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the names of settings and values of a table, without `RECORDS`; its keys take - or _.

    `refused` says why keys do not belong there; errors begin with `place`.
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
