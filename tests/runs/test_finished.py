"""A run's folder as an object, and the commands that predict and show coefficients."""

import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import fedjaxsim as fjs
from fedjaxsim.cli import main
from fedjaxsim.data.aligned import no_model_for, stranger_of
from fedjaxsim.runs import finished as finished_runs

RUN = (
    "run --data csv:rows.csv --client who --target y --one-hot kind --range x=0:9,y=0:120 "
    "--algorithm local --loss squared --rounds 300 --eval-every 300 --local-steps 3 "
    "--batch-size 40 --seed 1 --quiet --out run"
)


def rows(n=120):
    """Lines of known intercept and slope for each client and kind, clients in any order."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"who": rng.permutation(np.repeat(["b", "a", "c"], n // 3))})
    frame["x"] = rng.uniform(0, 9, n)
    frame["kind"] = rng.choice(["m", "f"], n)
    frame["y"] = frame.who.map({"a": 20.0, "b": 50.0, "c": 80.0}) + 3 * frame.x
    frame["y"] += np.where(frame.kind == "m", 5.0, 0.0)
    return frame


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run on a table, in which commands run."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rows().to_csv("rows.csv", index=False)
        assert main(RUN.split()) == 0
        yield folder


@pytest.fixture(scope="module")
def run(finished):
    return fjs.load_run(finished / "run")


def test_a_run_is_an_object(run):
    assert "local on csv:" in repr(run)
    assert [*run.history["round"]] == [0, 300]
    assert run.summary["rounds"] == 300
    assert run.guarantee.find("zero_out").epsilon == 0
    assert run.models()["kernel"].shape == (3, 1, 3)
    evaluation = run.sim.evaluate(run.state, run.hparams)
    assert evaluation.mean("loss") == pytest.approx(run.summary["test_loss"], rel=1e-5)


def test_the_object_predicts_rows_in_their_order_and_units(run):
    frame, table = rows(), run.predict()
    assert [*table] == ["client", "row", "split", "prediction", "target"]
    assert [*table.client] == [*frame.who]
    np.testing.assert_allclose(table.target, frame.y, rtol=1e-6)  # stored as float32
    tested = table[table.split == "test"]
    assert len(tested) == 24  # a fifth of each client's 40 rows; the rest trains
    assert {*table.split} == {"train", "test"}
    error = np.mean((tested.prediction - tested.target) ** 2)
    variance = np.var(tested.target)
    assert error / variance == pytest.approx(run.summary["test_nmse"], rel=1e-4)
    np.testing.assert_allclose(table.prediction, frame.y, atol=1.0)
    found = run.coefficients().set_index("client")
    np.testing.assert_allclose(found["x"], 3, atol=0.1)
    heights = found["intercept"] + found["kind=f"]
    np.testing.assert_allclose(heights.loc[["a", "b", "c"]], [20, 50, 80], atol=1.0)
    np.testing.assert_allclose(found["kind=m"] - found["kind=f"], 5, atol=0.5)


def test_a_run_predicts_where_its_data_were_moved_to(finished, run, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(finished / "run", moved)
    shutil.copy(finished / "rows.csv", tmp_path / "others.csv")
    text = (moved / "config.toml").read_text()
    paths = str(finished / "rows.csv"), str(tmp_path / "others.csv")
    (moved / "config.toml").write_text(text.replace(*paths))
    assert fjs.load_run(moved).predict().equals(run.predict())


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("predict run --data hf:absent", "rows of hf need target, which the run lacks"),
        ("predict run --data csv:rows.csv --client nobody", "there is no column 'nobody'"),
        ("evaluate run --split validation", "split validation has no rows"),
        ("evaluate run --by class", "needs a task that predicts one class"),
    ],
)
def test_what_rows_or_models_lack_is_refused(finished, capsys, command, sentence):
    assert main(command.split()) == 2
    assert sentence in capsys.readouterr().err


def test_commands_write_what_the_object_says(finished, run, capsys):
    # Without a target, with one kind alone, in another order of columns, one beyond its range.
    new = pd.DataFrame({"kind": ["m", "m", "m"], "x": [1.0, 20.0, 2.0], "who": ["c", "a", "b"]})
    new.to_csv("new.csv", index=False)
    assert main(["predict", "run", "--data", "csv:new.csv", "--out", "said.parquet"]) == 0
    assert "1 of 3 rows have a feature beyond its range" in capsys.readouterr().err
    said = pd.read_parquet("said.parquet")
    assert [*said.client] == [*new.who]
    assert [*said.clipped] == [False, True, False]
    np.testing.assert_allclose(said.prediction, [88, 52, 61], atol=1.5)  # x = 20 counts as 9
    pd.testing.assert_frame_equal(said, run.predict(new))
    again = run.predict(new.assign(y=[90.0, None, 130.0]))  # no model reads it, no range clips it
    np.testing.assert_array_equal(again.pop("target"), [90, np.nan, 130])
    pd.testing.assert_frame_equal(said, again)
    assert [*said.split] == ["new"] * 3
    assert main(["coefficients", "run", "--out", "table.csv"]) == 0
    written = pd.read_csv(finished / "table.csv")
    np.testing.assert_allclose(written["x"], run.coefficients()["x"])
    capsys.readouterr()
    assert main(["coefficients", "run"]) == 0
    assert capsys.readouterr().out.split()[:3] == ["client", "intercept", "x"]
    assert main(["coefficients", "run", "--standard-errors", "personal"]) == 0
    printed = capsys.readouterr().out.split()
    assert printed[:4] == ["client", "coefficient", "estimate", "sampling"]
    assert main(["coefficients", "run", "--standard-errors", "published"]) == 2
    assert "need clients that send changes of one published model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kind,x,who\nm,1,eve\n", "client 'eve' took no part"),
        (
            "kind,x,who\nm,1,new\n",
            "rows without a column of clients (client names it) belong to a new client, 'new'",
        ),
        (
            "kind,x\nm,1\n",
            "rows without a column of clients (client names it) belong to a new client, 'new'",
        ),
        ("kind,x\nm,1\n", "a run that does, as with --algorithm ditto"),
        ("kind,who\nm,a\n", "lack column 'x'"),
    ],
)
def test_rows_that_the_models_cannot_predict_are_refused(finished, capsys, line, words):
    (finished / "bad.csv").write_text(line)
    assert main(["predict", "run", "--data", "csv:bad.csv", "--out", "bad.parquet"]) == 2
    assert words in capsys.readouterr().err
    assert not (finished / "bad.parquet").exists()


def test_rows_without_a_client_are_nobodys_whatever_clients_are_called():
    population = fjs.data.from_dataframe(
        pd.DataFrame({"who": ["new", "new'"], "x": [1.0, 2.0], "y": [0.0, 1.0]}),
        client="who",
        target="y",
    )
    name = stranger_of(population)
    assert name not in {*population.names}
    assert str(no_model_for(population, np.array([name]), "")).startswith("rows without a column")
    told = str(no_model_for(population, np.array(["new", "eve"]), "says so"))
    assert told.startswith("client 'eve' took no part in the run (1 such in all), which published")


@pytest.mark.parametrize(
    ("classes", "targets", "count"),
    [
        (None, ["a"], 0),
        (("a", "b"), ["a", "b"], 0),
        (("a", "b"), ["z", "a", "z"], 2),
        (("0", "1"), ["0.0", "1.0"], 0),  # beside missing ones
        (("0", "1"), ["0.5", "1.0"], 1),
    ],
)
def test_new_targets_that_are_no_class_of_the_run_are_named(classes, targets, count):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        finished_runs._warn_of_unknown(classes, np.array(targets))
    assert len(told) == (count > 0)
    if told:
        start = f"{count} of {len(targets)} targets are no class of the run, such as '{targets[0]}'"
        assert str(told[0].message).startswith(start)


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"config\.toml"):
        fjs.load_run(tmp_path)
    assert main(["predict", str(tmp_path), "--quiet"]) == 2
    assert main(["coefficients", str(tmp_path), "--out", "x.txt"]) == 2
    assert "csv or" in capsys.readouterr().err


def test_new_rows_have_the_units_of_the_run_before_they_are_preprocessed(tmp_path, monkeypatch):
    frame = pd.DataFrame({"who": "a", "x": [10.0, 0.0], "z": 1.0, "y": [0.0, 1.0]})
    new = fjs.data.from_dataframe(frame, client="who", target="y")
    of_run = fjs.data.scale(new, {"x": (0, 10), "z": (-1, 1)})
    run = finished_runs.FinishedRun(tmp_path)
    vars(run)["config"] = SimpleNamespace(get=lambda *_: ("unit-rows",), replace=lambda **_: None)
    monkeypatch.setattr(run, "_read", lambda *_: (new, None))
    monkeypatch.setattr(finished_runs, "population_of", lambda _: of_run)
    population, clipped, _ = run._population("new", None)
    # Stored as (1, 1) and (−1, 1), of norm √2.
    assert population is not None
    assert clipped is not None
    np.testing.assert_allclose(population.fields["x"], np.array([[1, 1], [-1, 1]]) / np.sqrt(2))
    assert not clipped.any()


@pytest.mark.thorough
def test_preprocessing_is_that_of_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    frame = rows().assign(one=1.0).drop(columns="kind")
    frame.to_csv("rows.csv", index=False)
    command = (
        "run --data csv:rows.csv --client who --target y --range x=0:9 --loss squared --rounds 2 "
        "--algorithm fedavg --preprocess drop-constant,unit-rows --quiet --out run"
    )
    assert main(command.split()) == 0
    run = fjs.load_run("run")
    said = run.predict(frame)
    np.testing.assert_allclose(said.prediction, run.predict().prediction, rtol=1e-5)
    far = run.predict(frame.assign(x=frame.x.where(frame.index != 7, 99)))
    assert [*np.flatnonzero(far.clipped)] == [7]
    # A client that took no part predicts with the published model, as all do here.
    strangers = run.predict(frame.assign(who="eve"))
    np.testing.assert_allclose(strangers.prediction, said.prediction, rtol=1e-5)
    frame.assign(who=["eve", "bob", *frame.who[2:]]).to_csv("strangers.csv", index=False)
    capsys.readouterr()
    assert main(["predict", "run", "--data", "csv:strangers.csv", "--out", "p.csv", "--quiet"]) == 0
    told = "rows of clients who took no part (eve and 1 more) are predicted by the published model"
    assert told in capsys.readouterr().err


@pytest.mark.thorough
def test_rows_of_another_shape_are_refused_before_a_model_sees_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, size in (("rows", 8), ("large", 16)):
        x = rng.normal(size=(40, size, size, 1)).astype(np.float32)
        np.savez(f"{name}.npz", x=x, y=np.arange(40) % 2, client=np.arange(40) // 10)
    command = "run --data npz:rows.npz --algorithm fedavg --rounds 1 --quiet --out run"
    assert main(command.split()) == 0
    shapes = r"the run's shape \(8, 8, 1\), got \(16, 16, 1\)"
    with pytest.raises(ValueError, match=shapes):
        fjs.load_run("run").predict("npz:large.npz")
