"""`fedjaxsim run` and `fedjaxsim compare`, from flags to files."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support.problems import HANGS
from support.refusals import check_refusals, parsed
from support.usual_runs import DIGITS
from support.written_runs import write_run

from fedjaxsim.cli import main, running
from fedjaxsim.cli.program import parse
from fedjaxsim.runs import starting
from fedjaxsim.runs.assemble import population_of, simulation_of
from fedjaxsim.runs.build import hparams_of, prepare
from fedjaxsim.runs.directory import RunDirectory, settings_digest
from fedjaxsim.runs.settings import run_config

pytestmark = pytest.mark.usual_runs
PRIVATE = [*DIGITS, "--rounds", "4", "--epsilon", "2"]
SMALL = ["--clients", "8", "--rounds", "4", "--eval-every", "2", "--local-steps", "1"]
FILES = {
    "config.toml", "metrics.jsonl", "guarantee.json", "summary.json", "clients.csv", "checkpoints",
    "curves.png",
}  # fmt: skip


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not strict JSON")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, drawn) -> Path:
    """A private PMTL run and a local one of the same population."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["run", *PRIVATE, "--out", f"{folder}/pmtl"]) == 0
    assert main(["run", *SMALL, "--algorithm", "local", "--out", f"{folder}/local"]) == 0
    return folder


def test_a_run_writes_all_its_files(finished):
    for name in ("pmtl", "local"):
        assert {path.name for path in (finished / name).iterdir()} == FILES | {"public"}
        assert (finished / name / "curves.png").stat().st_size < 150_000


def test_the_same_command_shows_a_finished_run_and_another_one_is_refused(finished, capsys):
    private = [*PRIVATE, "--out", str(finished / "pmtl")]
    before = {path: path.read_bytes() for path in (finished / "pmtl").iterdir() if path.is_file()}
    assert main(["run", *private]) == 0
    said = capsys.readouterr().out
    assert "privacy: ε ≤ " in said
    assert "is finished" in said
    assert {path: path.read_bytes() for path in before} == before
    assert main(["run", *private, "--lam", "0.3"]) == 2
    said = capsys.readouterr().err
    assert "already holds a run with other settings (lam 0.1 there and 0.3 here)" in said


def test_a_finished_run_on_other_rows_than_its_file_has_now_is_refused(tmp_path):
    table = tmp_path / "rows.csv"
    lines = ["who,x,y", *(f"{k % 3},{k % 7},{k % 5}" for k in range(30))]
    table.write_text("\n".join(lines))
    config = run_config(data=f"csv:{table}", client="who", target="y", loss="squared", rounds=1)
    directory = RunDirectory.create(tmp_path / "run")
    rows = population_of(config).fingerprint
    directory.write_config(config.settings() | {"resolved": {"data_fingerprint": rows}})
    numbers = dict.fromkeys(("rounds", "rounds_planned", "delta", "rounds_per_second"), 1)
    summary = numbers | {"interrupted": False, "epsilon": None, "epsilon_replace": None}
    (directory.path / "summary.json").write_text(json.dumps(summary))
    assert starting.prepare_run(config, directory.path) == directory
    table.write_text("\n".join([*lines, "0,1,1"]))
    with pytest.raises(ValueError, match="already holds a run on other data"):
        starting.prepare_run(config, directory.path)
    table.unlink()
    assert starting.prepare_run(config, directory.path) == directory


def test_the_same_command_resumes_an_unfinished_run(finished, tmp_path, monkeypatch, capsys):
    out, resumed = tmp_path / "run", []
    shutil.copytree(finished / "pmtl", out)
    (out / "summary.json").unlink()

    def resume(*given, **how):
        resumed.append(given)
        raise ValueError("resumed")

    with jax.enable_x64(True):
        assert main(["resume", str(out), "--rounds", "50"]) == 2
    assert "set the environment variable JAX_ENABLE_X64=0 to go on" in capsys.readouterr().err
    monkeypatch.setattr(starting, "prepare_resume", resume)
    private = [*PRIVATE, "--out", str(out)]
    assert main(["run", *private]) == 2
    assert [path for path, *_ in resumed] == [out]


def test_several_seeds_are_runs_of_their_own_with_a_mean(tmp_path, monkeypatch, capsys):
    asked = []

    def prepare(config, out, start, output, *, overwrite, labels):
        assert labels == {"tags": ["a", "b"]}
        asked.append((config.seed, out.name))
        write_run(out, "pmtl", 0.5 + 0.1 * config.seed, seed=config.seed)

    monkeypatch.setattr(running, "prepare_run", prepare)
    monkeypatch.setattr(running, "_begin", lambda *_: 0)
    assert (
        main(
            ["run", "--seed", "1", "--seeds", "2", "--tags", "a,b", "--out", str(tmp_path / "runs")]
        )
        == 0
    )
    assert asked == [(1, "seed-1"), (2, "seed-2")]
    assert "0.650 ± 0.635" in capsys.readouterr().out  # by hand: 12.7 · 0.05
    assert main(["compare", str(tmp_path / "runs")]) == 0  # the folder stands for its runs
    assert "0.650 ± 0.635" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(["run", "--rounds", "1", "--out", str(tmp_path / "runs")]) == 2
    assert "holds several runs (seed-" in capsys.readouterr().err
    for bad in ("--seeds 2", "--seeds 2 --seed secret --out x", "--seeds 2 --out x --from y"):
        assert main(["run", *bad.split()]) == 2


def test_metrics_are_strict_json_at_every_evaluation(finished):
    for name, last in (
        ("pmtl", lambda epsilon: epsilon > 0),
        ("local", lambda epsilon: epsilon == 0),
    ):
        text = (finished / name / "metrics.jsonl").read_text()
        records = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
        assert [record["round"] for record in records] == [0, 2, 4]
        assert "train_loss" not in records[0]
        assert records[0]["epsilon"] == 0
        assert last(records[-1]["epsilon"])
        for key in ("test_accuracy", "test_accuracy_p10", "test_accuracy_weighted", "test_loss"):
            assert isinstance(records[-1][key], float)


def test_every_file_states_the_same_epsilon(finished):
    directory = RunDirectory(finished / "pmtl")
    summary, guarantee = directory.summary(), directory.guarantee()
    [found] = guarantee["zero_out"]["joint_dp"].values()
    assert summary["epsilon"] == directory.metrics()[-1]["epsilon"] == found["epsilon"]
    [replaced] = guarantee["replace"]["joint_dp"].values()
    assert summary["epsilon_replace"] == replaced["epsilon"] > found["epsilon"]
    assert summary["delta"] == found["delta"] <= 1 / (10 * 8)


def test_the_configuration_is_resolved_and_versioned(finished):
    config = RunDirectory(finished / "pmtl").config()
    assert config["epsilon"] == 2
    assert config["resolved"]["noise_multiplier"] > 0
    assert config["resolved"]["clip"] == 1
    assert "clip" not in config
    assert config["resolved"]["clients"] == config["resolved"]["capacity"] == 8
    assert config["versions"]["jax"] == jax.__version__
    assert RunDirectory(finished / "local").config()["resolved"]["noise_multiplier"] == 0


def test_the_clients_add_up_to_the_summary(finished):
    lines = (finished / "pmtl" / "clients.csv").read_text().splitlines()
    assert lines[0] == "name,train_rows,test_rows,test_accuracy,test_loss"
    rows = np.array([[float(cell) for cell in line.split(",")[1:]] for line in lines[1:]])
    summary = RunDirectory(finished / "pmtl").summary()
    assert rows[:, :2].sum() == 1797
    assert rows[:, 2].mean() == pytest.approx(summary["test_accuracy"], rel=1e-12)
    weighted = rows[:, 2] @ rows[:, 1] / rows[:, 1].sum()
    assert weighted == pytest.approx(summary["test_accuracy_weighted"], rel=1e-12)


def test_a_run_is_repeated_by_the_configuration_it_wrote(finished):
    command = parse(["run", str(finished / "pmtl" / "config.toml"), "--seed", "0"])
    again, wrote = prepare(command.settings), RunDirectory(finished / "pmtl").config()
    data = wrote["resolved"].pop("data_fingerprint")
    assert data == again.simulation.population.fingerprint
    assert wrote["resolved"].pop("settings_fingerprint") == settings_digest(again.config.settings())
    assert wrote["resolved"].pop("code_fingerprint") == settings_digest([])
    assert wrote["resolved"].pop("data_settings_fingerprint") == settings_digest(
        {k: wrote.get(k) for k in (*sorted(again.config.data_settings()), "loss")}
    )
    assert wrote["resolved"].pop("x64") is False
    assert again.resolved() == wrote


def test_the_state_of_a_run_is_read_back(finished):
    command = parse(["run", str(finished / "pmtl" / "config.toml")])
    experiment = prepare(command.settings)
    like = experiment.simulation.init(1, experiment.hparams)
    state = RunDirectory(finished / "pmtl").checkpoints().last().state(like)
    assert int(state.round) == 4
    report = experiment.simulation.guarantee(state, experiment.delta)
    assert report.to_json() == RunDirectory(finished / "pmtl").guarantee()


def test_compare_prints_a_table_and_draws(finished, tmp_path, capsys):
    picture = tmp_path / "both.png"
    runs = [str(finished / "pmtl"), str(finished / "local")]
    assert main(["compare", *runs, "--out", str(picture)]) == 0
    table = capsys.readouterr().out
    assert "all with δ 0.0125, rounds 4\n" in table  # of 8 clients: 1/80
    assert re.search(r"^pmtl +0\.\d{3} .* +\S+ *$", table, re.MULTILINE)
    assert re.search(r"^local .* 0 +0 +\S+ *$", table, re.MULTILINE)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 150_000


def test_compare_as_json(finished, ask_json):
    found = ask_json(f"compare {finished / 'pmtl'}")
    assert found["systems"] == []
    [row] = found["runs"]
    run = RunDirectory(finished / "pmtl")
    assert row == {"run": "pmtl", **run.summary(), "assumed": [*run.report().assumed]}


def test_the_target_epsilon_is_met(finished):
    assert 1.99 <= RunDirectory(finished / "pmtl").summary()["epsilon"] <= 2.0


@pytest.mark.parametrize("flags", [[], ["--epsilon", "inf"], ["--clip", "2", "--epsilon", "inf"]])
def test_at_infinite_epsilon_nothing_is_clipped_or_noised(flags):
    config = parse(["run", *flags]).settings
    hparams = hparams_of(config, simulation_of(config, population_of(config)))
    assert hparams.noise_multiplier == 0
    assert hparams.clip == math.inf


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rounds", "--rounds needs a value"),  # words
        ("--epsilon 1 --clip inf", "clip must be finite where epsilon is"),  # settings
        ("--data npz:/dev/null", "/dev/null"),  # data
        ("--noise-multiplier -1", "noise-multiplier"),  # a simulation
        (f"{' '.join(DIGITS)} --out /dev/null/x", "/dev/null"),  # files
    ],
)
def test_each_layer_refuses_in_one_line(refused, flags, words):
    out = [] if "--out" in flags else ["--out", "out"]
    assert words in refused(" ".join(["run", flags, *out]))


def test_words_of_no_run_are_refused_where_they_are_parsed():
    check_refusals(
        lambda flags: parsed(f"run {flags}"),
        {
            "--hidden 8,0 --model mlp": "hidden must be at least 1, got 0",
            "--hidden , --model mlp": "hidden must be a list, as in a,b, got ','",
            "--preprocess unit-row": "'unit-row'",
            "--data mnist": "did you mean 'mat'",
            "--partition sorted": "'sorted'",
            "--batch-size 1000000000000": "batch-size must be at most",
            "--seed 99999999999999999999": "seed must be at most",
            "--seed -1": "seed must be at least 0",
            ".": "is a folder: give a file",
        },
    )


def test_what_data_and_a_simulation_of_them_cannot_be_is_refused():
    check_refusals(
        lambda flags: prepare(parse(["run", *flags.split()]).settings),
        {
            "--sampling-rate 0": "sampling-rate must lie in",
            "--noise-multiplier 1e30": "noise-multiplier",
            "--noise-multiplier 1e-160": "noise-multiplier",
            "--noise-multiplier 1 --clip inf": "clip",
            "--epsilon 1 --clip 0": "clip",
            "--clip -1": "clip",
            "--epsilon 1e9": "epsilon",
            "--epsilon 1 --delta 0.9 --sampling-rate 0.02 --rounds 100 --clients 6": "delta",
            "--local-steps 0": "local-steps must be at least 1",
            "--local-epochs 0": "local-epochs must be at least 1",
            "--batch-size 0": "batch-size must be at least 1",
            "--learning-rate -0.1": "learning-rate",
            "--learning-rate nan": "learning-rate",
            "--learning-rate 1e300": "learning-rate",
            "--algorithm ppsgd --local-steps 5": "minibatch",
            "--algorithm ppsgd --personalization -1": "personalization",
            "--algorithm ppsgd --parametrization paper --personalization inf": "parametrization",
            "--chunk-size 1": "chunk-size",
            "--streamed --sampling-rate 1": "streamed",
            "--loss logistic": "labels",
            "--loss squared": "squared",
            "--model cnn": "cnn",
            "--data digits:": "digits",
            "--data leaf:absent.json": "absent.json",
            "--data leaf:.": ".json",
            "--data npz:.": "npz",
            "--data npz:. --partition iid": "npz",
            "--data mat:.": "MATLAB",
            "--data synthetic-stream": "linear",
            "--alpha 0": "alpha",
            "--test-fraction 0": "test",
            "--test-fraction 1": "test",
            "--clients 0": "clients",
        },
    )


def test_rows_that_are_streamed_have_one_device(refused):
    assert "devices" in refused("run --streamed --devices 2")


def test_fractions_are_no_classes(refused, tmp_path):
    labels = np.array([0.5, 0, 1, 1])
    np.savez(tmp_path / "data.npz", x=np.ones((4, 2)), y=labels, client=np.array([0, 0, 1, 1]))
    assert "'y' holds fractions" in refused("run --data npz:data.npz --test-fraction 0.5")


def test_a_truncated_file_is_refused(refused, tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.ones((4, 2)), y=np.zeros(4), client=np.array([0, 0, 1, 1]))
    path.write_bytes(path.read_bytes()[:200])
    assert "data.npz" in refused("run --data npz:data.npz")


def test_an_unknown_key_is_refused(refused, tmp_path):
    (tmp_path / "run.toml").write_text("learning_rat = 1\n")
    assert "'learning-rate'" in refused("run run.toml")


def test_a_directory_with_a_run_is_kept(finished, refused):
    before = (finished / "local" / "summary.json").read_text()
    assert "local" in refused(f"run --out {finished}/local")
    assert (finished / "local" / "summary.json").read_text() == before


@pytest.mark.thorough
def test_a_regression_reports_nmse_and_infinity_is_null(tmp_path, capsys):
    problem = ["--data", "synthetic", "--loss", "squared", "--algorithm", "fedavg"]
    arguments = [*problem, *SMALL, "--learning-rate", "0.01", "--out", f"{tmp_path}/run"]
    assert main(["run", *arguments]) == 0
    summary = RunDirectory(tmp_path / "run").summary()
    assert summary["test_nmse"] > 0
    assert '"epsilon": null' in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    printed = capsys.readouterr().out
    assert "nMSE" in printed
    file = tmp_path / "run" / "guarantee.json"
    assert f"privacy: no guarantee: no noise was added; in full: {file}\n" in printed


@pytest.mark.parametrize("command", ["compare", "help"])
def test_a_reader_that_leaves_is_no_error(finished, command):
    # In `fedjaxsim compare … | head -0` the pipe has no reader when the table is printed.
    given = {"compare": ["compare", str(finished / "pmtl")], "help": ["run", "--help"]}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "fedjaxsim", *given[command]],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=HANGS,
    )
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr in ("", "reading the runs …\n")  # which a slow machine says


@pytest.mark.thorough
def test_a_diverging_run_is_warned_about(capsys):
    arguments = ["run", "--quiet", "--data", "synthetic", "--loss", "squared", "--rounds", "6"]
    arguments += ["--clients", "8"]
    flags = ["--learning-rate", "30", "--eval-every", "2", "--algorithm", "fedavg"]
    assert main([*arguments, *flags]) == 0
    output = capsys.readouterr()
    assert "this run diverges from round " in output.err
    assert "privacy: no guarantee: no noise was added; in full: --explain\n" in output.out


@pytest.mark.thorough
def test_ppsgd_runs_from_the_command_line(tmp_path, capsys):
    # Weighted by public minibatch sizes, its data consumed, an output layer of one's own, averaged.
    flags = ["--algorithm", "ppsgd", "--model", "mlp", "--hidden", "4", "--loss", "one-vs-all"]
    own = ["--objective", "weighted", "--passes", "1", "--averaged", "--personalization", "0.5"]
    small = ["--clients", "8", "--rounds", "4", "--eval-every", "4"]
    noise = ["--noise-multiplier", "1", "--explain"]
    assert main(["run", *small, *flags, *own, *noise, "--out", f"{tmp_path}/a"]) == 0
    printed = capsys.readouterr().out
    # All of eight clients take part, so the closed form holds.
    assert "zero_out, released_sequence: ε =" in printed
    assert "privacy:" not in printed
    summary = RunDirectory(tmp_path / "a").summary()
    assert 0 <= summary["test_accuracy"] <= 1
    assert summary["epsilon"] > 0
    config = RunDirectory(tmp_path / "a").config()
    assert config["resolved"]["local_steps"] == 1
    assert config["passes"] == 1


@pytest.mark.thorough
def test_a_stream_is_judged_by_its_excess_risk(tmp_path):
    flags = ["--data", "synthetic-stream", "--algorithm", "fedavg", "--loss", "squared"]
    small = [flag for flag in SMALL if flag not in ("--local-steps", "1")]
    assert main(["run", *small, *flags, "--sampling-rate", "1", "--out", f"{tmp_path}/a"]) == 0
    records = RunDirectory(tmp_path / "a").metrics()
    assert records[-1]["test_excess_risk"] < records[0]["test_excess_risk"]
