"""`fedjaxsim tune`, from its flags to its files."""

import json
import math
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

import fedjaxsim as fjs
from fedjaxsim.cli import main, process
from fedjaxsim.cli.program import parse
from fedjaxsim.runs.build import Experiment
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.tuning import run as tuning
from fedjaxsim.tuning.run import tuned_settings, words_of

SMALL = [
    "tune", "--clients", "12", "--local-steps", "1", "--sampling-rate", "1", "--rounds", "4",
    "--eval-every", "4", "--seeds", "2", "--steps", "2", "--wrt", "learning-rate,clip",
]  # fmt: skip
PRIVATE = [
    "--epsilon", "2", "--clip", "0.3", "--held-out-clients", "0.5", "--metric", "loss",
]  # fmt: skip


def read(path):
    return json.loads((path / "path.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A tuning of two steps, and its output."""
    folder = tmp_path_factory.mktemp("tune")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        code = main([*SMALL, *PRIVATE, "--out", str(folder)])
    assert code == 0
    return folder, "\n".join(lines)


def test_all_files_are_written(finished):
    folder, _ = finished
    names = {"path.json", "tuned.toml"}
    assert {path.name for path in folder.iterdir()} == names


def test_the_path_states_every_step_and_what_it_cost(finished):
    folder, printed = finished
    path = read(folder)
    steps = path["steps"]
    assert [step["step"] for step in steps] == [0, 1, 2]
    # Two seeds, each a run and two derivatives of it.
    assert [step["runs"] for step in steps] == [6, 12, 18]
    assert steps[0]["point"] == {"learning_rate": 0.1, "clip": 0.3}
    assert steps[0]["accepted"] is True
    best = steps[path["best"]]
    assert best["value"] == min(step["value"] for step in steps if step["accepted"])
    for step in steps:
        assert step["value"] == pytest.approx(np.mean(step["values"]))
    assert len(re.findall(r"^tune  \d/2  loss ", printed, re.MULTILINE)) == 3


def test_the_result_is_tested_on_fresh_seeds(finished):
    folder, printed = finished
    path = read(folder)
    found, first = path["test"], path["steps"][0]
    assert not set(found["start"]) & set(first["values"])
    fall = np.subtract(found["start"], found["tuned"])
    assert found["gain"] == pytest.approx(fall.mean())
    expected: Any = stats.ttest_1samp(fall, 0.0)
    assert found["p"] == pytest.approx(expected.pvalue)
    assert f"on 2 fresh seeds (95 %; paired t test, p = {found['p']:.4g})" in printed


def test_the_statement_is_everywhere(finished):
    folder, printed = finished
    statement = read(folder)["statement"]
    assert "6 held-out clients have NO protection" in statement
    assert statement in printed
    draws = read(folder)["draws"]
    # Those of the tuning, and as many fresh ones.
    assert (
        len({each["digest"] for each in draws}) == len(draws) == 2 * read(folder)["asked"]["seeds"]
    )
    assert "at most one of them may be published" in read(folder)["shared_seed"]
    assert read(folder)["shared_seed"] in printed
    assert read_toml(folder / "tuned.toml").public == (statement,)


def test_a_run_with_the_result_is_judged_by_the_metric_that_was_asked_for(finished):
    folder, _ = finished
    assert read_toml(folder / "tuned.toml").metric == "loss"


@pytest.mark.thorough
def test_a_run_with_the_result_is_on_the_rest_and_reports_its_guarantee(finished, tmp_path):
    folder, printed = finished
    assert f"fedjaxsim run {folder / 'tuned.toml'} --out DIR" in printed
    assert main(["run", str(folder / "tuned.toml"), "--out", str(tmp_path / "run")]) == 0
    run = RunDirectory(tmp_path / "run")
    assert read(folder)["statement"] in run.report().assumed
    summary = run.summary()
    assert summary["clients"] == 6
    assert 1.99 <= summary["epsilon"] <= 2.0


def test_the_tuned_settings_are_those_of_the_best_point(finished):
    folder, _ = finished
    best = read(folder)["steps"][read(folder)["best"]]["point"]
    tuned = parse(["run", str(folder / "tuned.toml")]).settings
    assert (tuned.learning_rate, tuned.clip) == (best["learning_rate"], best["clip"])
    assert tuned.held_out_clients == 0.5


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_path_until_ctrl_c_and_after_it(
    finished, tmp_path, monkeypatch, capsys
):
    folder, _ = finished
    listening = process.stop_on_signal
    events = []

    class Caught:
        def __init__(self, kept):
            pass

        def __enter__(self):
            self.context = listening()
            events.append(self.context.__enter__())
            return events[0]

        def __exit__(self, *error):
            return self.context.__exit__(*error)

    def shown(step, metric):
        if step.runs > 6:
            events[0].set()
        return words_of(step, metric)

    monkeypatch.setattr(process, "stop_on_signal", Caught)
    monkeypatch.setattr(tuning, "words_of", shown)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_log.py").write_text(
        "def tracker(settings, path):\n"
        "    file = open(path / 'log', 'a')\n"
        "    print('opened', file=file)\n"
        "    def write(*said): print(settings['wrt'], *said, file=file)\n"
        "    write.close = file.close\n"
        "    return write"
    )
    logged = ["--logger", "my_log:tracker"]
    assert main([*SMALL, *PRIVATE, *logged, "--out", str(tmp_path)]) == 130
    path = read(tmp_path)
    assert path["stopped"] == "stopped by the user"
    assert path["steps"] == read(folder)["steps"][:2]
    assert path["test"] is None
    assert (tmp_path / "tuned.toml").exists()
    assert "stopped by Ctrl-C; the path so far is kept" in capsys.readouterr().err
    monkeypatch.undo()
    for _ in range(2):  # once more for what is finished, of which nothing is left to log
        assert main([*SMALL, *PRIVATE, *logged, "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert [lines.pop(lines.index("opened")) for _ in range(2)]
    assert [line.split()[-1] for line in lines] == ["0", "1", "2"]
    assert f"'loss': {path['steps'][0]['value']}" in lines[0]
    assert "'point/learning_rate': 0.1, 'point/clip': 0.3" in lines[0]
    assert (tmp_path / "path.json").read_bytes() == (folder / "path.json").read_bytes()
    assert (tmp_path / "tuned.toml").read_bytes() == (folder / "tuned.toml").read_bytes()


@pytest.mark.thorough
def test_the_function_takes_the_path_of_the_command(finished, tmp_path, capsys):
    folder, _ = finished
    settings = {
        "clients": 12, "local_steps": 1, "sampling_rate": 1.0, "rounds": 4, "eval_every": 4,
        "epsilon": 2.0, "clip": 0.3, "held_out_clients": 0.5,
    }  # fmt: skip
    names = ["learning-rate", "clip"]
    done = fjs.tune(settings, tmp_path / "a", names, seeds=2, steps=2, metric="loss", quiet=True)
    assert re.fullmatch(
        r"TuningResult\('.*/a'\): .*\n  start: loss .*  clip 0.3\n  best: loss .*", repr(done)
    )
    path = read(folder)
    assert done.best == path["steps"][path["best"]]["point"]
    assert done.config.get("clip") == done.best["clip"]
    assert read(tmp_path / "a")["steps"] == path["steps"]
    assert capsys.readouterr().out == ""


def test_the_function_refuses_what_the_command_refuses(tmp_path):
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"held-out-clients": 0.5, "clients_used": "held-out"}, {}, "clients-used has no effect"),
        ({"held-out-clients": 0.5, "held_out_clients": 0.5}, {}, "given twice, with - and with _"),
        ({}, {"seeds": 1}, "seeds"),
        ({}, {"steps": 0}, "steps"),
    ]
    for settings, more, words in refused:
        with pytest.raises(ValueError, match=words):
            fjs.tune(settings, tmp_path / "a", ["clip"], **more)


def test_another_tuning_is_not_overwritten(finished, capsys, monkeypatch):
    folder, _ = finished
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "code_fingerprint", "other")
        assert main([*SMALL, *PRIVATE, "--out", str(folder)]) == 2
    assert "already holds a tuning of other code of yours" in capsys.readouterr().err
    assert main([*SMALL, *PRIVATE, "--seed", "9", "--out", str(folder)]) == 2
    assert (
        "already holds a tuning with other settings (seed 0 there and 9 here)"
        in capsys.readouterr().err
    )
    with jax.enable_x64(True):
        assert main([*SMALL, *PRIVATE, "--out", str(folder)]) == 2
    assert "set the environment variable JAX_ENABLE_X64=0 to go on" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_finished_tuning_is_shown_again(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder, tmp_path / "again")
    assert main([*SMALL, *PRIVATE, "--out", str(tmp_path / "again")]) == 0
    for name in ("path.json", "tuned.toml"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_clip_norm_tuned_without_noise_is_one_that_a_run_clips_to():
    config = run_config(clip=0.3, epsilon=math.inf)
    tuned = tuned_settings(config, {"clip": 0.7, "lam": 2.0})
    assert (tuned.clip, tuned.lam, tuned.noise_multiplier) == (0.7, 2.0, 0.0)
    assert tuned.epsilon is None
    assert tuned.clips
    private = tuned_settings(config.replace(epsilon=2.0), {"clip": 0.7})
    assert (private.clip, private.epsilon, private.noise_multiplier) == (0.7, 2.0, None)
    # No ε can be aimed at with a mechanism that promises none.
    published = tuned_settings(run_config(mechanism="client-noise"), {"clip": 0.7})
    assert (published.clip, published.noise_multiplier) == (0.7, 0.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--wrt lamda",
            "lamda .*lam",
        ),
        ("--wrt ,", "wrt must be a list, as in a,b"),
        ("--wrt lam,clip,lam", "wrt must name lam once, got lam,clip,lam"),
        ("--wrt sampling-rate", "sampling-rate cannot be tuned"),
        ("--wrt noise-multiplier", "noise-multiplier"),
        ("--wrt epsilon", "epsilon"),
        ("--wrt mu", "mu .*learning-rate"),
        ("--wrt clip --algorithm local", "clip"),
        ("--lam 0 --wrt lam", "lam "),
        ("--clip inf --wrt clip", "clip "),
        ("--exact-sums --clip 1", "exact-sums has no derivative"),
        ("--metric accuracy", "accuracy "),
        ("--held-out-clients 0.01", "held out"),
    ],
)
def test_bad_input_is_one_line_and_code_2(flags, message, tmp_path, capsys):
    out = tmp_path / "out"
    small = SMALL[:-2] if "--wrt" in flags else SMALL
    assert main([*small, *flags.split(), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert re.match(rf"fedjaxsim: error: .*{message}", error), error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_directory_is_needed(capsys):
    assert main(SMALL) == 2
    assert "tune needs --out" in capsys.readouterr().err
