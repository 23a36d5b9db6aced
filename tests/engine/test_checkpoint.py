"""The one format of states in files."""

import contextlib
import json
import logging
import math
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.engine.checkpoint import KEPT, CheckpointFolder
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.events import PrivacyEvent, SamplingScheme


class State(NamedTuple):
    round: jax.Array
    weights: dict
    ledger: ledger.Charges
    key: jax.Array
    empty: jax.Array
    nothing: tuple = ()


def state(seed: int) -> State:
    key = jax.random.key(seed)
    weights = {"w": jax.random.normal(key, (3, 2)), "b": jnp.full((2,), 1.5, jnp.bfloat16)}
    account = ledger.no_charges(SamplingScheme("full", 3, 3), PrivacyEvent("gaussian"), 2)
    charges = ledger.charge(account, 1.5, 0.25, 0)
    return State(jnp.int32(seed), weights, charges, key, jnp.zeros((0, 4)))


def same(one, other) -> bool:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(bits(a) == bits(b) for a, b in pairs)


def bits(leaf) -> tuple:
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    raw = np.asarray(jax.random.key_data(leaf) if key else leaf)
    return str(leaf.dtype), raw.shape, raw.tobytes()


def last(checkpoints: CheckpointFolder):
    found = checkpoints.last()
    assert found is not None
    return found


def test_a_state_comes_back_bit_by_bit_with_its_types_and_its_note(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "a" / "b")
    assert checkpoints.last() is None
    note = {"rows": [{"loss": math.nan, "epsilon": math.inf, "value": 0.1}], "none": None}
    checkpoints.save(7, state(7), note)
    found = last(checkpoints)
    assert (found.round, str(found.note)) == (7, str(note))
    loaded = found.state(state(8))
    assert same(loaded, state(7))
    assert not same(loaded, state(8))
    assert jax.random.normal(loaded.key) == jax.random.normal(state(7).key)


def test_the_last_few_are_kept_and_the_same_round_is_not_written_twice(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    for round_ in range(2 * KEPT):
        checkpoints.save(round_, state(round_), {})
    checkpoints.save(2 * KEPT - 1, state(99), {"other": True})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["3", "4", "5"]
    assert last(checkpoints).note == {}
    assert same(last(checkpoints).state(state(0)), state(5))


def test_what_a_killed_process_left_is_no_checkpoint(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(3, state(3), {})
    (tmp_path / "5.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    checkpoints.save(6, state(9), {})
    (tmp_path / "6" / "note.json").unlink()
    assert last(checkpoints).round == 3
    checkpoints.save(4, state(4), {})
    assert same(last(checkpoints).state(state(0)), state(4))
    checkpoints.save(6, state(6), {})
    assert same(last(checkpoints).state(state(0)), state(6))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "6"]


def test_a_state_of_another_simulation_is_refused(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, state(1), {})
    other = state(1)._replace(weights={"w": jnp.zeros((3, 2))})
    with pytest.raises(ValueError, match=r"weights\['b'\]"):
        last(checkpoints).state(other)
    other = state(1)
    other.weights["w"] = jnp.zeros((2, 2))
    with pytest.raises(ValueError, match=r"\['w'\].*float32\[3, 2\]"):
        last(checkpoints).state(other)


def test_a_damaged_file_is_refused_unless_nothing_depends_on_it(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, state(1), {"rows": [1, 2]})
    folder = tmp_path / "1"
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        good = path.read_bytes()
        middle = len(good) // 2
        changed = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :] if good else b"x"
        for bad in (b"", changed):
            path.write_bytes(bad)
            read = path.parent != folder or path.name == "note.json"
            refusal = pytest.raises(ValueError, match="damaged")
            with refusal if read else contextlib.nullcontext():
                found = last(checkpoints)
                assert found.note == {"rows": [1, 2]}
                assert same(found.state(state(0)), state(1))
        path.write_bytes(good)
    assert same(last(checkpoints).state(state(0)), state(1))


def test_nothing_is_said_and_no_thread_is_left(tmp_path, capfd, caplog):
    checkpoints = CheckpointFolder(tmp_path)
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING):
        checkpoints.save(1, state(1), {})
        last(checkpoints).state(state(0))
    assert set(threading.enumerate()) == before
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_a_note_is_plain_json(tmp_path):
    CheckpointFolder(tmp_path).save(1, state(1), {"rows": []})
    seal = json.loads((tmp_path / "1" / "note.json").read_text())
    assert json.loads(seal["content"])["note"] == {"rows": []}
