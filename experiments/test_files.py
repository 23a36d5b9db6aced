"""The files of experiments are sweeps that resolve, and the figure marks what its numbers say."""

import math
from pathlib import Path

import pytest

from fedjaxsim.report.plots import save
from fedjaxsim.report.results import estimate
from fedjaxsim.runs.sweep_runs import Search, read_plan

FOLDER = Path(__file__).parent
SCRIPTS = FOLDER / "systems"


@pytest.mark.thorough
@pytest.mark.parametrize("file", sorted(FOLDER.glob("*/*.toml")), ids=lambda file: file.stem)
def test_a_file_is_a_sweep(file):
    plan = read_plan(file)
    if not isinstance(plan, Search):
        assert plan.runs
        return
    points = {}
    for each in plan.candidates:
        points.setdefault(str(each.place), []).append(each.point)
    # Every combination has the same number of points.
    assert {len(of) for of in points.values()} == {plan.points}
    assert not {run.seed for run in plan.tuning().runs} & {0, 1, 2, 3, 4}


def test_systems_are_marked_where_they_are_surely_better_than_both(script, tmp_path):
    figure = script("figure")
    file = tmp_path / "few.csv"
    scores = {"Local": [0.5, 0.6, 0.7], "FedAvg": [0.4, 0.5, 0.6], "Ditto": [0.61, 0.7, 0.81],
              "APFL": [0.9, 0.5, 0.9], "Bad": [0.9, "", 0.9]}  # fmt: skip
    lines = ["data,metric,system,epsilon,seed,value"]
    lines += [
        f"few,test_accuracy,{name},{epsilon},{seed},{value}"
        for name, values in scores.items()
        for epsilon in ("1.0", "inf")
        for seed, value in enumerate(values)
    ]
    file.write_text("\n".join(lines))
    found = figure.of_file(file)
    metric, values = found["few"]
    assert figure.is_better(values, "Ditto", math.inf, metric)
    assert not figure.is_better(values, "APFL", 1.0, metric)
    head, _, *rows = figure.table(metric, values).splitlines()
    assert head == "|  | ε = 1 | ε = ∞ |"
    assert rows[2] == f"| Ditto | {estimate([0.61, 0.7, 0.81])}⁺ | {estimate([0.61, 0.7, 0.81])}⁺ |"
    assert rows[4] == "| Bad | 1 of 3 failed | 1 of 3 failed |"
    save(figure.drawn(found), tmp_path / "few.png")


def test_a_picture_cuts_off_what_is_far_worse_and_never_what_is_best(script):
    figure = script("figure")
    means = [0.0, *[0.5] * 8, 0.52, 1.0]
    scores = {(f"{place}", 1.0): {0: mean} for place, mean in enumerate(means)}
    flipped = {key: {0: -values[0]} for key, values in scores.items()}
    drawn = figure.drawn({"a": ("test_accuracy", scores), "b": ("test_nmse", flipped)})
    (low, high), (best, worst) = (panel.get_xlim() for panel in drawn.axes[:2])
    assert 0 < low < 0.5
    assert high > 1
    assert best < -1
    assert -0.5 < worst < 0
