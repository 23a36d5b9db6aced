"""`fedjaxsim audit`."""

import math
import re

import pytest

from fedjaxsim.audit import canaries
from fedjaxsim.cli import main
from fedjaxsim.privacy.accounting import gaussian

AUDIT = (
    "audit --data synthetic --loss squared --algorithm fedavg --clients 16 --rounds 2 "
    "--sampling-rate 1 --noise-multiplier 1 --local-steps 1 --learning-rate 0.01"
)


def test_an_audit_of_a_sound_simulation_refutes_nothing(ask_json, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("rounds = 7\n")
    found = ask_json(f"{AUDIT} {config} --canaries 8 --runs 5 --confidence 0.999999")
    assert (found["canaries"], found["runs"], found["rounds"]) == (8, 5, 2)
    assert not found["violated"]
    for bound in found["bounds"]:
        assert 0 <= bound["epsilon"] <= bound["reported"]
        # Two rounds of everybody at z = 1 are √2-GDP.
        expected = gaussian.epsilon(bound["delta"], math.sqrt(2))
        assert bound["reported"] == pytest.approx(expected, rel=1e-6)
    assert found["bounds"][0]["delta"] == 1 / 160


@pytest.mark.parametrize(("reported", "code"), [(0.5, 1), (2.0, 0), (None, 0)])
def test_the_exit_code_of_an_audit_says_whether_epsilon_is_refuted(
    ask, monkeypatch, reported, code
):
    bound = canaries.Bound(1e-3, 1.0, reported)
    result = canaries.AuditResult((bound,), 0.99, 8, 5, 2, 20)
    monkeypatch.setattr(canaries, "audit", lambda *arguments, **options: result)
    assert str(result) in ask(AUDIT, code)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--out results", "out must not be given, as an audit writes no files, got results"),
        ("--canaries 17", r"canaries must lie in \[1, 16\], .*, got 17"),
        ("--runs 0", "runs must be at least 1, got 0"),
        ("--confidence 1", r"confidence must lie in \(0, 1\), got 1"),
        ("--delta 2", r"delta must lie in \(0, 1\), got 2"),
        ("absent.toml", r"no configuration file absent\.toml"),
    ],
)
def test_audits_refuse_bad_input(flags, message, capsys):
    assert main([*AUDIT.split(), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert re.match(rf"fedjaxsim: error: .*{message}", error), error
    assert error.count("\n") == 1
