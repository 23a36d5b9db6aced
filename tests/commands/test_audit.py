"""`fedjaxsim audit`."""

import math

import pytest
from support.refusals import check_refusals, parsed

from fedjaxsim.audit import bounds
from fedjaxsim.cli import main
from fedjaxsim.privacy.accounting import gaussian

AUDIT = (
    "audit --data synthetic --loss squared --algorithm fedavg --clients 16 --rounds 2 "
    "--sampling-rate 1 --noise-multiplier 1 --local-steps 1 --learning-rate 0.01"
)

pytestmark = pytest.mark.usefixtures("exact_noise")


def test_an_audit_of_a_sound_simulation_refutes_nothing(ask_json, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("rounds = 7\n")
    found = ask_json(f"{AUDIT} {config} --canaries 8 --runs 5")
    assert found["canaries"] == 40
    assert not found["refuted"]
    # Two rounds of everybody at z = 1 are √2-GDP.
    assert found["delta"] == 1 / 160
    expected = gaussian.epsilon(1 / 160, math.sqrt(2))
    assert 0 <= found["epsilon"] <= found["reported"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("allowed", "code"), [(0.5, 1), (0.7, 0), (None, 0)])
def test_the_exit_code_of_an_audit_says_whether_epsilon_is_refuted(ask, monkeypatch, allowed, code):
    result = bounds.AuditResult(1.0, 1e-3, 2.0, 0.6, allowed, 8, 8, 7)
    monkeypatch.setattr(bounds, "audit", lambda *arguments, **options: result)
    assert str(result) in ask(AUDIT, code)


def test_what_is_asked_of_an_audit_is_checked_before_data_are_read():
    check_refusals(
        lambda flags: parsed(f"{AUDIT} {flags}"),
        {
            "--out results": "out has no effect on audit",
            "--canaries 0": "canaries must be at least 1",
            "--runs 0": "runs must be at least 1",
            "--runs 1e99": "runs must be at most",
        },
    )


def test_what_cannot_be_audited_is_refused_before_anything_is_printed(capsys):
    assert main([*AUDIT.split(), "--canaries", "1700"]) == 2
    assert capsys.readouterr().out == ""
