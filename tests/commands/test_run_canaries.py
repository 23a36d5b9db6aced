"""`fedjaxsim run --audit-canaries`: the line beside ε, resumed runs, and what is refused."""

import contextlib
import io
import json
import re
import shutil

import pytest

from fedjaxsim.cli import main

RUN = (
    "run --algorithm fedavg --clients 8 --rounds 2 --eval-every 2 --sampling-rate 0.5 "
    "--epsilon 2 --clip 0.5 --audit-canaries 50 --quiet"
)

pytestmark = pytest.mark.usefixtures("exact_noise")


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """A run with canaries, and its output."""
    out = tmp_path_factory.mktemp("audited") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*RUN.split(), "--out", str(out)]) == 0
    return out, printed.getvalue()


@pytest.mark.thorough
def test_a_run_reports_its_audit(audited):
    out, printed = audited
    assert "audit: ε ≥ 0" in printed
    summary = json.loads((out / "summary.json").read_text())
    assert 0 <= summary["audit_epsilon"] <= summary["epsilon"]
    assert summary["audit_refuted"] is False
    [guarantee] = json.loads((out / "guarantee.json").read_text())["zero_out"]["joint_dp"].values()
    assert any("50 canaries" in sentence for sentence in guarantee["assumptions"])


@pytest.mark.thorough
def test_a_resumed_run_goes_on_with_its_audit(audited, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(audited[0], out)
    assert main(["resume", str(out), "--rounds", "4", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert "50 canaries" in printed.out
    before, after = re.findall(r"(will spend|together spend) ε ([\d.]+), more", printed.err)
    assert (before[0], after[0]) == ("will spend", "together spend")
    assert before[1] == after[1]


def test_runs_without_such_an_audit_are_refused(refused):
    of_fixed_size = RUN.replace("--sampling-rate 0.5", "--sampling fixed --cohort 3")
    assert "audit-canaries" in refused(of_fixed_size)
