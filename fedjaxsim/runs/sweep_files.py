"""The files of sweeps: settings, options, and tables of values; flags may change them.

Help for sweeps reads the options here, so that it imports no numpy.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedjaxsim import checks
from fedjaxsim.data.files import in_file
from fedjaxsim.factories import Setting, flag, settings_of
from fedjaxsim.runs.parts import ROLES, check_parts
from fedjaxsim.runs.settings import displaced, static_keys, table_of, unread_by
from fedjaxsim.runs.settings_files import OUTPUT, content, settings_in

MOST_RUNS = 100_000
"""Most runs of a sweep, or seeds of a run."""
SWEEP = "sweep.toml"
"""The file of a sweep in its directory."""
Values = Mapping[str, Any]
"""A dict of values as a file has them; each run converts its own."""
Axes = Mapping[str, Sequence[Any]]
"""One table of a sweep: the values of each key."""
NOTHING: Values = MappingProxyType({})

REFUSED: dict[str, str] = {
    **OUTPUT,
    **dict.fromkeys(
        unread_by("sweep"), "is for single runs: a sweep's go on together and share noise"
    ),
}
"""Keys that a sweep's file and flags may not have, with the reason."""


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """The options of a sweep in its file or in flags; keys take - or _.

    Attributes:
      memory: Memory for the runs that are computed at once, in GB (10⁹ bytes).
      best_over: Swept keys over which the best is taken; by default the learning rate.
    """

    memory: float = 2.0
    best_over: tuple[str, ...] | None = None

    def validate(self, keys: Sequence[str]) -> None:
        """Check the options of a sweep over `keys`; raise a ValueError for a bad one."""
        checks.positive(memory=self.memory)
        allowed = [flag(key) for key in keys if key != "seed"]  # over seeds, values are averaged
        names = [flag(name) for name in self.best_over or ()]
        swept = ", ".join(allowed) or "none"
        for name in names:
            if name not in allowed or names.count(name) > 1:
                raise ValueError(f"best-over takes swept keys ({swept}), each once, got {name!r}")


class SweepFile(NamedTuple):
    """The content of a sweep's file.

    Attributes:
      base: settings of all runs.
      tables: the values that are swept.
      boxes: for each table, the values that are searched in it alone.
      search: the table [search]; None without one.
    """

    base: Values = NOTHING
    options: SweepOptions = SweepOptions()
    tables: Sequence[Axes] = ({},)
    boxes: Sequence[Any] = ({},)
    search: Any = None

    def changed(self, changes: Values) -> "SweepFile":
        """Return the content with other settings and options; lists of settings are axes.

        A list of a setting that holds several values, such as columns, is one value.
        """
        names = settings_of(SweepOptions).keys() & changes.keys()
        options = dataclasses.replace(self.options, **{name: changes[name] for name in names})
        changes = {name: value for name, value in changes.items() if name not in names}
        check_parts({k: v for k, v in changes.items() if not isinstance(v, list)})
        listed = {k: of for k, of in changes.items() if isinstance(of, list)}
        keys = self.settings_of_runs(changes) if listed.keys() - {*ROLES, "seed"} else {}
        list_values = [k for k, of in listed.items() if k in keys and _is_one_value(keys[k], of)]
        axes = lists({k: of for k, of in listed.items() if k not in list_values}, "the flags")
        values = {name: value for name, value in changes.items() if name not in axes}
        base = dict(self.base)
        if "data" in values:
            left = table_of(base).keys.keys() - table_of(base | values).keys.keys()
            base = {name: value for name, value in base.items() if name not in left}

        def rest(settings: Values) -> dict[str, Any]:
            remaining = displaced(settings, changes)
            return {k: v for k, v in remaining.items() if k.replace("-", "_") not in changes}

        tables = [rest(table) | axes for table in self.tables]
        boxes = [rest(box) if isinstance(box, Mapping) else box for box in self.boxes]
        search = rest(self.search) if isinstance(self.search, Mapping) else self.search
        return SweepFile(rest(base) | values, options, tables, boxes, search)

    def settings_of_runs(self, changes: Values) -> dict[str, Setting]:
        """Return the settings that its runs have, with `changes`; several parts are a list."""
        names = {role: changes.get(role, self.parts(role)) for role in ROLES}
        parts = {role: of if isinstance(of, list) else [of] for role, of in names.items() if of}
        settings = dict[str, Setting]()
        for combined in itertools.product(*parts.values()):
            run = dict(zip(parts, combined, strict=True))
            check_parts(run)
            settings |= table_of({**self.base, **changes, **run}).keys
        return settings

    def parts(self, role: str) -> list[str]:
        """Return the names of the parts that its settings give a role."""
        swept = [table.get(role, ()) for table in self.tables]
        names = [self.base.get(role), *itertools.chain(*swept)]
        return [str(name) for name in names if name is not None]


def read_file(path: Path) -> SweepFile:
    """Read the content of a sweep's file."""
    file_content = content(path)
    with in_file(path):
        search, tables = file_content.pop("search", None), _tables(file_content.pop("sweep", None))
        boxes = [table.pop("search", [{}])[0] for table in tables]
        base = dict(settings_in(file_content, REFUSED))
        options = settings_of(SweepOptions)
        option_values = {
            name: options[name].convert(base.pop(name)) for name in [*base] if name in options
        }
        for name, setting in static_keys().items():
            if isinstance(base.get(name), list) and setting.item is None:
                raise ValueError(f"{flag(name)} is one for all runs here: a list is for [sweep]")
        check_parts(base)
        return SweepFile(base, SweepOptions(**option_values), tables, boxes, search)


def _tables(sweep: Any) -> list[dict[str, list[Any]]]:
    """Return the tables of a file; a value that is no list becomes one.

    Among several, one may be empty, of a run of the other settings, as where a flag took its axis.
    """
    tables = [sweep] if isinstance(sweep, dict) else sweep
    is_list = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if not is_list or not any(tables):
        example = "with lists of values, as in learning-rate = [0.1, 0.3]"
        got = "" if sweep is None else f"; got {sweep}"
        raise ValueError(f"a sweep needs a table [sweep], or [[sweep]]s, {example}{got}")
    above = "is an option of the sweep: write it above the tables"
    refused = dict.fromkeys((*settings_of(SweepOptions), "metric"), above) | REFUSED
    return [lists(dict(settings_in(table, refused, "[sweep]: ")), "[sweep]") for table in tables]


def _is_one_value(setting: Setting, values: list[Any]) -> bool:
    """Return whether a list is a value of a setting that holds several, and not some of them."""
    return setting.item is not None and not any(isinstance(value, list | tuple) for value in values)


def lists(table: Values, place: str) -> dict[str, list[Any]]:
    """Return the values of each key, none of them twice: a run counts once."""
    values_by_key = {name: of if isinstance(of, list) else [of] for name, of in table.items()}
    for name, values in values_by_key.items():
        if not values:
            raise ValueError(f"{flag(name)} in {place} must list at least one value, got []")
        for number, value in enumerate(values):
            if value in values[:number]:
                raise ValueError(f"{flag(name)} in {place} lists {value!r} twice")
    return values_by_key
