import json
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.events import Event, Scheme
from fedjaxsim.report.files import strict
from fedjaxsim.runs.directory import RunDirectory


class State(NamedTuple):
    round: jax.Array
    weights: dict
    ledger: ledger.Charges
    key: jax.Array
    nothing: tuple = ()


def state(seed: int) -> State:
    key = jax.random.key(seed)
    weights = {"w": jax.random.normal(key, (3, 2)), "b": jnp.full((2,), 1.5, jnp.bfloat16)}
    return State(
        jnp.int32(seed),
        weights,
        ledger.charge(
            ledger.no_charges(Scheme("everyone", 3, 3), Event("gaussian"), 2), 1.5, 0.25, 0
        ),
        key,
    )


def test_a_state_comes_back_bit_by_bit_with_its_types(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_state(state(7))
    loaded = directory.load_state(state(8))
    assert jax.tree.structure(loaded) == jax.tree.structure(state(7))
    assert jax.random.key_data(loaded.key).tolist() == jax.random.key_data(state(7).key).tolist()
    assert jax.random.normal(loaded.key) == jax.random.normal(state(7).key)
    for got, expected in zip(
        jax.tree.leaves(loaded._replace(key=())),
        jax.tree.leaves(state(7)._replace(key=())),
        strict=True,
    ):
        assert got.dtype == expected.dtype
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


def test_the_names_in_the_file_are_the_paths_in_the_state(tmp_path):
    directory = RunDirectory.create(tmp_path)
    directory.write_state(state(1))
    with np.load(tmp_path / "state.npz") as file:
        assert set(file.files) == {
            "round", "weights['w']", "weights['b']", "key",
            "ledger.noise_multiplier", "ledger.sampling_rate", "ledger.rounds",
            "ledger.overflowed",
        }  # fmt: skip
        assert file["weights['w']"].shape == (3, 2)


def test_a_state_of_another_simulation_or_a_damaged_one_is_refused(tmp_path):
    directory = RunDirectory.create(tmp_path)
    directory.write_state(state(1))
    other = state(1)._replace(weights={"w": jnp.zeros((3, 2))})
    with pytest.raises(ValueError, match=r"another kind of state: weights\['b'\] differ"):
        directory.load_state(other)
    other = state(1)
    other.weights["w"] = jnp.zeros((2, 2))
    with pytest.raises(ValueError, match=r"\['w'\] must be float32\[2, 2\], got float32\[3, 2\]"):
        directory.load_state(other)
    path = tmp_path / "state.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"state\.npz is damaged"):
        directory.load_state(state(1))


def test_what_is_not_finite_becomes_null():
    value = {"a": math.inf, "b": [np.float32("nan"), np.int32(3)], "c": jnp.asarray([1.0, jnp.inf])}
    assert strict(value) == {"a": None, "b": [None, 3], "c": [1.0, None]}
    assert json.dumps(strict(value), allow_nan=False)


def test_metrics_are_one_object_a_line(tmp_path):
    directory = RunDirectory.create(tmp_path)
    directory.append_metrics({"round": 0, "epsilon": math.inf})
    directory.append_metrics({"round": 5, "epsilon": np.float64(0.5)})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"round": 0, "epsilon": null}\n{"round": 5, "epsilon": 0.5}\n'
    )
    assert directory.metrics()[1] == {"round": 5, "epsilon": 0.5}


def test_clients_are_one_line_each(tmp_path):
    directory = RunDirectory.create(tmp_path)
    columns = {"name": np.asarray(["a,b", "ü"]), "rows": [3, 4], "accuracy": [0.5, math.nan]}
    directory.write_clients(columns)
    assert (tmp_path / "clients.csv").read_text() == 'name,rows,accuracy\n"a,b",3,0.5\nü,4,\n'


def test_a_directory_with_a_run_is_kept_unless_told_otherwise(tmp_path):
    directory = RunDirectory.create(tmp_path)
    directory.write_summary({"round": 1})
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds a run \(summary.json\).*--overwrite"):
        RunDirectory.create(tmp_path)
    RunDirectory.create(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_no_directory(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ValueError, match="must be a directory, and is a file"):
        RunDirectory.create(path)
    with pytest.raises(ValueError, match="cannot be written to: Not a directory"):
        RunDirectory.create(path / "below")


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no directory .*absent"):
        RunDirectory(tmp_path / "absent").summary()
    with pytest.raises(FileNotFoundError, match=r"holds no summary\.json"):
        RunDirectory(tmp_path).summary()
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json is damaged"):
        RunDirectory(tmp_path).summary()
    (tmp_path / "config.toml").write_text("= 3")
    with pytest.raises(ValueError, match=r"config\.toml is damaged"):
        RunDirectory(tmp_path).config()


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path):
    directory = RunDirectory.create(tmp_path)
    directory.write_summary({"round": 1})
    with pytest.raises(TypeError):
        directory.write_summary({"round": object()})
    assert directory.summary() == {"round": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
