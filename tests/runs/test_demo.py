import json
import math
import re
import statistics
from pathlib import Path

import pytest

from fedjaxsim.cli import main
from fedjaxsim.runs import demo
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.settings import run_config

ROOT = Path(__file__).parents[2]


def test_all_runs_share_what_makes_them_comparable():
    runs = demo.configurations(seed=3)
    assert sorted(runs) == [
        "ditto-eps-1.6", "ditto-eps-inf", "fedavg-eps-1.6", "fedavg-eps-inf",
        "local", "pmtl-eps-1.6", "pmtl-eps-inf",
    ]  # fmt: skip
    own = {"algorithm": "pmtl", "message": "offset", "epsilon": None}
    tuned = {"learning_rate": 1.0, "lam": 0.0, "clip": 1.0}
    common = {config.replace(**own, **tuned) for config in runs.values()}
    assert len(common) == 1
    assert common.pop().seed == 3
    assert {config.get("epsilon") for config in runs.values()} == {None, 1.6, math.inf}


def test_settings_are_those_that_the_comparison_chose():
    found = json.loads((ROOT / "experiments/results/compare-digits.json").read_text())
    at = [level["epsilon"] or math.inf for level in found["levels"]]
    for config in demo.configurations(seed=0).values():
        name = "pmtl-offset" if config.algorithm == "pmtl" else config.algorithm
        chosen = found["methods"][name]
        point = chosen[0 if name == "local" else at.index(config.target_epsilon)]["point"]
        assert config.learning_rate == point["learning_rate"]
        assert "lam" not in point or config.get("lam") == point["lam"]
        assert config.target_epsilon != demo.TARGET or config.get("clip") == point["clip_norm"]


@pytest.fixture
def small(monkeypatch):
    base = demo._BASE | {"clients": 8, "rounds": 2, "eval_every": 2, "local_steps": 1}
    del base["local_epochs"]
    monkeypatch.setattr(
        demo,
        "configurations",
        lambda seed: {"local": run_config(**base, seed=seed, algorithm="local")},
    )


def test_the_demo_leaves_runs_a_table_and_curves(small, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--seed", "3", "--seeds", "2"]) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["run"] for row in table] == ["local-3", "local-4"]
    assert [row["epsilon"] for row in table] == [0.0, 0.0]
    for row in table:
        assert row == {"run": row["run"], **RunDirectory(tmp_path / row["run"]).summary()}
    assert (tmp_path / "curves.png").stat().st_size < 150_000
    printed = capsys.readouterr().out
    both = [row["test_accuracy"] for row in table]
    mean, error = statistics.mean(both), statistics.stdev(both) / math.sqrt(2)
    assert re.search(rf"^local +2 +{mean:.3f} ± {error:.3f} ", printed, re.MULTILINE)
    assert "Local releases nothing" in printed
    assert "local privacy: ε = 0 zero-out, ε = 0 replace, δ = 0.0125 (joint DP, exact)" in printed
    assert main(["demo", "--out", str(tmp_path), "--seed", "4"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["demo", "--out", str(tmp_path), "--seeds", "0"]) == 2
    assert "seeds must be at least 1" in capsys.readouterr().err
