"""`fedjaxsim sweep`, from a file to its results."""

import contextlib
import json
import math
import shutil
import tomllib

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

import fedjaxsim as fjs
from fedjaxsim.callbacks import Progress
from fedjaxsim.cli import main, process
from fedjaxsim.runs import comparison
from fedjaxsim.runs import sweeping as command
from fedjaxsim.runs.sweeping import _cut
from fedjaxsim.signals import Stop

BASE = """
data = "synthetic-stream"
clients = 20
algorithm = "ppsgd"
loss = "squared"
sampling-rate = 1.0
clip = 10.0
rounds = 6
eval-every = 2
delta = 1e-3
"""
GRID = """
[sweep]
seed = [3, 4]
noise-multiplier = [0, 5]
personalization = [0.3, inf]
learning-rate = [0.1, 0.4, 1e30]
"""


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def sweep(tmp_path, text, out="out", *flags):
    file = written(tmp_path / "sweep.toml", text)
    return main(["sweep", file, "--out", str(tmp_path / out), "--quiet", *flags])


def table(tmp_path, out="out"):
    return pq.read_table(tmp_path / out / "results.parquet").to_pylist()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    assert sweep(folder, BASE + GRID) == 0
    return folder


def test_there_is_a_row_for_every_run_and_evaluation(finished):
    rows = table(finished)
    assert len(rows) == 24 * 4
    assert [row["round"] for row in rows[:4]] == [0, 2, 4, 6]
    assert len({(r["seed"], r["noise_multiplier"], r["personalization"], r["learning_rate"])
                for r in rows}) == 24  # fmt: skip


def test_the_function_returns_the_table_of_the_command_and_prints_nothing(
    finished, tmp_path, capsys
):
    frame = fjs.sweep(finished / "sweep.toml", finished / "out", quiet=True)  # it is finished
    assert frame.to_dict("list").keys() == table(finished)[0].keys()
    assert [*frame["run"]] == [row["run"] for row in table(finished)]
    # Settings of Python, in which lists are axes, are the same sweep; names take - or _.
    settings = tomllib.loads(BASE + GRID)
    axes = settings.pop("sweep")
    same = settings | {name.replace("-", "_"): values for name, values in axes.items()}
    logged: dict[str, list] = {}

    def mine(settings, path):
        rows = logged.setdefault(path.name, [settings])
        return lambda record, step: rows.append((step, record))

    for _ in range(2):  # a sweep that goes on logs nothing twice
        assert fjs.sweep(same, finished / "out", quiet=True, logger=mine).equals(frame)
    assert capsys.readouterr().out == ""
    assert len(logged) == 24
    settings, *records = logged["out-3"]
    row = frame[frame["run"] == 3].iloc[-1]
    assert [step for step, _ in records] == [0, 2, 4, 6]
    for name in ("seed", "noise_multiplier", "personalization", "learning_rate"):
        assert settings[name] == row[name]
        assert name not in records[-1][1]
    assert records[-1][1]["test_excess_risk"] == row["test_excess_risk"]
    with pytest.raises(ValueError, match="axis"):
        fjs.sweep({"data": "digits"}, tmp_path / "none")


def test_the_runs_of_a_sweep_are_compared_with_their_whole_settings(finished, tmp_path):
    found = comparison.compare([finished / "out"], all_runs=True)
    rows = table(finished)[3::4]
    assert len(found.systems) == 12
    varied = {"personalization", "learning_rate", "noise_multiplier", "seed"}
    assert {*found.settings_that_differ} == varied
    for row, run in zip(rows, found.runs, strict=True):
        assert (run.seed, run.settings["personalization"]) == (row["seed"], row["personalization"])
        assert run.summary["epsilon"] == row["epsilon"]
        assert (run.settings["batch_size"], run.summary["clients"]) == (10, 20)
    assert found.drawn_twice == ""  # as its sentence on shared seeds says
    # By default a learning rate for each noise and personalization, of the least mean over seeds.
    best = comparison.compare([finished / "out"])
    assert "chosen on the very test rows" in best.choices[0]
    places, risks = ("noise_multiplier", "personalization"), dict[tuple, dict[float, float]]()
    for row in rows:
        if not row["failed"]:
            risk = risks.setdefault(tuple(row[key] for key in places), {})
            rate = row["learning_rate"]
            risk[rate] = risk.get(rate, 0.0) + row["test_excess_risk"]
    chosen = {tuple(run.settings[key] for key in (*places, "learning_rate")) for run in best.runs}
    assert chosen == {(*place, min(risk, key=lambda r: risk[r])) for place, risk in risks.items()}
    assert len(best.runs) == 8
    run, label = best.runs[0], best.described_rows()[0]["run"]
    values = "seed = 3, noise multiplier = 0 (no noise), personalization = 0.3, learning rate = 0.4"
    assert label == f"{run.name} {values}"
    edited = tmp_path / "edited"
    shutil.copytree(finished / "out", edited)
    text = (edited / "sweep.toml").read_text()
    (edited / "sweep.toml").write_text(text.replace("0.4,", "0.5,"))
    with pytest.raises(ValueError, match="asks for other runs"):
        comparison.compare([edited])
    assert any("share cohorts and noise here" in sentence for sentence in found.sentences)


@pytest.mark.thorough
def test_a_run_of_a_sweep_is_the_run_alone(finished, tmp_path):
    run = written(
        tmp_path / "run.toml",
        BASE + "seed = 4\nnoise-multiplier = 5.0\npersonalization = 0.3\nlearning-rate = 0.4\n",
    )
    assert main(["run", run, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    alone = [json.loads(line) for line in lines]
    wanted = (4, 5.0, 0.3, 0.4)
    keys = ("seed", "noise_multiplier", "personalization", "learning_rate")
    own = [row for row in table(finished) if tuple(row[key] for key in keys) == wanted]
    assert len(own) == len(alone) == 4
    for one, other in zip(own, alone, strict=True):
        assert one["round"] == other["round"]
        assert one["epsilon"] == other["epsilon"]
        for name in ("test_excess_risk", "test_excess_risk_p90", "train_loss"):
            if other.get(name) is not None:
                np.testing.assert_allclose(one[name], other[name], rtol=2e-4)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert own[-1]["epsilon_replace"] == summary["epsilon_replace"]


def test_runs_that_fail_are_marked_and_the_report_says_what_is_not_covered(finished):
    rows = table(finished)
    assert {row["learning_rate"] for row in rows if row["failed"]} == {1e30}
    assert all(row["failed"] for row in rows if row["round"] == 6 and row["learning_rate"] > 1)
    report = json.loads((finished / "out" / "report.json").read_text())
    assert report["summary"]["failed"] == 8
    assert "Choosing the best of a sweep" in report["selection"]
    assert "at most one of them may be published" in report["shared_seed"]
    # Runs of one seed draw from one key, each round of it.
    of_seed = {}
    for row in rows:
        of_seed.setdefault(row["seed"], set()).add(row["run"])
    assert [set(each["runs"]) for each in report["draws"]] == list(of_seed.values())
    assert {each["rounds"] for each in report["draws"]} == {6}
    assert len({each["digest"] for each in report["draws"]}) == len(of_seed) == 2
    promised = {entry["noise_multiplier"]: entry for entry in report["guarantees"]}
    assert sorted(promised) == [0.0, 5.0]
    assert [len(entry["runs"]) for entry in promised.values()] == [12, 12]
    for name in (
        "envelopes.png",
        "envelopes.pdf",
        "trade_off.png",
        "sweep.toml",
    ):
        assert (finished / "out" / name).stat().st_size > 0


def test_a_finished_sweep_is_not_run_again_and_another_one_is_refused(finished, capsys):
    before = (finished / "out" / "results.parquet").stat().st_mtime_ns
    assert sweep(finished, BASE + GRID) == 0
    assert (finished / "out" / "results.parquet").stat().st_mtime_ns == before
    assert sweep(finished, BASE + GRID.replace("[3, 4]", "[3, 5]")) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_an_interrupted_sweep_goes_on_where_it_stopped(finished, tmp_path, monkeypatch, capsys):
    stop = Stop()

    @contextlib.contextmanager
    def interrupted(kept=str):
        yield stop

    show = Progress.show

    def show_and_stop(self, rows, speed):
        show(self, rows, speed)
        if rows[0]["round"] == 4:
            stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(process, "stop_on_signal", interrupted)
        patch.setattr(Progress, "show", show_and_stop)
        assert sweep(tmp_path, BASE + GRID) == 130
    assert "24 of 24 runs to finish" in capsys.readouterr().err
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "show", lambda _, rows, __: seen.append(rows[0]["round"]))
        assert sweep(tmp_path, BASE + GRID) == 0
    assert seen == [6, 0, 2, 4, 6]  # one round was left of the first seed, then the second seed
    assert str(table(tmp_path)) == str(table(finished))  # to the last bit


@pytest.mark.thorough
def test_a_sweep_cut_into_unequal_chunks_goes_on(tmp_path, monkeypatch):
    # Seven runs in chunks of four and three; stopped at (round, runs of the chunk).
    grid = "[sweep]\nlearning-rate = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]\n"
    monkeypatch.setattr(command, "bytes_per_run", lambda *_: 500_000_000)  # four fit into 2 GB
    assert sweep(tmp_path, BASE + grid, "whole") == 0
    show = Progress.show
    for round_, runs in ((2, 4), (6, 4), (4, 3)):  # inside a chunk, between them, inside the other
        stop = Stop()

        def show_and_stop(self, rows, speed, stop=stop, at=(round_, runs)):
            show(self, rows, speed)
            if (rows[0]["round"], len(rows)) == at:
                stop.set()

        @contextlib.contextmanager
        def interrupted(kept=str, stop=stop):
            yield stop

        with monkeypatch.context() as patch:
            patch.setattr(process, "stop_on_signal", interrupted)
            patch.setattr(Progress, "show", show_and_stop)
            assert sweep(tmp_path, BASE + grid) == 130
    assert sweep(tmp_path, BASE + grid) == 0
    assert_same(table(tmp_path), table(tmp_path, "whole"))


def assert_same(rows, others, rtol=1e-4):
    for row, other in zip(rows, others, strict=True):
        for name, value in row.items():
            if isinstance(value, float) and math.isfinite(value):
                np.testing.assert_allclose(value, other[name], rtol=rtol, err_msg=name)
            elif not isinstance(value, float):
                assert value == other[name]


@pytest.mark.thorough
def test_a_small_budget_cuts_the_sweep_into_chunks_with_the_same_results(tmp_path, capsys):
    # Products of other sizes round differently, which some settings amplify: so in float64.
    text = BASE + GRID.replace("1e30", "0.2")
    with jax.enable_x64(True):
        file = written(tmp_path / "sweep.toml", "memory = 0.0005\n" + text)
        assert main(["sweep", file, "--out", str(tmp_path / "cut")]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len({line.partition("  ")[0] for line in lines if line.startswith("runs ")}) > 4
        assert sweep(tmp_path, text, "whole") == 0
    assert_same(table(tmp_path, "cut"), table(tmp_path, "whole"), 1e-9)


@pytest.mark.thorough
def test_privacy_targets_become_noise(tmp_path):
    grid = "[[sweep]]\nepsilon = [1.0, 4.0, inf]\n[[sweep]]\nalgorithm = 'local'\n"
    assert sweep(tmp_path, BASE + grid) == 0
    last = [row for row in table(tmp_path) if row["round"] == 6]
    assert [row["target_epsilon"] for row in last] == [1.0, 4.0, math.inf, None]
    assert last[3]["algorithm"] == "local"
    for row in last[:2]:
        assert 0.99 * row["target_epsilon"] < row["epsilon"] <= row["target_epsilon"]
    assert last[2]["epsilon"] is None
    assert last[3]["epsilon"] == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE, "table"),
        (BASE + "[sweep]\nlearning-rate = [0.1, -1]\n", "learning-rate"),
        (BASE + "[sweep]\nlearnig-rate = [0.1]\n", "'learning-rate'"),
        ("memory = 0\n" + BASE + GRID, "memory"),
        (BASE.replace("squared", "softmax") + GRID, "synthetic-stream"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(tmp_path, capsys, text, message):
    assert sweep(tmp_path, text) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_chunks_are_as_few_as_fit_and_of_about_one_size():
    assert _cut(range(10), 4) == [(0, 1, 2, 3), (4, 5, 6), (7, 8, 9)]
    assert _cut([7], 100) == [(7,)]
    assert _cut([], 3) == []


DIGITS = """
data = "digits"
clients = 5
validation-fraction = 0.2
rounds = 4
eval-every = 2
local-steps = 2
algorithm = "pmtl"
noise-multiplier = 0
[search]
seeds = [1000]
learning-rate = [1e-9, 0.5, 1e30]
[sweep]
lam = [0.1, 1.0]
seed = [0, 1]
"""


@pytest.mark.thorough
def test_a_search_chooses_on_validation_rows_of_other_seeds(tmp_path, capsys):
    assert sweep(tmp_path, DIGITS) == 0
    assert "among 3 points, by the mean validation accuracy" in capsys.readouterr().out
    tried = [row for row in table(tmp_path, "out/search") if row["round"] == 4]
    assert {row["seed"] for row in tried} == {1000}
    chosen = {}
    for row in tried:
        if not row["failed"]:
            best = chosen.setdefault(row["lam"], row)
            if row["validation_accuracy"] > best["validation_accuracy"]:
                chosen[row["lam"]] = row
    rows = [row for row in table(tmp_path) if row["round"] == 4]
    assert {(row["lam"], row["seed"]) for row in rows} == {
        (lam, seed) for lam in (0.1, 1.0) for seed in (0, 1)
    }
    for row in rows:
        assert row["learning_rate"] == chosen[row["lam"]]["learning_rate"] > 1e-9
    assert json.loads((tmp_path / "out" / "report.json").read_text())["summary"]["runs"] == 4
    # Once more, nothing is computed; validation rows are needed.
    assert sweep(tmp_path, DIGITS) == 0
    assert sweep(tmp_path, DIGITS.replace("validation-fraction = 0.2\n", ""), "other") == 2
    assert "set validation-fraction" in capsys.readouterr().err
    assert sweep(tmp_path, 'metric = "auc"\n' + DIGITS, "other") == 2
    assert "metric must be one of loss, accuracy, got 'auc'" in capsys.readouterr().err
