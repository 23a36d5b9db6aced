"""Runs that differ in their seed alone, as one system: means, intervals, paired differences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim.metrics import judged_by
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import data_label
from fedjaxsim.report.progress import decimals, number

LEVEL = 0.95
"""Level of Student's t intervals for the mean over seeds."""
_NOT_SETTINGS = ("seed", "resolved", "versions", "stages", "public")


class FinishedRun(NamedTuple):
    """A finished run, read from its directory; `report` is its privacy report."""

    config: Record
    summary: Record
    records: list[Record]
    clients: Sequence[Mapping[str, str]] = ()
    report: Any = None

    def of_clients(self, column: str) -> np.ndarray:
        """Return the known values of a column of the table of clients."""
        return np.array([float(row[column]) for row in self.clients if row.get(column)])


class SeedGroup(NamedTuple):
    """The runs of one setting, by seed.

    `label` is the name of the only run, or the algorithm with `differs`, its settings that others
    of the algorithm do not share.
    """

    label: str
    algorithm: str
    runs: dict[int, FinishedRun]
    differs: Record

    @property
    def data(self) -> str:
        """Name of the data set and number of its clients."""
        config = next(iter(self.runs.values())).config
        return data_label(config.get("data", ""), config.get("resolved", {}).get("clients"))

    def values(self, metric: str, seeds: Sequence[int]) -> np.ndarray:
        """Return the last value of a metric for some seeds; NaN where there is none."""
        found = [self.runs[seed].summary.get(metric) for seed in seeds]
        return np.array([math.nan if value is None else value for value in found])


def without_seed(config: Record) -> Record:
    """Return the settings of a run without its seed and derived entries."""
    return {key: value for key, value in config.items() if key not in _NOT_SETTINGS}


def systems(runs: Mapping[str, FinishedRun]) -> list[SeedGroup]:
    """Group runs by setting, in order; a second run of one setting and seed is its own system."""
    groups: list[tuple[Record, dict[int, str]]] = []
    for name, run in runs.items():
        settings, seed = without_seed(run.config), run.config.get("seed", 0)
        alike = (seeds for known, seeds in groups if known == settings and seed not in seeds)
        names = next(alike, None)
        if names is None:
            groups.append((settings, names := {}))
        names[seed] = name
    found = []
    for settings, names in groups:
        algorithm = settings.get("algorithm", "")
        alike = [each for each, _ in groups if each.get("algorithm", "") == algorithm]
        differs = {
            key: value for key, value in settings.items()
            if any(each.get(key) != value for each in alike)
        }  # fmt: skip
        parts = [algorithm, *(f"{key} {value}" for key, value in differs.items())]
        label = ", ".join(parts) if len(names) > 1 else next(iter(names.values()))
        of_seeds = {seed: runs[name] for seed, name in names.items()}
        found.append(SeedGroup(label, algorithm, of_seeds, differs))
    return found


def estimate(values: np.ndarray) -> tuple[float, float]:
    """Return the mean of values (S,), one per seed, and half its interval; NaN for one seed."""
    from scipy import stats

    half = math.nan
    if len(values) > 1:
        half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * standard_error(values))
    return float(np.mean(values)), half


def standard_error(values: np.ndarray) -> float:
    """Return the sample standard deviation over √S; 0 for S = 1."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def compared(found: Sequence[SeedGroup]) -> list[Record]:
    """Compare each system with the first, on the seeds that both have on one data set.

    Runs of one seed share partition, test rows and initial model, so Student's t test is paired;
    Holm's method (1979) corrects its p values. `half` is half of an interval; None is unknown.
    """
    from scipy import stats

    first, rows = found[0], []
    metric = judged_by(next(iter(first.runs.values())).summary) or "test_loss"
    for system in found:
        mean, half = estimate(system.values(metric, sorted(system.runs)))
        shared = sorted(set(system.runs) & set(first.runs)) if system.data == first.data else []
        difference = difference_half = p = None
        if system is not first and len(shared) > 1:
            values, others = (each.values(metric, shared) for each in (system, first))
            difference, difference_half = estimate(values - others)
            if np.ptp(values - others) > 0:
                p = float(stats.ttest_rel(values, others).pvalue)
        rows.append({
            "system": system.label, "metric": metric, "seeds": len(system.runs),
            "mean": mean, "half": half, "difference": difference,
            "difference_half": difference_half, "paired_seeds": len(shared), "p": p,
        })  # fmt: skip
    tested = sorted((row for row in rows if row["p"] is not None), key=lambda row: row["p"])
    least = 0.0
    for place, row in enumerate(tested):
        least = row["p"] = max(least, min(1.0, (len(tested) - place) * row["p"]))
    return rows


def mean_records(system: SeedGroup, metrics: Sequence[str]) -> list[Record]:
    """Return the means of evaluations that all seeds have: `round`, `metrics` and `epsilon`.

    `METRIC_low` and `METRIC_high` bound the interval of several seeds. `epsilon` is the largest;
    None where one is.
    """
    by_round = [{record["round"]: record for record in run.records} for run in system.runs.values()]
    means = []
    for round_ in sorted(set.intersection(*map(set, by_round))):
        records = [each[round_] for each in by_round]
        spent: list[Any] = [record.get("epsilon") for record in records]
        mean: Record = {"round": round_, "epsilon": None if None in spent else max(spent)}
        for metric in metrics:
            values = [record.get(metric) for record in records]
            if metric in mean or None in values:
                continue
            mean[metric], half = estimate(np.array(values))
            if not math.isnan(half):
                low, high = mean[metric] - half, mean[metric] + half
                mean |= {f"{metric}_low": low, f"{metric}_high": high}
        means.append(mean)
    return means


def interval(mean: float | None, half: float | None) -> str:
    """Format a mean and half of its interval, if it has one."""
    if mean is None or math.isnan(mean):
        return "–"
    return decimals(mean) + ("" if half is None or math.isnan(half) else f" ± {decimals(half)}")


def cells(row: Record) -> list[str]:
    """Format a row of `compared`."""
    return [
        row["system"], str(row["seeds"]), interval(row["mean"], row["half"]),
        interval(row["difference"], row["difference_half"]), number(row["p"]),
    ]  # fmt: skip
