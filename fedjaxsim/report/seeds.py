"""Runs that differ in their seed alone, as one system: means, intervals, paired differences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim.metrics import judged_by
from fedjaxsim.report.files import Record

LEVEL = 0.95
"""Of intervals, for the mean over seeds by Student's t."""
_NOT_SETTINGS = ("seed", "resolved", "versions", "stages")


class Run(NamedTuple):
    """A finished run, as its directory holds it; its clients only for who asks about them."""

    config: Record
    summary: Record
    records: list[Record]
    clients: Sequence[Mapping[str, str]] = ()

    def of_clients(self, column: str) -> np.ndarray:
        """What is known of the clients in a column of their table."""
        return np.array([float(row[column]) for row in self.clients if row.get(column)])


class System(NamedTuple):
    """The runs of one setting.

    Attributes:
      label: algorithm with the settings in which it differs from others of that algorithm, or the
        name of the only run.
      algorithm: name of the algorithm.
      runs: runs by seed.
      names: names of runs by seed.
    """

    label: str
    algorithm: str
    runs: dict[int, Run]
    names: dict[int, str]

    def values(self, metric: str, seeds: Sequence[int]) -> np.ndarray:
        """The last value of a metric for some seeds; NaN where there is none."""
        found = [self.runs[seed].summary.get(metric) for seed in seeds]
        return np.array([math.nan if value is None else value for value in found])


class Estimate(NamedTuple):
    """A mean over n seeds and half the width of its interval; NaN for a single seed."""

    mean: float
    half: float


def settings_of(config: Record) -> Record:
    """Return the settings of a run without its seed and what follows from them."""
    return {key: value for key, value in config.items() if key not in _NOT_SETTINGS}


def systems(runs: Mapping[str, Run]) -> list[System]:
    """Runs by setting, in the order in which they are given.

    Args:
      runs: by name. Of two with one setting and one seed the second is a system of its own.
    """
    groups: list[tuple[Record, dict[int, str]]] = []
    for name, run in runs.items():
        settings = settings_of(run.config)
        seed = run.config.get("seed", 0)
        alike = [seeds for known, seeds in groups if known == settings and seed not in seeds]
        if alike:
            alike[0][seed] = name
        else:
            groups.append((settings, {seed: name}))
    found = []
    for settings, seeds in groups:
        algorithm = settings.get("algorithm", "")
        alike = [each for each, _ in groups if each.get("algorithm", "") == algorithm]
        parts = [
            f"{key} {value}" for key, value in settings.items()
            if any(each.get(key) != value for each in alike)
        ]  # fmt: skip
        label = ", ".join([algorithm, *parts]) if len(seeds) > 1 else next(iter(seeds.values()))
        of_seeds = {seed: runs[name] for seed, name in seeds.items()}
        found.append(System(label, algorithm, of_seeds, seeds))
    return found


def estimate(values: np.ndarray) -> Estimate:
    """The mean of values, one for each seed, with its interval."""
    from scipy import stats

    count = len(values)
    if count < 2:
        return Estimate(float(np.mean(values)), math.nan)
    error = standard_error(values)
    return Estimate(float(np.mean(values)), float(stats.t.ppf((1 + LEVEL) / 2, count - 1) * error))


def standard_error(values: np.ndarray) -> float:
    """The sample standard deviation over √S; 0 for S = 1, where the value is free of chance."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def compared(found: Sequence[System]) -> list[Record]:
    """Each system over its seeds, and its difference from the first on the seeds that both have.

    Seeds are paired because runs of one seed share partition, test rows and initial model. The test
    of a difference of 0 is Student's, paired (scipy); p values are corrected for their number by
    Holm's method (1979).

    Returns:
      For each system `system`, `metric`, `seeds`, `mean`, `half` (of the interval), and beside the
      first one `difference`, `difference_half`, `paired_seeds` and `p`; None where unknown.
    """
    from scipy import stats

    first, rows = found[0], []
    metric = judged_by(next(iter(first.runs.values())).summary) or "test_loss"
    for system in found:
        mean, half = estimate(system.values(metric, sorted(system.runs)))
        row = {"system": system.label, "metric": metric, "seeds": len(system.runs)}
        row |= {"mean": mean, "half": half, "difference": None, "difference_half": None}
        shared = sorted(set(system.runs) & set(first.runs))
        row |= {"paired_seeds": len(shared), "p": None}
        if system is not first and len(shared) > 1:
            ours, theirs = (each.values(metric, shared) for each in (system, first))
            row["difference"], row["difference_half"] = estimate(ours - theirs)
            if np.ptp(ours - theirs) > 0:
                row["p"] = float(stats.ttest_rel(ours, theirs).pvalue)
        rows.append(row)
    tested = sorted((row for row in rows if row["p"] is not None), key=lambda row: row["p"])
    least = 0.0
    for place, row in enumerate(tested):
        least = max(least, min(1.0, (len(tested) - place) * row["p"]))
        row["p"] = least
    return rows


def mean_records(system: System, metric: str) -> list[Record]:
    """The evaluations that all seeds have, as means: `round`, the metric with its interval, and ε.

    The interval is from `METRIC_low` to `METRIC_high`, where there are several seeds; ε is the
    largest, None where one is.
    """
    by_round = [{record["round"]: record for record in run.records} for run in system.runs.values()]
    means = []
    for round_ in sorted(set.intersection(*map(set, by_round))):
        records = [each[round_] for each in by_round]
        values = [record.get(metric) for record in records]
        spent = [record["epsilon"] for record in records if record.get("epsilon") is not None]
        mean: Record = {"round": round_, metric: None}
        mean["epsilon"] = max(spent) if len(spent) == len(records) else None
        if None not in values:
            middle, half = estimate(np.array(values))
            mean[metric] = middle
            if not math.isnan(half):
                mean |= {f"{metric}_low": middle - half, f"{metric}_high": middle + half}
        means.append(mean)
    return means


def cells(row: Record, number: Any) -> list[str]:
    """A row of `compared` as texts."""

    def interval(mean: float | None, half: float | None) -> str:
        if mean is None:
            return "–"
        return f"{mean:.3f}" if half is None or math.isnan(half) else f"{mean:.3f} ± {half:.3f}"

    return [
        row["system"], str(row["seeds"]), interval(row["mean"], row["half"]),
        interval(row["difference"], row["difference_half"]), number(row["p"]),
    ]  # fmt: skip
