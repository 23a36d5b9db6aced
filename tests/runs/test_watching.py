"""Stops without progress."""

import contextlib
import io
import json
import re

import pytest

from fedjaxsim.cli import main
from fedjaxsim.privacy.assumptions import STOPPING
from fedjaxsim.runs.sweep_runs import read_sweep

SMALL = ["--clients", "6", "--local-steps", "1", "--eval-every", "2", "--sampling-rate", "1"]
SMALL += ["--noise-multiplier", "2"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run with learning rate 0, and its output."""
    out = tmp_path_factory.mktemp("runs") / "run"
    flags = "--learning-rate 0 --lam 0 --rounds 40 --patience 2 --validation-fraction 0.2"
    command = ["run", *SMALL, *flags.split(), "--out", str(out)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(command) == 0
    (out.parent / "printed").write_text(printed.getvalue())
    return out


def test_a_run_stops_where_validation_rows_get_no_better(stopped):
    summary = json.loads((stopped / "summary.json").read_text())
    assert (summary["rounds"], summary["rounds_planned"]) == (4, 40)
    assert (summary["interrupted"], summary["stopped_early"]) == (False, True)
    lines = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 2, 4]
    assert len({line["validation_accuracy"] for line in lines}) == 1


def test_its_guarantee_is_of_the_rounds_done_and_does_not_cover_the_choice(stopped, capsys):
    guarantee = json.loads((stopped / "guarantee.json").read_text())
    [found] = guarantee["zero_out"]["joint_dp"].values()
    assert "It does not cover when to stop" in " ".join(found["assumptions"])
    [handed_on] = re.findall(r"may be handed on.*", (stopped.parent / "printed").read_text())
    assert "tells something of validation rows, without an ε" in handed_on
    lines = (stopped / "metrics.jsonl").read_text().splitlines()
    assert 0 < found["epsilon"] <= json.loads(lines[-1])["epsilon"]  # by RDP on the way
    assert main(["resume", str(stopped), "--rounds", "50"]) == 2
    assert "ran out of patience after 4 rounds: continue it" in capsys.readouterr().err


def test_a_comparison_says_what_the_guarantee_does_not_cover(stopped, capsys):
    assert main(["compare", str(stopped)]) == 0
    assert f"\n{STOPPING}\n" in capsys.readouterr().out
    assert main(["compare", str(stopped), "--json"]) == 0
    assert STOPPING in json.loads(capsys.readouterr().out)["runs"][0]["assumed"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--patience 0 --validation-fraction 0.2", "patience"),
        ("--patience 1", "patience"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_one_line(flags, message, capsys):
    assert main(["run", *SMALL, "--rounds", "2", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_the_runs_of_a_sweep_have_no_patience(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text("patience = 2\nvalidation-fraction = 0.2\n[sweep]\nlam = [0.1, 1.0]\n")
    with pytest.raises(ValueError, match="patience"):
        read_sweep(path)
