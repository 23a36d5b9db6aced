import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim import store
from fedjaxsim.report.files import read_json, strict, write_csv, write_json
from fedjaxsim.runs.directory import CLIENTS, GUARANTEE, SUMMARY, RunDirectory


def names(folder):
    return [path.name for path in folder.iterdir() if path.name != store.LOCK]


def test_what_is_not_finite_becomes_null():
    value = {"a": math.inf, "b": [np.float32("nan"), np.int32(3)], "c": jnp.asarray([1.0, jnp.inf])}
    assert strict(value) == {"a": None, "b": [None, 3], "c": [1.0, None]}
    assert json.dumps(strict(value), allow_nan=False)


def test_a_run_that_goes_on_has_no_summary_any_more(tmp_path):
    directory = RunDirectory.create(tmp_path)
    for name in (SUMMARY, GUARANTEE):
        write_json(tmp_path / name, {"round": 5})
    directory.write_config({"rounds": 6})
    assert names(tmp_path) == ["config.toml"]


def test_a_run_that_is_there_takes_another_name(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.write_config({"rounds": 3, "known_as": {"name": "a", "tags": ["x"]}})
    (run.path / "summary.json").write_text("{}")
    run.label({"name": "b"})
    assert run.config() == {"rounds": 3, "known_as": {"name": "b", "tags": ["x"]}}
    assert (run.path / "summary.json").exists()  # it stays finished


def test_clients_are_one_line_each(tmp_path):
    columns: dict[str, Any] = {"name": ["a,b", "ü"], "train_rows": [3, 4], "test_rows": [1, 0]}
    columns = {name: np.asarray(each) for name, each in columns.items()}
    columns["accuracy"] = np.array([0.5, math.nan])
    write_csv(tmp_path / CLIENTS, columns)
    text = 'name,train_rows,test_rows,accuracy\n"a,b",3,1,0.5\nü,4,0,\n'
    assert (tmp_path / "clients.csv").read_text() == text


def test_a_directory_with_a_run_is_kept_unless_told_otherwise(tmp_path):
    RunDirectory.create(tmp_path)
    write_json(tmp_path / SUMMARY, {"round": 1})
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="--overwrite"):
        RunDirectory.create(tmp_path)
    RunDirectory.create(tmp_path, overwrite=True)
    assert names(tmp_path) == ["notes.txt"]


def test_a_file_is_no_directory(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ValueError, match="file"):
        RunDirectory.create(path)
    with pytest.raises(ValueError, match="below"):
        RunDirectory.create(path / "below")


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        RunDirectory(tmp_path / "absent").summary()
    with pytest.raises(FileNotFoundError, match=r"summary\.json"):
        RunDirectory(tmp_path).summary()
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json"):
        RunDirectory(tmp_path).summary()
    for damaged in ("3", "{}", "[]", '{"assumed": 3}', '{"assumed": [[]]}'):
        (tmp_path / "guarantee.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"guarantee\.json is damaged"):
            RunDirectory(tmp_path).guarantee()
    for damaged in ("3", "[3]", '[{"digest": [], "rounds": 1}]', '[{"digest": "ab"}]'):
        (tmp_path / "guarantee.json").write_text(f'{{"assumed": [], "draws": {damaged}}}')
        with pytest.raises(ValueError, match=r"guarantee\.json is damaged"):
            RunDirectory(tmp_path).draws()
    (tmp_path / "config.toml").write_text("= 3")
    with pytest.raises(ValueError, match=r"config\.toml"):
        RunDirectory(tmp_path).config()


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path):
    RunDirectory.create(tmp_path)
    write_json(tmp_path / SUMMARY, {"round": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / SUMMARY, {"round": object()})
    assert read_json(tmp_path / "summary.json") == {"round": 1}
    assert names(tmp_path) == ["summary.json"]


@pytest.mark.parametrize("text", ["", "null", '{"a": 1}', '{"round": "a"}', '{"round": Infinity}'])
def test_metrics_that_no_run_wrote_are_refused(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        RunDirectory(tmp_path).metrics()


def test_overwriting_a_run_leaves_what_is_not_the_runs(tmp_path):
    RunDirectory.create(tmp_path)
    write_json(tmp_path / SUMMARY, {})
    for name in ("curves.png", "mine.png"):
        (tmp_path / name).write_bytes(b"")
    RunDirectory.create(tmp_path, overwrite=True)
    assert names(tmp_path) == ["mine.png"]
