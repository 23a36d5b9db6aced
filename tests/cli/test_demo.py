import dataclasses
import json
import math

import pytest

from fedjaxsim.cli import main
from fedjaxsim.runs import demo
from fedjaxsim.runs.directory import RunDirectory


def test_all_runs_share_what_makes_them_comparable():
    runs = demo.configurations(seed=3)
    assert sorted(runs) == [
        "fedavg-eps-1", "fedavg-eps-inf", "fedprox-eps-1", "fedprox-eps-inf",
        "local", "pmtl-eps-1", "pmtl-eps-inf",
    ]  # fmt: skip
    common = {
        dataclasses.replace(config, algorithm="pmtl", epsilon=None, lam=0.0)
        for config in runs.values()
    }
    assert len(common) == 1
    assert common.pop().seed == 3
    assert {config.epsilon for config in runs.values()} == {None, 1.0, math.inf}


@pytest.fixture
def small(monkeypatch):
    base = dataclasses.replace(demo._BASE, clients=8, rounds=2, eval_every=2, local_epochs=None)
    runs = {
        "local": dataclasses.replace(base, algorithm="local", local_steps=1),
        "fedavg-eps-inf": dataclasses.replace(base, algorithm="fedavg", local_steps=1),
    }
    monkeypatch.setattr(demo, "configurations", lambda seed: runs)


def test_the_demo_leaves_runs_a_table_and_curves(small, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["run"] for row in table] == ["local", "fedavg-eps-inf"]
    assert [row["epsilon"] for row in table] == [0.0, None]
    for row in table:
        assert row == {"run": row["run"], **RunDirectory(tmp_path / row["run"]).summary()}
    assert (tmp_path / "curves.png").stat().st_size < 150_000
    printed = capsys.readouterr().out
    assert "Local releases nothing" in printed
    assert "local privacy: ε = 0 zero-out, ε = 0 replace, δ = 0.0125 (joint DP, exact)" in printed
    assert "fedavg-eps-inf privacy: no guarantee: no noise was added" in printed
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "already holds a run" in capsys.readouterr().err
