"""The demo is a sweep whose settings the comparison of systems chose."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from fedjaxsim.cli import main, sweep
from fedjaxsim.report import plots
from fedjaxsim.report.results import Run, estimate
from fedjaxsim.runs.sweep_results import default_figures, read_runs
from fedjaxsim.runs.sweep_runs import SweepRuns, read_plan

pytestmark = pytest.mark.usefixtures("drawn")
ROOT = Path(__file__).parents[2]


def test_all_runs_share_what_makes_them_comparable():
    plan = read_plan(sweep.DEMO, {"seed": [3]})
    assert isinstance(plan, SweepRuns)
    assert len(plan.runs) == 7
    own = {"algorithm": "pmtl", "message": "offset", "epsilon": None}
    tuned = {"learning_rate": 1.0, "lam": 0.0, "clip": 1.0}
    common = {config.replace(**own, **tuned) for config in plan.runs}
    assert len(common) == 1
    assert common.pop().seed == 3


def test_settings_are_those_that_the_comparison_chose():
    found = json.loads((ROOT / "experiments/results/compare-digits.json").read_text())
    at = [level["epsilon"] or math.inf for level in found["levels"]]
    plan = read_plan(sweep.DEMO, {"seed": [0]})
    assert isinstance(plan, SweepRuns)
    for config in plan.runs:
        name = "pmtl-offset" if config.algorithm == "pmtl" else config.algorithm
        chosen = found["methods"][name]
        point = chosen[0 if name == "local" else at.index(config.target_epsilon)]["point"]
        assert config.learning_rate == point["learning_rate"]
        assert "lam" not in point or config.get("lam") == point["lam"]
        assert math.isinf(config.target_epsilon) or config.get("clip") == point["clip_norm"]


def test_the_picture_in_the_documents_is_one_of_today():
    """Its size, resolution and colours are those of a picture that would be drawn now."""
    plan = read_plan(sweep.DEMO, {"seed": [0]})
    assert isinstance(plan, SweepRuns)
    runs = []
    for index, config in enumerate(plan.runs):
        settings = {name: value for name, value in plan.swept[index].items() if name != "seed"}
        spent = 0.0 if config.algorithm == "local" else config.target_epsilon
        rows = [
            {"round": t, "train_loss": 1.0, "test_accuracy": 0.5, "epsilon_replace": None,
             "epsilon": spent if math.isfinite(spent) else None, "delta": 0.1, "failed": False}
            for t in (0, config.rounds)
        ]  # fmt: skip
        runs.append(Run(str(index), settings, 0, rows))
    figure = default_figures(plan, runs, "test_accuracy")["envelopes.png"]
    with Image.open(ROOT / "docs/demo.png") as picture:
        assert picture.size == tuple(np.round(figure.get_size_inches() * plots.DPI))
        assert round(picture.info["dpi"][0]) == plots.DPI
        drawn = {*map(tuple, np.asarray(picture.convert("RGB")).reshape(-1, 3).tolist())}
    used = {each.get_color() for axes in figure.axes for each in axes.get_lines()}
    assert len(used) == 4
    assert {ImageColor.getrgb(str(colour)) for colour in used} <= drawn


@pytest.fixture
def small(monkeypatch, tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(
        'data = "digits"\nclients = 8\nrounds = 2\neval-every = 2\nlocal-steps = 1\n'
        'algorithm = "local"\n[sweep]\nlearning-rate = 0.5\nseed = [0, 1, 2]\n'
    )
    monkeypatch.setattr(sweep, "DEMO", file)


@pytest.mark.usefixtures("small")
def test_the_demo_leaves_a_table_and_curves(tmp_path, capsys):
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), "--seed", "3", "--seeds", "2"]) == 0
    runs, columns, report = read_runs(out)
    assert ([run.seed for run in runs], columns) == ([3, 4], ["learning_rate", "seed"])
    assert report["summary"]["finished"] == 2
    mean, half, *_ = estimate([run.value("test_accuracy") for run in runs])
    shown = re.search(r"(0\.\d{3,}) ± (0\.\d{3,})", capsys.readouterr().out)
    assert shown is not None
    assert [*map(float, shown.groups())] == pytest.approx([mean, half], abs=5e-4)
    assert [run.rows[-1]["epsilon"] for run in runs] == [0.0, 0.0]
    assert np.isfinite([run.rows[-1]["test_accuracy"] for run in runs]).all()
    assert (out / "envelopes.png").stat().st_size < 150_000
    assert main(["demo", "--out", str(out), "--seed", "4"]) == 2
    assert (
        "already holds a sweep with other settings (seed 3,4 there and 4,5,6 here)"
        in capsys.readouterr().err
    )
    assert main(["demo", "--out", str(out), "--seeds", "0"]) == 2
    assert "seeds must be at least 1" in capsys.readouterr().err
