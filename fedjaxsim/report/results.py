"""The table of results, and the one statistic on it.

A table is a list of runs. Each has its settings, its seed and a row per evaluation: `round`, a
column `SPLIT_METRIC` per metric, `epsilon` and `epsilon_replace` so far (joint DP; None without a
guarantee) at `delta`, and `failed`. The last row of a run that protects examples has their
guarantee: `example_epsilon` and `example_epsilon_replace` at `example_delta`. Folders of runs and
of sweeps hold the rows, and a table is derived from them.

Means over seeds have 95 % intervals of Student's t. Methods are compared on the seeds that both
have, by a paired t test that Holm's method (1979) corrects. A run whose value is not finite has
failed: it is counted, its setting has no mean, and a setting without a mean is never the best.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fedjaxsim import checks
from fedjaxsim.clock import RoundWork
from fedjaxsim.divergence import Record, is_finite
from fedjaxsim.metrics import (
    METRICS,
    MetricRecords,
    merge_metrics,
    metric_name,
    primary_metric,
    require_direction,
    table_metrics,
)
from fedjaxsim.privacy.entries import epsilon_text, round_up
from fedjaxsim.report.labels import (
    Combination,
    algorithm_title,
    data_label,
    setting_label,
    short_name,
)
from fedjaxsim.report.progress import decimals, number
from fedjaxsim.report.tables import TextTable

SPENT = {"epsilon": "ε\nzero-out", "epsilon_replace": "ε\nreplace", "delta": "δ"}
"""The columns of ε and δ, with their headings in tables."""
SPENT_OF_EXAMPLES = {
    "example_epsilon": "example ε\nzero-out", "example_epsilon_replace": "example ε\nreplace",
    "example_delta": "example\nδ",
}  # fmt: skip
"""The columns of ε and δ of single examples, of runs that protect them."""
_SHORT = 16
"""Characters of a system's name that a heading shows."""
TIGHT = "epsilon_tight"
"""The column that says whether ε is the accountant's value, not the larger bound by RDP."""
_NO_EXAMPLES = (
    "– among example ε: no single example is protected from those who see its client's messages "
    "or its model."
)


# --- runs -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A run in the table, by the name of its folder or its number in a sweep.

    `settings` are without the seed, `rows` its evaluations in the order of rounds, `metrics` the
    records of its metrics. `config` and `summary` are files of its folder, where it has one.
    """

    name: str
    settings: Record
    seed: int
    rows: Sequence[Record]
    config: Record = dataclasses.field(default_factory=dict)
    summary: Record = dataclasses.field(default_factory=dict)
    metrics: MetricRecords = dataclasses.field(default_factory=lambda: METRICS)

    def setting(self, name: str) -> Any:
        """Return a setting, None if the run has none of this name."""
        return self.settings.get(name)

    @functools.cached_property
    def by_round(self) -> dict[int, Record]:
        """The rows, by round."""
        return {row["round"]: row for row in self.rows}

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        """The columns with a finite number in some row."""
        return frozenset(name for row in self.rows for name in row if is_finite(row[name]))

    def value(self, column: str, at: int | None = None) -> float | None:
        """Return the value at a round, by default the last; NaN if it failed, None without one."""
        row = self.rows[-1] if at is None else self.by_round[at]
        if column not in self._known:
            return None
        value = row.get(column)
        return math.nan if row.get("failed") or not is_finite(value) else value


# --- systems: runs that differ in their seed alone ------------------------------------------------


class System(NamedTuple):
    """The runs of one setting, by seed.

    `label` is the name of the only run, or the algorithm with `differs`, its settings that others
    of the algorithm do not share.
    """

    label: str
    algorithm: str
    runs: dict[int, Run]
    differs: Record

    @property
    def first(self) -> Run:
        """The run of the first seed."""
        return next(iter(self.runs.values()))

    @property
    def title(self) -> str:
        """The label, with the algorithm's name as in figures if the label names it."""
        start, *differs = self.label.split(", ", 1)
        names_algorithm = len(self.runs) > 1 and start == self.algorithm
        return ", ".join([algorithm_title(start) if names_algorithm else start, *differs])

    @property
    def epsilon(self) -> float | None:
        """The largest ε spent over the seeds; None without a guarantee."""
        return largest_spent([*self.runs.values()])["epsilon"]

    @property
    def data(self) -> str:
        """Name of the data set and number of its clients."""
        config = self.first.config
        return data_label(config.get("data", ""), config.get("resolved", {}).get("clients"))

    @property
    def bytes_sent(self) -> float:
        """Expected bytes that clients send in a round; ValueError of an older run."""
        return self._resolved("bytes_sent", "how many bytes {} sent")

    @property
    def work(self) -> RoundWork:
        """Work of a round; ValueError of an older run."""
        return RoundWork(**self._resolved("work", "how much {} computes"))

    def _resolved(self, name: str, what: str) -> Any:
        if (value := self.first.config.get("resolved", {}).get(name)) is None:
            raise ValueError(f"{what.format(self.label)} is not in its files: run it again")
        return value

    def values(self, column: str, seeds: Sequence[int]) -> list[float | None]:
        """Return the last values of some seeds, as `Run.value`."""
        return [self.runs[seed].value(column) for seed in seeds]


def systems(runs: Sequence[Run]) -> list[System]:
    """Group runs by setting, in order; a second run of one setting and seed is its own system."""
    groups: list[dict[int, Run]] = []
    for run in runs:
        for group in groups:
            if next(iter(group.values())).settings == run.settings and run.seed not in group:
                group[run.seed] = run
                break
        else:
            groups.append({run.seed: run})
    firsts = [next(iter(group.values())) for group in groups]
    algorithms = dict.fromkeys(run.settings.get("algorithm", "") for run in firsts)
    short_names = [short_name(algorithm) for algorithm in algorithms]
    named_systems = []
    for first, group in zip(firsts, groups, strict=True):
        algorithm = first.settings.get("algorithm", "")
        alike = [run for run in firsts if run.settings.get("algorithm", "") == algorithm]
        differs = {
            key: value for key, value in first.settings.items()
            if any(peer.settings.get(key) != value for peer in alike)
        }  # fmt: skip
        short = short_name(algorithm)
        parts = [
            short if short_names.count(short) == 1 else algorithm,
            *(setting_label(key, value) for key, value in differs.items()),
        ]
        label = ", ".join(parts) if len(group) > 1 else first.name
        named_systems.append(System(label, algorithm, group, differs))
    return named_systems


# --- the statistic --------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A value over seeds: its mean, half of its 95 % interval, and the sample standard deviation.

    The mean is None if a seed failed or has no value; the others are None then, and for one seed.
    """

    mean: float | None
    half: float | None
    deviation: float | None
    seeds: int
    failed: int = 0

    def __str__(self) -> str:
        if self.mean is None:
            return f"{self.failed} of {self.seeds} failed" if self.failed else "–"
        if self.half is None:
            small = 0 < abs(self.mean) < 0.1
            return number(self.mean) if small else decimals(self.mean)
        # Three decimals, or more for two digits of the interval.
        places = 3
        if 0 < self.half < 0.01:
            places = min(6, 1 - math.floor(math.log10(self.half)))
        return f"{decimals(self.mean, places)} ± {decimals(self.half, places)}"


def estimate_in(row: Record) -> Estimate:
    """Return the estimate whose fields a row of `compared` or `curve` has."""
    return Estimate(*(row[name] for name in Estimate._fields))


def estimate(values: Sequence[float | None]) -> Estimate:
    """Estimate the mean of values, one per seed: NaN if the seed failed, None without a value."""
    count = len(values)
    failed = sum(value is not None and not math.isfinite(value) for value in values)
    numbers = [value for value in values if value is not None]
    if failed or len(numbers) < count or not count:
        return Estimate(None, None, None, count, failed)
    mean = math.fsum(numbers) / count
    if count == 1:
        return Estimate(mean, None, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in numbers) / (count - 1))
    return Estimate(mean, _quantile(count - 1) * deviation / math.sqrt(count), deviation, count)


@functools.cache
def _quantile(freedom: int) -> float:
    """Return the quantile of 95 % intervals."""
    from scipy.special import stdtrit  # `scipy.stats` takes half a second to import

    return float(stdtrit(freedom, 0.975))


def difference(
    ours: Sequence[float | None], theirs: Sequence[float | None]
) -> tuple[Estimate, float | None]:
    """Return a system's value minus another's on the same seeds, a value each, and p.

    There is no mean with fewer than two of them; p is two-sided, of Student's paired t test, and
    None where no differences vary.
    """
    gains = [None if a is None or b is None else a - b for a, b in zip(ours, theirs, strict=True)]
    gain = estimate(gains)
    if gain.mean is None or not gain.deviation:
        # One seed has a value, but no error.
        return gain._replace(mean=None if gain.half is None else gain.mean), None
    from scipy.special import stdtr

    t = gain.mean / (gain.deviation / math.sqrt(gain.seeds))
    return gain, float(2 * stdtr(gain.seeds - 1, -abs(t)))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct p values for their number (Holm 1979); None is no test."""
    corrected, least = [*p_values], 0.0
    tests = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    for rank, (p, place) in enumerate(tests):
        corrected[place] = least = max(least, min(1.0, (len(tests) - rank) * p))
    return corrected


def compared(contenders: Sequence[System], metric: str | None = None) -> list[Record]:
    """Compare each system with the first, on the seeds that both have on one data set.

    Runs of one seed share partition, test rows and initial model, so the test is paired.

    Returns:
      By system: `system` (its label), `metric`, the fields of its `Estimate`, and the
      difference's: `difference`, `difference_half`, `paired_seeds` and `p`, None if unknown; with
      the system's `largest_spent`.
    """
    first, rows = contenders[0], []
    metric = metric or primary_metric(first.first.rows[-1], first.first.metrics) or "test_loss"
    for system in contenders:
        mean_estimate = estimate(system.values(metric, sorted(system.runs)))
        shared = [seed for seed in sorted(system.runs) if _share_data(system, first, seed)]
        tested = [] if system is first else shared
        minus, p = difference(*(side.values(metric, tested) for side in (system, first)))
        rows.append({
            "system": system.label, "metric": metric, **mean_estimate._asdict(),
            "difference": minus.mean, "difference_half": minus.half,
            "paired_seeds": len(shared), "p": p, **largest_spent([*system.runs.values()]),
        })  # fmt: skip
    corrected = holm([row["p"] for row in rows])
    return [row | {"p": p} for row, p in zip(rows, corrected, strict=True)]


def _share_data(system: System, other: System, seed: int) -> bool:
    """Return whether both have a run of a seed on one data set, which may have moved."""
    if seed not in other.runs or system.data != other.data:
        return False
    ours, theirs = (side.runs[seed].config for side in (system, other))
    facts = [of.get("resolved", {}) for of in (ours, theirs)]
    rows, settings = ([of.get(f"{what}_fingerprint") for of in facts]
                      for what in ("data", "data_settings"))  # fmt: skip
    if None not in rows and rows[0] == rows[1]:
        return True
    if None not in (*rows, *settings) and settings[0] == settings[1]:
        return False  # the same reading of files with other content
    return ours.get("data") == theirs.get("data")


def table_of_means(
    rows: Sequence[Record], label: str, title: str = "", spent: Sequence[str] = ("epsilon",)
) -> TextTable:
    """Return a line for each row of `compared`, for the metric `label`, with columns of ε."""
    first = rows[0]["system"] if len(rows[0]["system"]) <= _SHORT else "the first"
    headings = ["system", "seeds", label, "std over\nseeds", f"minus {first}", "p (Holm)"]
    lines = []
    for row in rows:
        minus = Estimate(row["difference"], row["difference_half"], None, row["paired_seeds"])
        lines.append([
            row["system"], str(row["seeds"]), str(estimate_in(row)), decimals(row["deviation"]),
            str(minus), number(row["p"]), *(epsilon_text(row[name]) for name in spent),
        ])  # fmt: skip
    return TextTable(title, [*headings, *(SPENT[name] for name in spent)], lines)


# --- rounds, and the best over settings -----------------------------------------------------------


def curve(runs: Sequence[Run], column: str) -> list[Record]:
    """Return the estimates of a column at each round that all runs have.

    A row has `round`, `metric`, the fields of its `Estimate`, the number of `runs`, and the largest
    ε with its δ, of examples, too, if a run protects them; None is no guarantee.
    """
    points = []
    for round_ in sorted(set.intersection(*(set(run.by_round) for run in runs))):
        mean_estimate = estimate([run.value(column, round_) for run in runs])
        points.append({
            "round": round_, "metric": column, **mean_estimate._asdict(),
            "runs": mean_estimate.seeds, **largest_spent(runs, round_),
        })  # fmt: skip
    return points


def largest_spent(runs: Sequence[Run], at: int | None = None) -> Record:
    """Return the largest ε of runs with its δ at a round, by default the last.

    None is no guarantee. If a run protects examples, the ε of examples is there, too.
    """
    rows = [run.rows[-1] if at is None else run.by_round[at] for run in runs]
    names = SPENT | SPENT_OF_EXAMPLES if protect_examples(runs) else SPENT
    spent: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    return {name: None if None in values else max(values) for name, values in spent.items()}


def protect_examples(runs: Sequence[Run]) -> bool:
    """Return whether some run protects examples."""
    return any(run.rows[-1].get("example_delta") is not None for run in runs)


def metric_columns(runs: Sequence[Run]) -> list[str]:
    """Return the columns of the training loss and of metrics."""
    names = dict.fromkeys(itertools.chain(*(run.rows[-1] for run in runs)))
    return [name for name in names if name.startswith(("train_", "validation_", "test_"))]


def default_metric(runs: Sequence[Run]) -> str:
    """Return the test column by which runs are judged; there must be one."""
    names = metric_columns(runs)
    metric = primary_metric(names, metrics_of(runs))
    if metric is None:
        raise ValueError(f"the results must have a metric on test rows, got {names}")
    return metric


def metrics_of(runs: Sequence[Run]) -> MetricRecords:
    """Return the records of the metrics of all runs; raise ValueError if two contradict."""
    return merge_metrics(run.metrics for run in runs)


def selection_column(runs: Sequence[Run], metric: str) -> str:
    """Return the column to choose by: on validation rows, if all runs have them."""
    column = f"validation_{metric.partition('_')[2]}"
    return column if all(column in run.rows[-1] for run in runs) else metric


def envelope(
    runs: Sequence[Run], keys: Sequence[str], best_over: Sequence[str], metric: str
) -> list[Record]:
    """Compute the best value over `best_over`, for each combination of the other keys and round.

    The best has the best mean over seeds on validation rows (see `selection_column`), and the value
    is that on `metric`'s rows. Without validation rows the choice is optimistic; in no case does a
    run's ε cover it. If `best_over` is empty, all means over seeds are returned.

    Returns:
      Rows of `curve` sorted by the other keys, with these and the first best setting; `runs` and
      `failed` count all settings' runs. Without a best, all but counts is None.
    """
    checks.one_of(metric_columns(runs), metric=metric)
    unknown = [name for name in best_over if name not in keys]
    if unknown:
        raise ValueError(f"best_over takes {', '.join(keys) or 'nothing'}, got {unknown[0]!r}")
    row_keys = [key for key in keys if key not in best_over]
    judge, records = selection_column(runs, metric), metrics_of(runs)
    better = min
    if best_over:
        name = metric_name(metric, records) or metric
        better = max if require_direction(name, records) else min
    best_rows = []
    for place, of_place in grouped(runs, row_keys, Run.setting):
        by_round: dict[int, list[tuple[float | None, Record]]] = {}
        for setting, alike in grouped(of_place, best_over, Run.setting, ordered=False):
            for row in curve(alike, metric):
                scores = estimate([run.value(judge, row["round"]) for run in alike])
                row |= dict(zip(best_over, setting, strict=True))
                score = None if row["mean"] is None else scores.mean
                by_round.setdefault(row["round"], []).append((score, row))
        for _, candidates in sorted(by_round.items()):
            ranked = [(score, row) for score, row in candidates if score is not None]
            _, best = better(ranked, key=lambda scored: scored[0]) if ranked else candidates[0]
            counts = {name: sum(row[name] for _, row in candidates) for name in ("failed", "runs")}
            nothing = {}
            if best_over and not ranked:
                nothing = dict.fromkeys((*best_over, *SPENT, *SPENT_OF_EXAMPLES))
            keyed = dict(zip(row_keys, place, strict=True))
            best_rows.append(keyed | best | counts | nothing | keyed)
    return best_rows


def _order(values: Combination) -> list[Any]:
    """Sort numbers, then words, unset values last."""
    return [(value is None, isinstance(value, str), 0 if value is None else value)
            for value in values]  # fmt: skip


def last(rows: Sequence[Record], keys: Sequence[str]) -> list[Record]:
    """Return the rows of the final round of each combination of an envelope's keys."""
    return [alike[-1] for _, alike in grouped(rows, keys)]


def grouped(
    items: Sequence[Any],
    keys: Sequence[str],
    value: Callable[[Any, str], Any] = operator.getitem,
    *,
    ordered: bool = True,
) -> list[tuple[Combination, list[Any]]]:
    """Group rows, or other items with a `value` of each key, by their values; None comes last."""
    groups: dict[Combination, list[Any]] = {}
    for item in items:
        groups.setdefault(tuple(value(item, key) for key in keys), []).append(item)
    return [(place, groups[place]) for place in (sorted(groups, key=_order) if ordered else groups)]


# --- runs side by side ----------------------------------------------------------------------------


def name_subset(names: Sequence[str], runs: Collection[Any]) -> str:
    """Return the names of some of the runs in brackets; "" for all of them."""
    return "" if len(names) == len(runs) else f" ({', '.join(names)})"


def table_of_runs(
    rows: Sequence[Mapping[str, Any]],
    title: str = "",
    metrics: MetricRecords = METRICS,
    *,
    condensed: bool = False,
    printed: bool = False,
) -> TextTable:
    """Return a line for each summary of a run; its entry `run` is the name.

    If data sets differ, a column names them. If `condensed`, the title says what ε, δ and rounds
    all runs have alike, and columns without a value are left out. A table to be
    `printed` in a paper names the metric above percentiles, too, and keeps a column for ε.
    """
    data = [data_label(row.get("data", ""), row.get("clients")) for row in rows]
    shown = [pair for pair in table_metrics(metrics) if any(pair[0] in row for row in rows)]
    columns = [("run", [row["run"] for row in rows])]
    if len(set(data)) > 1:
        columns.append(("data", data))
    for key, metric in shown:
        for end in metric.in_tables:
            heading = end[1:] or metric.averaging
            if printed or not end:
                heading = f"{metric.title}\n{heading}"
            columns.append((heading, [decimals(row.get(key + end)) for row in rows]))
    costs = [
        *columns_of_epsilon(rows),
        ("rounds", [_rounds(row) for row in rows]),
        ("rounds\nper s", [number(row["rounds_per_second"]) for row in rows]),
    ]
    if condensed and len(rows) > 1:
        shared = {name for name, texts in costs if len({*texts}) == 1}
        shared -= {SPENT["epsilon"]} if printed else set()
        alike = [(name, texts[0]) for name, texts in costs if name in shared]
        costs = [(name, texts) for name, texts in costs if name not in shared]
        words = [f"{' '.join(name.split())} {text}" for name, text in alike if text != "–"]
        title += f"{'; ' * bool(title)}all with {', '.join(words)}" if words else ""
    columns += costs
    headings, texts = zip(*columns, strict=True)
    return TextTable(title, headings, [*zip(*texts, strict=True)], 1 + ("data" in headings))


def columns_of_epsilon(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return headings and texts of ε and δ, of examples, too, if some row has theirs.

    A row without protected examples has "–", which is none of their ε: see `remark_on_examples`.
    """

    def text(row: Mapping[str, Any], name: str) -> str:
        if name in SPENT_OF_EXAMPLES and row.get("example_delta") is None:
            return "–"
        if name == "example_delta":
            return f"{round_up(row[name]):.5g}"
        return number(row[name]) if name == "delta" else epsilon_text(row.get(name))

    of_examples = SPENT_OF_EXAMPLES if any(row.get("example_delta") for row in rows) else {}
    columns = SPENT | {
        name: of_examples[name] for name in of_examples if any(name in row for row in rows)
    }
    return [(heading, [text(row, name) for row in rows]) for name, heading in columns.items()]


def remark_on_examples(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on "–" among ε of examples; "" if all rows, or none, have theirs."""
    protected = [row.get("example_delta") is not None for row in rows]
    return "" if all(protected) or not any(protected) else _NO_EXAMPLES


def remarks_on(rows: Sequence[Mapping[str, Any]], metrics: MetricRecords = METRICS) -> list[str]:
    """Return sentences on clients and examples that summaries leave out."""
    shown = [pair for pair in table_metrics(metrics) if any(pair[0] in row for row in rows)]
    meanings = {
        "test_failed": "clients whose model predicts NaN, which leaves a run without a value"
    }
    meanings |= {f"{key}_undefined": f"clients left out of {of.title}" for key, of in shown}
    remarks = []
    for key, words in meanings.items():
        runs_by_count: dict[str, list[str]] = {}
        for row in rows:
            if row.get(key):
                runs_by_count.setdefault(number(row[key]), []).append(row["run"])
        counts = [f"{value}{name_subset(runs, rows)}" for value, runs in runs_by_count.items()]
        if counts:
            remarks.append(f"{words}: {', '.join(counts)}")
    return [*remarks, *filter(None, [remark_on_examples(rows)])]


def _rounds(row: Mapping[str, Any]) -> str:
    left = any(row.get(why) for why in ("interrupted", "stopped_early", "budget_spent"))
    return f"{row['rounds']} of {row['rounds_planned']}" if left else str(row["rounds"])
