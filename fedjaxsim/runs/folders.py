"""Kinds of directories of results, known by a file of each."""

import shlex
from pathlib import Path

CONFIG = "config.toml"
"""The settings of a run."""


def kind_of(path: Path) -> str:
    """Return the kind of results in a directory: "sweep", "tuning" or, by default, "run"."""
    kinds = {"sweep": "sweep.toml", "tuning": "path.json"}
    return next((kind for kind, name in kinds.items() if (path / name).exists()), "run")


def looking_at(path: Path) -> str:
    """Return how to see the results of a sweep or a tuning, and which file runs again."""
    file = {"sweep": "sweep.toml", "tuning": "tuned.toml", "run": CONFIG}[kind_of(path)]
    command = "sweep" if kind_of(path) == "sweep" else "run"
    again = f"fedjaxsim {command} {shlex.quote(str(path / file))}"
    return f"see it with fedjaxsim report {shlex.quote(str(path))}, or repeat it with {again}"
