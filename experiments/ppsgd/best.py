"""Accuracy at the best step size and clip norm, by noise and personalization, from sweeps.

    fedjaxsim sweep experiments/ppsgd/figure-1c-digits.toml --seeds 3 --out runs/ppsgd-1c
    python experiments/ppsgd/best.py digits=runs/ppsgd-1c FEMNIST=runs/ppsgd-1c-femnist

writes results/ppsgd-2.csv, from which experiments/pictures.py draws PP-SGD's Figure 2. The best
has the largest mean over seeds on test rows, as in the paper; two levels are compared by seed.
"""

import csv
import itertools
import math
import sys
from pathlib import Path
from typing import NamedTuple

from fedjaxsim.report.results import difference, estimate
from fedjaxsim.runs.sweep_results import read_runs

RESULTS = Path(__file__).parents[1] / "results" / "ppsgd-2.csv"
NUMBERS = ("noise_multiplier", "epsilon", "personalization", "value")


class Point(NamedTuple):
    """The best results at one noise and level of personalization, by seed."""

    data: str
    noise_multiplier: float
    epsilon: float
    personalization: float
    values: tuple[float, ...]


def best(data: str, folder: Path) -> list[Point]:
    """Return a point for each noise and level of personalization of a sweep."""
    scores: dict[tuple[float, float], dict[tuple[float, float], dict[int, float]]] = {}
    epsilons: dict[float, float] = {}
    for run in read_runs(folder)[0]:
        point = run.settings
        z, level = point["noise_multiplier"], point["personalization"]
        by_setting = scores.setdefault((z, level), {})
        accuracy, epsilon = run.value("test_accuracy"), run.value("epsilon")
        assert accuracy is not None
        assert epsilon is not None  # NaN without noise
        by_setting.setdefault((point["learning_rate"], point["clip"]), {})[run.seed] = accuracy
        epsilons[z] = epsilon if z else math.inf
    return [
        Point(
            data, z, epsilons[z], level,
            max((tuple(value for _, value in sorted(by_seed.items())) for by_seed in runs.values()),
                key=lambda values: sum(values)),
        )
        for (z, level), runs in sorted(scores.items())
    ]  # fmt: skip


def read(file: Path = RESULTS) -> list[Point]:
    """Read the points that `main` wrote."""
    with file.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    points: dict[tuple[str, float, float, float], list[float]] = {}
    for row in rows:
        z, epsilon, level, value = (float(row[name]) for name in NUMBERS)
        points.setdefault((row["data"], z, epsilon, level), []).append(value)
    return [Point(*setting, tuple(values)) for setting, values in points.items()]


def main(sources: list[str]) -> None:
    """Write the points of all sweeps, and print each level beside the best one at its noise."""
    points = [
        point
        for data, _, folder in (source.partition("=") for source in sources)
        for point in best(data, Path(folder))
    ]
    with RESULTS.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(["data", *NUMBERS[:3], "seed", NUMBERS[3]])
        for *setting, values in points:
            for seed, value in enumerate(values):
                rows.writerow([*(f"{each:.6g}" if isinstance(each, float) else each
                                 for each in setting), seed, round(value, 5)])  # fmt: skip
    for (data, epsilon), group in itertools.groupby(points, key=lambda p: (p.data, p.epsilon)):
        levels = list(group)
        winner = max(levels, key=lambda point: sum(point.values))
        print(f"{data}, ε = {epsilon:.3g}: best is level {winner.personalization:g}")
        for point in levels:
            behind = difference(winner.values, point.values)[0]
            print(f"  {point.personalization:g}: {estimate(point.values)}, behind by {behind}")


if __name__ == "__main__":
    main(sys.argv[1:])
