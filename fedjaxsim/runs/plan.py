"""What a sweep runs: a TOML file resolved into runs, and which of them can share one program.

A file has the keys of a run at its top level and, below, what is swept:

    rounds = 100
    best-over = ["learning-rate"]    # an option of the sweep

    [sweep]                          # every value with every other: 3 · 2 · 2 runs
    learning-rate = [0.03, 0.1, 0.3]
    epsilon = [1, inf]
    seed = [0, 1]

Several `[[sweep]]` tables stand side by side: each has a product of its own. A run that several of
them ask for is one run.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjaxsim.hparams import ABOUT, setting_of
from fedjaxsim.runs.reads import unread
from fedjaxsim.runs.settings import RunConfig, flag
from fedjaxsim.runs.settings_files import EXCLUSIVE, content, convert, excluded, named

_STATIC = ("sampling_rate", "example_epsilon")
"""Hyperparameters on which the program itself depends."""
HYPERPARAMETERS = (*(setting_of(name) for name in ABOUT if name not in _STATIC), "epsilon")
"""Settings that are arrays in the compiled program: runs that differ in them alone share it."""

Values = Mapping[str, tuple[Any, ...]]
"""One table of a sweep: the values of each key, by field name."""

_OUTPUT = ("out", "overwrite", "quiet")
_NO_OUTPUT: dict[str, str] = dict.fromkeys(
    _OUTPUT, "belongs on the command line, not in a sweep's file"
) | {"patience": "is for single runs: those of a sweep go on together"}
_PRIVACY = ("epsilon", "noise_multiplier")
_COLUMNS = {"epsilon": "target_epsilon"}
_HINTS = {
    name: hint for name, hint in typing.get_type_hints(RunConfig).items() if name not in _NO_OUTPUT
}


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """What a file says about the sweep itself; keys take - or _."""

    memory: float = 2.0
    """Memory for the runs that are computed at once, in GB (10⁹ bytes)."""
    best_over: tuple[str, ...] | None = None
    """Swept keys over which envelopes take the best; see `Plan.best_over` for the default."""

    def validate(self, keys: Sequence[str]) -> None:
        """Checks the options of a sweep over these keys.

        Raises:
          ValueError: naming the option, its value and what is allowed.
        """
        if not 0 < self.memory < math.inf:
            raise ValueError(f"memory must be a positive number of GB, got {self.memory}")
        allowed = [flag(key) for key in keys if key != "seed"]
        for index, name in enumerate(self.best_over or ()):
            if flag(name) == "seed":
                raise ValueError("best-over cannot hold seed: over seeds, values are averaged")
            if flag(name) not in allowed:
                raise ValueError(f"best-over takes swept keys ({', '.join(allowed)}), got {name!r}")
            if flag(name) in map(flag, (self.best_over or ())[:index]):
                raise ValueError(f"best-over names {name!r} twice")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sweep that has been resolved into runs.

    Attributes:
      base: the settings that all runs start from.
      options: of the sweep itself.
      tables: what was asked for, table by table.
      keys: all swept keys, by field name, in the order of their first appearance.
      runs: the settings of each run; a run is known by its index here.
      given: for each run, the keys that its tables set; the others are those of `base`.
    """

    base: RunConfig
    options: SweepOptions
    tables: tuple[Values, ...]
    keys: tuple[str, ...]
    runs: tuple[RunConfig, ...]
    given: tuple[frozenset[str], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the swept keys in tables of results, in the order of `keys`."""
        return tuple(column(key) for key in self.keys)

    @property
    def best_over(self) -> tuple[str, ...]:
        """The columns over which envelopes take the best value.

        They are those of the options; by default the learning rate where it is swept, else every
        hyperparameter but the level of personalization and what sets the privacy.
        """
        if self.options.best_over is not None:
            names = tuple(name.replace("-", "_") for name in self.options.best_over)
        elif "learning_rate" in self.keys:
            names = ("learning_rate",)
        else:
            kept = (*_PRIVACY, "personalization")
            names = [key for key in self.keys if key in HYPERPARAMETERS and key not in kept]
        return tuple(column(name) for name in names)

    def values(self, run: int) -> dict[str, Any]:
        """The swept values of one run, by column; None where none of its tables sets the key.

        Several words or widths become one string with commas.
        """
        config, given = self.runs[run], self.given[run]
        return {
            column(key): _cell(getattr(config, key)) if key in given else None for key in self.keys
        }

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The runs that differ in `HYPERPARAMETERS` and schedules alone, in order of appearance.

        The runs of a group share a compiled program and, as they share a seed, data, cohorts and
        minibatches. Whether messages are clipped does not separate them.
        """
        groups: dict[tuple[Any, ...], list[int]] = {}
        static = [name for name in _HINTS if name not in (*HYPERPARAMETERS, "budget")]
        for index, run in enumerate(self.runs):
            # Schedules are arrays, whatever is in them; a constant is a number.
            kind = (run.spread.is_constant, *(getattr(run, name) for name in static))
            groups.setdefault(kind, []).append(index)
        return tuple(tuple(group) for group in groups.values())

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all that the results depend on: the runs, their order and their columns.

        The memory budget and the choice of envelopes are no part of it.
        """
        runs = [
            [run.settings(), sorted(given)]
            for run, given in zip(self.runs, self.given, strict=True)
        ]
        text = json.dumps([self.keys, runs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def settings(self) -> dict[str, Any]:
        """What was asked for, as TOML values: a file with them asks for the same sweep."""
        options: dict[str, Any] = {"memory": self.options.memory}
        if self.options.best_over is not None:
            options["best_over"] = list(self.options.best_over)
        tables = [
            {
                key: [list(value) if isinstance(value, tuple) else value for value in values]
                for key, values in table.items()
            }
            for table in self.tables
        ]
        return {**self.base.settings(), **options, "sweep": tables}


def column(key: str) -> str:
    """The column of a swept key in tables of results, where `epsilon` is what a run has spent."""
    return _COLUMNS.get(key, key)


def value_type(key: str) -> type:
    """How tables of results hold the values of a swept key: as float, int, bool or str."""
    hint = _HINTS[key]
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    is_number = kinds[0] in (bool, int, float) and typing.get_origin(hint) is not tuple
    return kinds[0] if is_number else str


def make_plan(
    base: RunConfig, tables: Sequence[Values], options: SweepOptions | None = None
) -> Plan:
    """Resolves tables of values into runs.

    Args:
      base: the settings that all runs start from.
      tables: each with at least one value for each of its keys (field names of `RunConfig`); the
        last key varies fastest.
      options: of the sweep; by default the defaults.

    Raises:
      ValueError: for keys that exclude each other in one table, settings of a run that do not fit
        together (with what is swept in it), or options that do not fit the keys.
    """
    options = options or SweepOptions()
    keys = tuple(dict.fromkeys(key for table in tables for key in table))
    options.validate(keys)
    runs: dict[RunConfig, set[str]] = {}
    for table in tables:
        _check_exclusive(table)
        for values in itertools.product(*table.values()):
            changes = dict(zip(table, values, strict=True))
            run = dataclasses.replace(base, **dict.fromkeys(excluded(changes)), **changes)
            try:
                run.validate()
                run.require_unstreamed("a sweep")
            except ValueError as error:
                swept = ", ".join(f"{flag(key)} = {value}" for key, value in changes.items())
                raise ValueError(f"the run with {swept}: {error}") from error
            runs.setdefault(run, set()).update(changes)
    given = tuple(map(frozenset, runs.values()))
    _check_read(keys, tuple(runs), given)
    return Plan(base, options, tuple(tables), keys, tuple(runs), given)


def _check_read(
    keys: Sequence[str], runs: Sequence[RunConfig], given: Sequence[frozenset[str]]
) -> None:
    """That every swept key has an effect on some run that it is given for."""
    for key in keys:
        affected = [run for run, of_run in zip(runs, given, strict=True) if key in of_run]
        if all(unread(run, [key]) for run in affected):
            raise ValueError(f"no run reads what is swept: {unread(affected[0], [key])[0]}")


def read_plan(path: Path, data: str | None = None) -> Plan:
    """Reads the file of a sweep.

    Args:
      path: a TOML file as described above; also one that a sweep wrote.
      data: where the clients come from, instead of what the file says.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a file that is not TOML, no table `[sweep]`, an unknown key (with the closest
        known one), an empty list, a repeated value, or a value of the wrong type, each with its
        place; and as `make_plan`.
    """
    whole = content(path)
    if "sweep" not in whole:
        raise ValueError(
            f"{path} needs a table [sweep] that lists values, as in learning-rate = [0.1, 0.3]"
        )
    sweep = whole.pop("sweep")
    if isinstance(sweep, dict):
        tables = [_table(sweep, "[sweep]", path)]
    elif isinstance(sweep, list) and sweep and all(isinstance(table, dict) for table in sweep):
        places = [f"[[sweep]] number {index + 1}" for index in range(len(sweep))]
        tables = [_table(*each, path) for each in zip(sweep, places, strict=True)]
    else:
        raise ValueError(f"{path}: sweep must be a table [sweep] or tables [[sweep]], got {sweep}")
    hints = typing.get_type_hints(SweepOptions)
    settings, options = {}, {}
    for name, value in named(whole, [*_HINTS, *hints], f"{path}: ", _NO_OUTPUT):
        kept, hint = (options, hints[name]) if name in hints else (settings, _HINTS[name])
        kept[name] = convert(flag(name), value, hint, path)
    if data is not None:
        settings["data"] = data
    try:
        return make_plan(RunConfig(**settings), tables, SweepOptions(**options))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _table(table: Mapping[str, Any], place: str, path: Path) -> Values:
    """One table with the types of the fields; a value that is no list counts as a list of one."""
    if not table:
        raise ValueError(f"{path}: {place} is empty: it needs at least one key with its values")
    above = dict.fromkeys(
        typing.get_type_hints(SweepOptions), "is an option of the sweep: write it above the tables"
    )
    return {
        name: _list(
            value if isinstance(value, list) else [value], name, f"{flag(name)} in {place}", path
        )
        for name, value in named(table, _HINTS, f"{path}: {place}: ", above | _NO_OUTPUT)
    }


def _list(values: list[Any], name: str, place: str, path: Path) -> tuple[Any, ...]:
    """The values of one key, converted."""
    if not values:
        raise ValueError(f"{path}: {place} must list at least one value, got []")
    found: list[Any] = []
    for index, item in enumerate(values):
        where = f"value {index + 1} of {place}"
        value = convert(where, item, _HINTS[name], path)
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{path}: {where} must be a number, got nan")
        if value in found:
            raise ValueError(
                f"{path}: {where} repeats value {found.index(value) + 1}, which is {item!r}"
            )
        found.append(value)
    return tuple(found)


def _check_exclusive(table: Values) -> None:
    for pair in EXCLUSIVE:
        if all(name in table for name in pair):
            one, other = map(flag, pair)
            raise ValueError(
                f"{one} and {other} exclude each other: one table of a sweep takes one of them, "
                "and tables of their own can hold both"
            )


def _cell(value: Any) -> Any:
    """A setting as one value of a table."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, bool | int | float) else str(value)
