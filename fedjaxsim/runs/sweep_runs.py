"""The runs of a sweep, resolved from a TOML file, and the groups that share one program.

A file has the keys of a run and the options of a sweep at its top level, the values to sweep in a
table `[sweep]` or several `[[sweep]]`, each its own product, and may have a table `[search]`
that chooses further settings first, for each combination of swept values; see docs/sweeps.md.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim import checks
from fedjaxsim.data.files import in_file
from fedjaxsim.factories import Setting, flag, settings_of
from fedjaxsim.metrics import named_metric
from fedjaxsim.report.labels import short_name
from fedjaxsim.report.results import Estimate
from fedjaxsim.runs.directory import settings_digest
from fedjaxsim.runs.parts import ROLES, absolute
from fedjaxsim.runs.seeds import SECRET, SecretSeed, SeedSetting
from fedjaxsim.runs.settings import (
    Layer,
    RunConfig,
    check_flags,
    displaced,
    excluded,
    layered,
    readers,
    static_keys,
    table_of,
    unread,
)
from fedjaxsim.runs.settings_files import settings_in
from fedjaxsim.runs.sweep_files import (
    MOST_RUNS,
    NOTHING,
    REFUSED,
    Axes,
    SweepFile,
    SweepOptions,
    Values,
    lists,
    read_file,
)

_SECRET = "seed secret is for a run to publish: a sweep's runs share their seeds"
_LISTED = 16
"""Most values of a list that results hold; of a longer one they name its ends and a digest."""
_OTHER_COLUMNS = {
    "run", "runs", "round", "train_loss", "failed", "nonfinite", "epsilon_replace",
    "epsilon_tight", "epsilon_spent", "example_epsilon_replace", "example_delta",
    *Estimate._fields,
}  # fmt: skip
"""Columns of results, and of the best of them, besides the swept keys and metrics."""
_STATIC = ("sampling_rate",)
"""Hyperparameters on which the program itself depends."""


def hyperparameters_of(run: RunConfig) -> tuple[str, ...]:
    """Return the settings of a run that are arrays in its program, which may differ within it."""
    settings = [record.name for record in run.records.values() if record.name not in _STATIC]
    settings += ["epsilon"] * hasattr(run, "epsilon")
    if run.protects_examples:  # ε of examples is not among them: its noise is a table
        settings += ["example_clip", "example_noise_multiplier"]
    return tuple(settings)


class Ranking(NamedTuple):
    """The way in which the runs of a sweep are ranked.

    Attributes:
      columns: the swept columns.
      best_over: the columns over which the best value is taken.
      metric: the metric that was asked for; None for the task's own choice.
      choice: how values were chosen before, in a sentence; "" if they were not.
    """

    columns: tuple[str, ...]
    best_over: tuple[str, ...]
    metric: str | None = None
    choice: str = ""

    def judged_by(self, names: Collection[str]) -> str | None:
        """Return the metric among `names` that was asked for."""
        return None if self.metric is None else named_metric(self.metric, names)


@dataclasses.dataclass(frozen=True)
class SweepRuns:
    """The runs of a sweep, each known by its index in `runs`.

    Attributes:
      base: the settings that all runs start from.
      tables: the swept values, as asked for.
      keys: all swept keys, in the order of their first appearance.
      given: for each run, the keys that its tables set; it has the others from `base`.
      unread: settings of `base` that some runs do not read, with the names of these runs' parts.
      choice: how values were chosen before, in a sentence; "" if they were not.
    """

    base: Values = dataclasses.field(compare=False)
    options: SweepOptions
    tables: tuple[Axes, ...] = dataclasses.field(compare=False)
    keys: tuple[str, ...]
    runs: tuple[RunConfig, ...]
    given: tuple[frozenset[str], ...]
    unread: tuple[tuple[str, tuple[str, ...]], ...] = ()
    choice: str = ""

    @property
    def remark(self) -> str:
        """A sentence on the settings that some runs do not read; "" if all read all of them."""
        by_runs: dict[tuple[str, ...], list[str]] = {}
        for name, runs in self.unread:
            by_runs.setdefault(runs, []).append(flag(name))
        parts = [f"{_listed(names)} with {_listed(runs)}" for runs, names in by_runs.items()]
        return f"Settings without effect: {'; '.join(parts)}." if parts else ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the swept keys in tables of results, in the order of `keys`."""
        return tuple(map(column_of, self.keys))

    @property
    def best_over(self) -> tuple[str, ...]:
        """The columns over which the best value is taken."""
        chosen = self.options.best_over
        if chosen is None:
            return ("learning_rate",) if "learning_rate" in self.keys else ()
        return tuple(column_of(name.replace("-", "_")) for name in chosen)

    @property
    def ranking(self) -> Ranking:
        """The way in which its runs are ranked."""
        return Ranking(self.columns, self.best_over, self.runs[0].metric, self.choice)

    @functools.cached_property
    def swept(self) -> list[dict[str, Any]]:
        """For each run the swept values, by column; None where no table sets the key.

        Several words, widths or clients' values become one string with commas. In a column with
        such strings numbers are strings, too.
        """
        columns = []
        for key in self.keys:
            pairs = zip(self.runs, self.given, strict=True)
            cells = [_cell(run.get(key)) if key in set_keys else None for run, set_keys in pairs]
            words = any(isinstance(cell, str) for cell in cells)
            columns.append([str(c) if words and c is not None else c for c in cells])
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*columns, strict=True)]

    def families(self) -> list[list[tuple[int, ...]]]:
        """Return the runs of each compiled program, and among them each seed's.

        Runs of a program differ in hyperparameters, schedules and seeds alone; runs of one seed
        share data, cohorts and minibatches. Clipped and unclipped runs share a program.
        """
        by_kind: dict[Any, dict[int, list[int]]] = {}
        for index, run in enumerate(self.runs):
            arrays = {*hyperparameters_of(run), "noise_schedule", "seed"}
            # Schedules, and lists of clients' values, are arrays of one shape; others are numbers.
            kind: list[Any] = [run.noise_schedule.is_constant]
            kind += [(name, isinstance(run.get(name), tuple)) for name in hyperparameters_of(run)]
            if run.reads_rows and run.partition_seed is None:
                kind.append(run.seed)  # from which the rows follow
            kind += [(name, value) for name, value in run.values.items() if name not in arrays]
            by_kind.setdefault(tuple(kind), {}).setdefault(run.seed, []).append(index)
        return [[tuple(group) for group in of_seeds.values()] for of_seeds in by_kind.values()]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all that the results depend on: the runs, their order and their columns.

        The metric that judges them is not among it: it may change when they are computed.
        """
        runs = [
            [{k: v for k, v in run.settings().items() if k != "metric"}, sorted(set_keys)]
            for run, set_keys in zip(self.runs, self.given, strict=True)
        ]
        return settings_digest(self.keys, runs)

    def settings(self) -> dict[str, Any]:
        """Return the keys of a file that asks for the same sweep."""
        options = {k: v for k, v in vars(self.options).items() if v is not None}
        base = {k: absolute(v) if k == "data" else v for k, v in self.base.items()}
        tables = [
            {k: [*map(absolute, v)] if k == "data" else v for k, v in table.items()}
            for table in self.tables
        ]
        return {**base, **options, "sweep": tables}


def column_of(key: str) -> str:
    """Return the column of a swept key, where `epsilon` is the ε that a run has spent.

    A user's hyperparameter with the name of another column, such as `round`, is `setting_round`.
    """
    if key in ("epsilon", "example_epsilon"):
        return f"target_{key}"
    of_user = key not in static_keys() and key not in readers()
    is_taken = key in _OTHER_COLUMNS or key.startswith(("test_", "validation_"))
    return f"setting_{key}" if of_user and is_taken else key


def _cell(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) > _LISTED and isinstance(value[0], float):
        digest = settings_digest(value)[:6]
        return f"{min(value):.4g} to {max(value):.4g} ({len(value)} clients, {digest})"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, bool | int | float) else str(value)


def expand_sweep(
    base: Values, tables: Sequence[Axes], options: SweepOptions | None = None
) -> SweepRuns:
    """Resolve tables of values into runs; the last key of a table varies fastest.

    A run leaves out settings of `base` or of its table that it does not read. A key that no run
    reads is refused.
    """
    options = options or SweepOptions()
    keys = tuple(dict.fromkeys(key for table in tables for key in table))
    options.validate(keys)
    if SECRET in (base.get("seed"), *(seed for table in tables for seed in table.get("seed", ()))):
        raise ValueError(_SECRET)
    count = sum(math.prod(map(len, table.values())) for table in tables)
    if count > MOST_RUNS:
        raise ValueError(f"a sweep has at most {MOST_RUNS:,} runs, and its tables have {count:,}")
    runs: dict[RunConfig, set[str]] = {}
    set_, swept = set(), set()
    for table in tables:
        for values in itertools.product(*table.values()):
            changes = dict(zip(table, values, strict=True))
            try:
                run = _run(base, changes)
                if run.streamed:
                    raise ValueError("a sweep needs all rows in memory: leave out streamed")
            except ValueError as error:
                shown = ", ".join(f"{flag(key)} = {value}" for key, value in changes.items())
                raise checks.prefixed(f"the run with {shown}: ", error) from error
            read = run.values.keys() & changes.keys()
            swept |= read
            set_ |= read | (run.values.keys() & displaced(base, changes).keys())
            runs.setdefault(run, set()).update(read)
    unread_ = [(key, tables[0], "is set") for key in base if key not in set_]
    unread_ += [(key, table, "is swept") for table in tables for key in table if key not in swept]
    for key, table, where in unread_:
        raise _unread(key, base, table, where)
    set_keys = tuple(map(frozenset, runs.values()))
    unread = _unread_by(base, tuple(runs))
    return SweepRuns(base, options, tuple(tables), keys, tuple(runs), set_keys, unread)


def _unread_by(base: Values, runs: Sequence[RunConfig]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the settings of `base` that matter to some runs and that others do not read."""
    varied = [role for role in ROLES if len({run.get(role) for run in runs}) > 1]
    parts_by_name = {}
    for name in base:
        readers = [run for run in runs if name in run.values]
        if all(run.values[name] == run.keys[name].default for run in readers):
            continue
        other_runs = [run for run in runs if name not in run.values]
        parts = [" ".join(short_name(str(run.get(role))) for role in varied) for run in other_runs]
        if parts:
            parts_by_name[name] = tuple(dict.fromkeys(parts))
    return tuple(parts_by_name.items())


def _listed(names: Sequence[str]) -> str:
    """Join names, as in `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _run(base: Values, changes: Values) -> RunConfig:
    """Return the run of these settings, without those that it does not read."""
    return layered(Layer(base, unread="left out"), Layer(changes, unread="left out"))


def _unread(name: str, settings: Values, table: Axes, where: str) -> ValueError:
    """Return the error about a key that no run reads; raise it at once for an unknown key."""
    first = {**settings, **{key: values[0] for key, values in table.items()}}
    reasons = unread([name], table_of(first), settings_of(SweepOptions))
    if not reasons:
        excluding = " and ".join(flag(other) for other in table if name in excluded({other: True}))
        reasons = [f"{flag(name)} and {excluding} exclude each other"]
    return ValueError(f"no run reads what {where}: {reasons[0]}")


# --- searches -------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A point of a search: values of a combination of a sweep, and of what is searched."""

    place: Values
    point: Values
    seeds: tuple[int, ...]

    @property
    def columns(self) -> dict[str, Any]:
        """The values by column."""
        return {column_of(key): _cell(value) for key, value in {**self.place, **self.point}.items()}

    def table(self, seeds: Sequence[int]) -> Axes:
        """Return a table of its runs with some seeds."""
        values = {**self.place, **self.point}
        return {key: (value,) for key, value in values.items()} | {"seed": tuple(seeds)}


@dataclasses.dataclass(frozen=True)
class Search:
    """A sweep that chooses settings first: points on validation rows of other `seeds`.

    Attributes:
      boxes: for each table, the values of each searched key, or with `points` its two ends.
      points: number of quasi-random points of each combination; None for a grid.
    """

    base: Values
    options: SweepOptions
    tables: tuple[Axes, ...]
    boxes: tuple[Axes, ...]
    points: int | None
    seeds: tuple[int, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The searched keys."""
        return tuple(dict.fromkeys(key for box in self.boxes for key in box))

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """All points of all combinations, each combination's together."""
        candidates = []
        for table, box in zip(self.tables, self.boxes, strict=True):
            seeds = tuple(table.get("seed", (self.base.get("seed", 0),)))
            if twice := sorted({*seeds} & {*self.seeds}):
                raise ValueError(f"seed {twice[0]} both chooses ([search]) and tests ([sweep])")
            names = [key for key in table if key != "seed"]
            for values in itertools.product(*(table[key] for key in names)):
                place = dict(zip(names, values, strict=True))
                run = _run(self.base, place)
                place = {key: run.get(key) for key in place if key in run.keys}
                if any(candidate.place == place for candidate in candidates):
                    continue  # what one system does not read is no other combination of it
                read = {
                    key: tuple(map(run.keys[key].convert, of))
                    for key, of in box.items()
                    if key in run.keys and key not in place
                }
                candidates += [Candidate(place, point, seeds) for point in self._points(run, read)]
        unread = {
            key for key in self.keys if not any(key in candidate.point for candidate in candidates)
        }
        if unread:
            name = min(unread)
            names = {*readers(), *static_keys()}
            hint = "" if name in names else checks.did_you_mean(flag(name), map(flag, names))
            raise ValueError(f"no run reads {flag(name)}, which [search] names{hint}")
        return tuple(candidates)

    def _points(self, run: RunConfig, box: Axes) -> list[dict[str, Any]]:
        """Return the points of one combination."""
        if not box:
            return [{}]
        if self.points is None:
            return [
                dict(zip(box, values, strict=True)) for values in itertools.product(*box.values())
            ]
        from scipy.stats import qmc

        scales = {record.name: record.scale for record in run.records.values()}
        bounds = []
        for key, values in box.items():
            if key not in scales:
                raise ValueError(f"{flag(key)} in [search] is no hyperparameter: leave out points")
            is_log = scales[key] == "log"
            if len(values) != 2 or not values[0] < values[1] or (is_log and values[0] <= 0):
                kind = "two positive numbers" if is_log else "two numbers"
                raise ValueError(
                    f"{flag(key)} in [search] must be {kind}, the smallest and the largest, got "
                    f"{list(values)}"
                )
            bounds.append(np.log(values) if is_log else np.array(values))
        # Its first point is a corner of the box.
        sequence = qmc.Halton(len(box), scramble=False).fast_forward(1)
        low, high = np.array(bounds).T
        places = low + (high - low) * sequence.random(self.points)
        return [
            {
                key: float(f"{math.exp(at) if scales[key] == 'log' else at:.3g}")
                for key, at in zip(box, row, strict=True)
            }
            for row in places
        ]

    def tuning(self) -> SweepRuns:
        """Return the runs that choose, evaluated at their end."""
        tables = [candidate.table(self.seeds) for candidate in self.candidates]
        rounds = max(run.rounds for run in self._expand(tables).runs)
        return self._expand(tables, eval_every=rounds)

    def chosen(self, best: Sequence[Values], metric: str) -> SweepRuns:
        """Return the runs of the best candidates, whose values by column are in `best`."""
        columns = {name for candidate in self.candidates for name in candidate.columns}
        chosen_values = [
            {k: v for k, v in row.items() if k in columns and v is not None} for row in best
        ]
        chosen = [candidate for candidate in self.candidates if candidate.columns in chosen_values]
        if not chosen:
            raise ValueError("no point of the search has finite values with all of its seeds")
        counts = {
            sum(candidate.place == other.place for other in self.candidates) for candidate in chosen
        }
        points = " to ".join(map(str, sorted({min(counts), max(counts)})))
        verb = "was" if len(self.keys) == 1 else "were"
        choice = (
            f"{_listed([*map(flag, self.keys)])} {verb} chosen for each combination among {points} "
            f"points, by the mean {metric} over seeds {', '.join(map(str, self.seeds))}."
        )
        plan = self._expand([candidate.table(candidate.seeds) for candidate in chosen])
        return dataclasses.replace(plan, choice=choice)

    def _expand(self, tables: Sequence[Axes], **changes: Any) -> SweepRuns:
        options = dataclasses.replace(self.options, best_over=self.keys)
        return expand_sweep({**self.base, **changes}, tables, options)


# --- files ----------------------------------------------------------------------------------------


def read_sweep(path: Path | None, changes: Values = NOTHING, seeds: int | None = None) -> SweepRuns:
    """Read the file of a sweep without a search, as `read_plan`; its seed may be secret."""
    plan = read_plan(path, changes, seeds, secret=True)
    if isinstance(plan, Search):
        raise ValueError(f"{path} has a table [search], which `fedjaxsim sweep` alone runs")
    return plan


def read_plan(
    path: Path | None, changes: Values = NOTHING, seeds: int | None = None, *, secret: bool = False
) -> SweepRuns | Search:
    """Read the file of a sweep, or of one that searches first; also one that a sweep wrote.

    Args:
      path: the file; None for a sweep of `changes` alone.
      changes: settings that win over the file's; a list is an axis. Settings of the file's data are
        left out if there are other data.
      seeds: number of seeds, from the seed on; they are an axis.
      secret: whether the seed of all runs may be drawn.
    """
    if isinstance(changes.get("metric"), list):
        raise ValueError("metric is one for all runs of a sweep, got a list")
    check_flags(changes, REFUSED)
    file = SweepFile() if path is None else read_file(path)
    if seeds is not None:
        checks.count(1, MOST_RUNS, seeds=seeds)
        first = changes.get("seed", file.base.get("seed", 0))
        if first == SECRET or isinstance(first, SecretSeed):
            raise ValueError("seeds and seed secret exclude each other")
        if not isinstance(first, int):
            raise ValueError(f"seeds need one seed to begin at, a whole number, got {first!r}")
        changes = {**changes, "seed": list(range(first, first + seeds))}
    with in_file(path):
        file = file.changed(changes)
        if not any(file.tables):
            example = "as in --lam 0.1,1 or --seeds 3"
            raise ValueError(f"a sweep needs an axis, a flag with a list or seeds, {example}")
        if isinstance(file.base.get("seed"), SecretSeed) and not secret:
            raise ValueError(_SECRET)
        if secret and file.base.get("seed") == SECRET:
            drawn = SeedSetting("seed", int).convert(SECRET)
            file = file._replace(base={**file.base, "seed": drawn})
        if file.search is not None:
            return _search(file)
        if any(file.boxes):
            raise ValueError("a search needs a table [search] with its seeds")
        return expand_sweep(file.base, file.tables, file.options)


def _search(file: SweepFile) -> Search:
    """Return the search of a file from its table [search] and those inside each [[sweep]]."""
    common, boxes = file.search, file.boxes
    if not isinstance(common, dict) or not all(isinstance(box, dict) for box in boxes):
        raise ValueError("search must be a table [search], and in a [[sweep]] table {…}")
    common, seeds = dict(common), common.get("seeds")
    common.pop("seeds", None)  # as a setting of a file it is refused
    common_entries = dict(settings_in(common, REFUSED, "[search]: "))
    points = common_entries.pop("points", None)
    if points is not None:
        points = Setting("points", int, least=1).convert(points, "points in [search]")
    if not isinstance(seeds, list) or not seeds:
        raise ValueError("[search] needs seeds, a list of those that choose, as in seeds = [1000]")
    lists({"seeds": seeds}, "[search]")
    every = [common_entries | dict(settings_in(box, REFUSED, "[search]: ")) for box in boxes]
    searched = tuple(lists(box, "[search]") for box in every)
    return Search(file.base, file.options, tuple(file.tables), searched, points, tuple(seeds))
