"""The one format of states in files."""

import hashlib
import json
import logging
import math
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from support.problems import same

from fedjaxsim.engine.checkpoint import KEPT, CheckpointFolder
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.events import Gaussian


class State(NamedTuple):
    round: jax.Array
    weights: dict
    ledger: ledger.Charges
    key: jax.Array
    empty: jax.Array
    nothing: tuple = ()


@jax.jit
def charged() -> ledger.Charges:
    account = ledger.no_charges(SamplingScheme("full", 3, 3), Gaussian(), 2)
    return ledger.charge(account, 1.5, 0.25, 0)


def state(seed: int) -> State:
    key = jax.random.key(seed)
    weights = {"w": jax.random.normal(key, (3, 2)), "b": jnp.full((2,), 1.5, jnp.bfloat16)}
    return State(jnp.int32(seed), weights, charged(), key, jnp.zeros((0, 4)))


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


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_few_are_kept_and_a_later_one_is_of_another_past(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    for round_ in range(2 * KEPT):
        checkpoints.save(round_, state(round_), {})
    assert files(tmp_path) == ["3.state", "4.state", "5.state"]
    checkpoints.save(4, state(99), {"other": True})
    assert files(tmp_path) == ["3.state", "4.state"]
    assert last(checkpoints).note == {"other": True}
    assert same(last(checkpoints).state(state(0)), state(99))


def test_a_reader_of_the_live_folder_sees_whole_checkpoints(tmp_path):
    checkpoints, stop = CheckpointFolder(tmp_path), threading.Event()
    saved = state(1)

    def write() -> None:
        for round_ in range(40):
            checkpoints.save(round_, saved, {"round": round_})
        stop.set()

    checkpoints.save(0, saved, {"round": 0})
    writer = threading.Thread(target=write)
    writer.start()
    rounds = []
    while not stop.is_set():
        rounds.append(last(checkpoints))
    writer.join()
    assert all(each.note == {"round": each.round} for each in rounds)
    assert [each.round for each in rounds] == sorted(each.round for each in rounds)


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


def test_a_state_of_other_precision_is_refused_in_words(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, state(1), {})
    with jax.enable_x64(True), pytest.raises(ValueError, match="JAX_ENABLE_X64=0 to go on"):
        last(checkpoints)
    assert last(checkpoints).round == 1


def test_damage_anywhere_is_noticed_and_the_one_before_is_read(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, {"settings": "a"})
    for round_ in (1, 2):
        checkpoints.save(round_, state(round_), {"rows": [1, 2]})
    before, file = (tmp_path / "1.state").read_bytes(), tmp_path / "2.state"
    good = file.read_bytes()
    CheckpointFolder(tmp_path / "other", {"settings": "b"}).save(2, state(2), {})
    flipped = [
        good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :] for place in range(len(good))
    ]
    cut = [good[:size] for size in range(0, len(good), 7)]
    for bad in (*flipped, *cut, good + b"x", before, (tmp_path / "other" / "2.state").read_bytes()):
        file.write_bytes(bad)
        assert last(checkpoints).round == 1
        assert "2.state" in last(checkpoints).skipped[0]
    assert same(last(checkpoints).state(state(0)), state(1))
    (tmp_path / "1.state").unlink()
    with pytest.raises(ValueError, match="other settings"):
        last(checkpoints)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="damaged"):
        last(checkpoints)
    file.write_bytes(good)
    assert same(last(checkpoints).state(state(0)), state(2))


def test_one_that_cannot_be_read_is_skipped(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, state(1), {})
    (tmp_path / "2.state").mkdir()
    assert last(checkpoints).round == 1
    assert "2.state" in last(checkpoints).skipped[0]


def test_a_whole_checkpoint_with_other_fields_is_of_another_version(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, state(1), {})
    file = tmp_path / "1.state"
    content = file.read_bytes()[: -hashlib.sha256().digest_size]
    content = content.replace(b'"round"', b'"more": 1, "round"', 1)
    file.write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(ValueError, match=r"1\.state was written by another version"):
        last(checkpoints)


def test_a_file_that_belongs_to_a_checkpoint_is_checked_with_it(tmp_path):
    def check(note):
        if note["bad"]:
            raise ValueError("its metrics are gone")

    checkpoints = CheckpointFolder(tmp_path, check=check)
    for round_ in (1, 2):
        checkpoints.save(round_, state(round_), {"bad": round_ == 2})
    assert last(checkpoints).round == 1
    assert "its metrics are gone" in last(checkpoints).skipped[0]


def test_nothing_is_said_and_no_thread_is_left(tmp_path, capfd, caplog):
    checkpoints = CheckpointFolder(tmp_path)
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING):
        checkpoints.save(1, state(1), {})
        last(checkpoints).state(state(0))
    assert set(threading.enumerate()) == before
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_the_first_line_is_plain_json(tmp_path):
    CheckpointFolder(tmp_path).save(1, state(1), {"rows": []})
    with (tmp_path / "1.state").open("rb") as stream:
        assert json.loads(stream.readline())["note"] == {"rows": []}
