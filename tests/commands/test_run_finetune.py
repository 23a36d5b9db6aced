"""`fedjaxsim run --finetune`: right after a run, after a finished one, after an interrupted one."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from fedjaxsim.cli import main
from fedjaxsim.commands import stopping
from fedjaxsim.privacy.assumptions import NEW_CLIENTS, NO_RELEASE
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.signals import Stop

DATA = ["--data", "synthetic", "--loss", "squared", "--clients", "6", "--quiet"]
FIRST = [
    *DATA, "--algorithm", "pmtl", "--rounds", "2", "--eval-every", "1", "--local-steps", "1",
    "--learning-rate", "0.01", "--sampling-rate", "0.5", "--noise-multiplier", "2",
]  # fmt: skip
NEXT = ["--finetune", "mean", "--finetune-rounds", "3", "--finetune-lam", "0.2"]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """PMTL, and fine-tuning right after it."""
    folder = tmp_path_factory.mktemp("finetuning")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["run", *FIRST, *NEXT, "--out", f"{folder}/run"]) == 0
    (folder / "printed").write_text(printed.getvalue())
    return folder


def directories(folder: Path) -> tuple[RunDirectory, RunDirectory]:
    return RunDirectory(folder), RunDirectory(folder / "finetune")


def test_the_second_stage_starts_where_the_first_ended_and_costs_nothing(both):
    first, second = directories(both / "run")
    last, records = first.metrics()[-1], second.metrics()
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    assert records[0]["test_nmse"] == pytest.approx(last["test_nmse"], rel=1e-6)
    assert records[-1]["test_nmse"] < records[0]["test_nmse"]
    assert {record["epsilon"] for record in records} == {last["epsilon"]}
    for name in ("epsilon", "epsilon_replace", "delta"):
        assert second.summary()[name] == first.summary()[name]
    [found] = second.guarantee()["zero_out"]["joint_dp"].values()
    words = "pmtl (2 rounds), then finetune (3 rounds)"
    assert f"The charges of all stages are composed: {words}." in found["assumptions"]
    assert NO_RELEASE in found["assumptions"]
    printed = (both / "printed").read_text()
    assert f"stages: {words}; the guarantee is of all of them" in printed
    assert NO_RELEASE in printed
    rows = re.findall(r"^(pmtl|finetune mean) .* (\d) ", printed, re.MULTILINE)
    assert rows == [("pmtl", "2"), ("finetune mean", "3")]


@pytest.mark.thorough
def test_after_a_finished_run_it_is_the_same(both, tmp_path, capsys):
    first, second = directories(both / "run")
    command = ["run", "--from", str(first.path), *NEXT, "--quiet", "--out", f"{tmp_path}/later"]
    assert main(command) == 0
    later = RunDirectory(tmp_path / "later")
    assert later.metrics() == second.metrics()
    assert later.guarantee() == second.guarantee()
    assert "finetune mean" in capsys.readouterr().out


@pytest.mark.thorough
def test_an_interrupted_run_says_how_to_go_on(both, tmp_path, capsys, monkeypatch):
    @contextlib.contextmanager
    def stopped():
        stop = Stop()
        stop.set()
        yield stop

    with monkeypatch.context() as patch:
        patch.setattr(stopping, "stop_on_signal", stopped)
        assert main(["run", *FIRST, *NEXT, "--out", f"{tmp_path}/run"]) == 130
        said = capsys.readouterr().err
        found = re.search(r": fedjaxsim (resume .*); then fine-tune with fedjaxsim (.*)", said)
        assert found is not None, said
        resume, finetune = map(shlex.split, found.groups())
    assert main([*resume, "--quiet"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(stopping, "stop_on_signal", stopped)
        assert main([*finetune, "--quiet"]) == 130
        assert f"resume {tmp_path}/run/finetune" in capsys.readouterr().err
    assert main(["resume", f"{tmp_path}/run/finetune", "--quiet"]) == 0
    for one, other in zip(directories(both / "run"), directories(tmp_path / "run"), strict=True):
        assert other.metrics() == one.metrics()
        assert other.guarantee() == one.guarantee()


def test_held_out_clients_start_from_what_was_published_and_cost_nothing(tmp_path, capsys):
    new = ["--held-out-clients", "0.33", *NEXT, "--finetune-clients-used", "held-out"]
    assert main(["run", *FIRST, *new, "--out", f"{tmp_path}/run"]) == 0
    first, second = directories(tmp_path / "run")
    assert (first.summary()["clients"], second.summary()["clients"]) == (4, 2)
    for name in ("epsilon", "epsilon_replace", "delta"):
        assert second.summary()[name] == first.summary()[name]
    [found] = second.guarantee()["zero_out"]["joint_dp"].values()
    assert NEW_CLIENTS.format(2) in found["assumptions"]
    assert "finetune mean of held-out clients" in capsys.readouterr().out
    again = ["run", "--from", f"{tmp_path}/run", *new[2:], "--quiet", "--out", f"{tmp_path}/later"]
    assert main([*again, "--seed", "1"]) == 2
    assert "took part in the run before" in capsys.readouterr().err
    assert main(again) == 0
    assert RunDirectory(tmp_path / "later").metrics() == second.metrics()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{first} --algorithm local {next}", "fine-tuning"),
        ("{first} --algorithm finetune", "--from"),
        ("{first} {next} --finetune-lam -1", "lam"),
        ("--from {run} {next} --epsilon 2", "epsilon"),
        ("--from {run} {next} --out {run}", "out"),
        ("--from {run} {next} --clients 7", "data"),
        ("--from {run} {next} --model mlp", "['Dense_0']['kernel']"),
        ("{first} {next} --finetune-clients-used held-out", "held-out-clients"),
    ],
)
def test_bad_input_is_refused_in_one_line(both, refused, arguments, words):
    plain = " ".join(FIRST).replace("--algorithm pmtl", "").replace("--noise-multiplier 2", "")
    names = {"first": plain, "next": " ".join(NEXT), "run": both / "run"}
    before = sorted(both.rglob("*"))
    assert words in refused(f"run {arguments.format(**names)}")
    assert sorted(both.rglob("*")) == before
