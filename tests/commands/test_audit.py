"""`fedjaxsim audit`."""

import math

import pytest

from fedjaxsim.audit import canaries
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
    bound = canaries.Bound(1e-3, 1.0, reported, 4.0)
    result = canaries.AuditResult((bound,), 0.99, 8, 5, 2, 20)
    monkeypatch.setattr(canaries, "audit", lambda *arguments, **options: result)
    assert str(result) in ask(AUDIT, code)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--out results", "out"),
        ("--canaries 17", "canaries"),
        ("--canaries 0", "canaries"),
        ("--runs 0", "runs"),
        ("--confidence 1", "confidence"),
        ("--delta 2", "delta"),
        ("--mu 1", "mu"),
        ("absent.toml", "absent.toml"),
    ],
)
def test_bad_input_is_refused_in_one_line(refused, flags, words):
    assert words in refused(f"{AUDIT} {flags}")
