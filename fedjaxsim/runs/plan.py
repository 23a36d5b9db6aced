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

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjaxsim.report import symbols
from fedjaxsim.runs.parts import check_parts
from fedjaxsim.runs.settings import (
    EXCLUSIVE,
    RunConfig,
    fields_of,
    flag,
    run_config,
    unread,
)
from fedjaxsim.runs.settings_files import content, convert, excluded, named

if TYPE_CHECKING:
    from fedjaxsim.hyperparameters import Hyperparameter

SWEEP = "sweep.toml"
"""The file of a sweep in its directory."""
_STATIC = ("sampling_rate",)
"""Hyperparameters on which the program itself depends."""

Values = Mapping[str, tuple[Any, ...]]
"""One table of a sweep: the values of each key, by field name."""

_OUTPUT = ("out", "overwrite", "quiet")
_NO_OUTPUT: dict[str, str] = dict.fromkeys(
    _OUTPUT, "belongs on the command line, not in a sweep's file"
) | {"patience": "is for single runs: those of a sweep go on together"}
_PRIVACY = ("epsilon", "noise_multiplier")
_COLUMNS = {"epsilon": "target_epsilon"}


def hyperparameters_of(run: RunConfig) -> tuple[str, ...]:
    """Return the settings of a run that are arrays in its program, which may differ within it."""
    settings = [record.setting for record in run.records.values() if record.name not in _STATIC]
    return (*settings, *(["epsilon"] if hasattr(run, "epsilon") else []))


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
      base: the settings that all runs start from, by field name.
      options: of the sweep itself.
      tables: what was asked for, table by table.
      keys: all swept keys, by field name, in the order of their first appearance.
      runs: the settings of each run; a run is known by its index here.
      given: for each run, the keys that its tables set; the others are those of `base`.
    """

    base: Mapping[str, Any]
    options: SweepOptions
    tables: tuple[Values, ...]
    keys: tuple[str, ...]
    runs: tuple[RunConfig, ...]
    given: tuple[frozenset[str], ...]

    @functools.cached_property
    def hyperparameters(self) -> frozenset[str]:
        """The settings that are arrays in the programs of some runs."""
        return frozenset(name for run in self.runs for name in hyperparameters_of(run))

    @functools.cached_property
    def records(self) -> dict[str, "Hyperparameter"]:
        """The hyperparameters of all runs, by setting."""
        return {each.setting: each for run in self.runs for each in run.records.values()}

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
            names = [key for key in self.keys if key in self.hyperparameters and key not in kept]
        return tuple(column(name) for name in names)

    def value_type(self, key: str) -> type:
        """Return how tables of results hold the values of a swept key: float, int, bool or str."""
        hints = next(fields_of(vars(run)) for run in self.runs if hasattr(run, key))
        hint = hints[key]
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
        is_number = kinds[0] in (bool, int, float) and typing.get_origin(hint) is not tuple
        return kinds[0] if is_number else str

    def values(self, run: int) -> dict[str, Any]:
        """The swept values of one run, by column; None where none of its tables sets the key.

        Several words or widths become one string with commas.
        """
        config, given = self.runs[run], self.given[run]
        return {column(key): _cell(config.get(key)) if key in given else None for key in self.keys}

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The runs that differ in `HYPERPARAMETERS` and schedules alone, in order of appearance.

        The runs of a group share a compiled program and, as they share a seed, data, cohorts and
        minibatches. Whether messages are clipped does not separate them.
        """
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, run in enumerate(self.runs):
            arrays = (*hyperparameters_of(run), "budget")
            static = {name: value for name, value in vars(run).items() if name not in arrays}
            # Schedules are arrays, whatever is in them; a constant is a number.
            kind = (type(run), run.spread.is_constant, *static.items())
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
        base = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in self.base.items()
        }
        return {**base, **options, "sweep": tables}


def column(key: str) -> str:
    """The column of a swept key in tables of results, where `epsilon` is what a run has spent."""
    return _COLUMNS.get(key, key)


def make_plan(
    base: Mapping[str, Any], tables: Sequence[Values], options: SweepOptions | None = None
) -> Plan:
    """Resolve tables of values into runs.

    Args:
      base: the settings that all runs start from, by field name. What some run does not read is
        left out there.
      tables: each with at least one value for each of its keys (field names of a run); the last key
        varies fastest.
      options: of the sweep; by default the defaults.

    Raises:
      ValueError: for keys that exclude each other in one table, settings of a run that do not fit
        together (with what is swept in it), keys that no run reads, or options that do not fit the
        keys.
    """
    options = options or SweepOptions()
    keys = tuple(dict.fromkeys(key for table in tables for key in table))
    options.validate(keys)
    runs: dict[RunConfig, set[str]] = {}
    read: set[str] = set()
    effective: set[str] = set()
    for table in tables:
        _check_exclusive(table)
        for values in itertools.product(*table.values()):
            changes = dict(zip(table, values, strict=True))
            kept = {name: value for name, value in base.items() if name not in excluded(changes)}
            try:
                whole = kept | changes
                known = fields_of(whole)
                read |= {name for name in whole if name in known}
                run = run_config(**{n: v for n, v in whole.items() if n in known})
                run.validate()
                run.require_unstreamed("a sweep")
            except ValueError as error:
                swept = ", ".join(f"{flag(key)} = {value}" for key, value in changes.items())
                raise ValueError(f"the run with {swept}: {error}") from error
            swept_here = [key for key in changes if key in known]
            effective.update(swept_here)
            runs.setdefault(run, set()).update(swept_here)
    for key in base:
        if key not in read | effective:
            raise _unread(key, base, tables[0], "is set")
    for table in tables:
        for key in table:
            if key not in effective:
                raise _unread(key, base, table, "is swept")
    given = tuple(map(frozenset, runs.values()))
    plan = Plan(base, options, tuple(tables), keys, tuple(runs), given)
    symbols.remember(plan.records.values())
    return plan


def read_plan(path: Path, data: str | None = None) -> Plan:
    """Read the file of a sweep.

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
        places = {"[sweep]": sweep}
    elif isinstance(sweep, list) and sweep and all(isinstance(table, dict) for table in sweep):
        places = {f"[[sweep]] number {index + 1}": table for index, table in enumerate(sweep)}
    else:
        raise ValueError(f"{path}: sweep must be a table [sweep] or tables [[sweep]], got {sweep}")
    hints = typing.get_type_hints(SweepOptions)
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in named(whole, f"{path}: ", _NO_OUTPUT):
        if name in hints:
            options[name] = convert(flag(name), value, hints[name], path)
        else:
            settings[name] = value
    if data is not None:
        settings["data"] = data
    raw = {place: _raw_table(table, place, path) for place, table in places.items()}
    try:
        check_parts(settings)
        types = {place: _types(settings, table) for place, table in raw.items()}
        every = {name: hint for found in reversed(types.values()) for name, hint in found.items()}
        for name in settings:
            if name not in every:
                raise _unread(name, settings, next(iter(raw.values())), "is set")
        for place, table in raw.items():
            for name in table:
                if name not in every:
                    with _at(place):
                        raise _unread(name, settings, table, "is swept")
        base = {
            name: convert(flag(name), value, every[name], path) for name, value in settings.items()
        }
        tables = [
            {
                name: _list(values, types[place].get(name, every[name]), name, place, path)
                for name, values in table.items()
            }
            for place, table in raw.items()
        ]
        return make_plan(base, tables, SweepOptions(**options))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from error


def _types(base: Mapping[str, Any], table: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The types of the settings that some run of a table has, by name."""
    choosing = {name: values for name, values in table.items() if _chooses(values)}
    found: dict[str, Any] = {}
    for values in itertools.product(*choosing.values()):
        found = fields_of({**base, **dict(zip(choosing, values, strict=True))}) | found
    return found


def _chooses(values: list[Any]) -> bool:
    """Return whether values may name parts, or choices within them."""
    return all(isinstance(value, str | bool) for value in values)


def _unread(
    name: str, settings: Mapping[str, Any], table: Mapping[str, Sequence[Any]], where: str
) -> ValueError:
    """The error about a key that no run reads; an unknown one is refused at once."""
    first = {**settings, **{key: values[0] for key, values in table.items()}}
    reasons = unread([name], first, typing.get_type_hints(SweepOptions))
    return ValueError(f"no run reads what {where}: {reasons[0] if reasons else flag(name)}")


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    """Name the table that an error is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _raw_table(table: Mapping[str, Any], place: str, path: Path) -> dict[str, list[Any]]:
    """One table as it stands; a value that is no list counts as a list of one."""
    if not table:
        raise ValueError(f"{path}: {place} is empty: it needs at least one key with its values")
    above = dict.fromkeys(
        typing.get_type_hints(SweepOptions), "is an option of the sweep: write it above the tables"
    )
    found = {
        name: value if isinstance(value, list) else [value]
        for name, value in named(table, f"{path}: {place}: ", above | _NO_OUTPUT)
    }
    empty = [name for name, values in found.items() if not values]
    if empty:
        raise ValueError(
            f"{path}: {flag(empty[0])} in {place} must list at least one value, got []"
        )
    return found


def _list(values: list[Any], hint: Any, name: str, place: str, path: Path) -> tuple[Any, ...]:
    """The values of one key, converted."""
    found: list[Any] = []
    for index, item in enumerate(values):
        where = f"value {index + 1} of {flag(name)} in {place}"
        value = convert(where, item, hint, path)
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
