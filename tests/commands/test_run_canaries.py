"""`fedjaxsim run --audit-canaries`: the line beside ε, resumed runs, and what is refused."""

import json
import re

import pytest

from fedjaxsim.cli import main

RUN = (
    "run --algorithm fedavg --clients 8 --rounds 2 --eval-every 2 --sampling-rate 0.5 "
    "--epsilon 2 --clip 0.5 --audit-canaries 50 --quiet"
)

pytestmark = pytest.mark.usefixtures("exact_noise")


@pytest.mark.thorough
def test_a_run_reports_its_audit(tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*RUN.split(), "--out", str(out)]) == 0
    assert "audit: ε ≥ 0" in capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert 0 <= summary["audit_epsilon"] <= summary["epsilon"]
    assert summary["audit_refuted"] is False
    [guarantee] = json.loads((out / "guarantee.json").read_text())["zero_out"]["joint_dp"].values()
    assert any("50 canaries" in sentence for sentence in guarantee["assumptions"])


@pytest.mark.thorough
def test_a_resumed_run_goes_on_with_its_audit(tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*RUN.split(), "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["resume", str(out), "--rounds", "4", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert "50 canaries" in printed.out
    before, after = re.findall(r"(will spend|together spend) ε ([\d.]+), more", printed.err)
    assert (before[0], after[0]) == ("will spend", "together spend")
    assert before[1] == after[1]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--sampling fixed --cohort 3", "audit-canaries"),
    ],
)
def test_runs_without_such_an_audit_are_refused(refused, more, named):
    kept = RUN if "fixed" not in more else RUN.replace("--sampling-rate 0.5 ", "")
    assert named in refused(f"{kept} {more}")
