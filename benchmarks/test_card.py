"""The five minutes with a card: rounds by hand, kernels of a trace, and the table."""

import io
import json
import types
from typing import Any

import card
import card_profile
import chex
import hand_written
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerator import settings_of
from hand_written import rounds_of_run

from fedjaxsim.models import network
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config


def to_one_device(tree):
    """Copy arrays to where rounds by hand are compiled."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree)


@pytest.mark.thorough
@pytest.mark.parametrize("system", ["fedavg", "pmtl", "local"])
def test_rounds_by_hand_are_those_of_the_engine(system):
    """Where nothing is random: all clients take one step on all of their rows, without noise."""
    settings = {
        "data": "random", "shape": (3,), "labels": 2, "clients": 4, "rows": (5,),
        "algorithm": system, "sampling": "full", "local_epochs": 1, "batch_size": 5,
    }  # fmt: skip
    if system != "local":
        settings |= {"clip": 0.1, "noise_multiplier": 0.0}
    if system == "pmtl":
        settings["message"] = "update"
    experiment = prepare(run_config(**settings))
    simulation, hparams = experiment.simulation, experiment.hparams
    state = simulation.init(0, hparams)
    for size in (None, 2):
        (store, w, key), traced = rounds_of_run(experiment, size)
        if system != "local":
            w = to_one_device(state.shared.params)
        if system != "fedavg":
            store = to_one_device(state.personal)
        store, w, _ = traced(3)()((store, w, key))
        after = state
        for _ in range(3):
            after, _ = simulation.round(after, hparams)
        if system != "local":
            chex.assert_trees_all_close(w, after.shared.params, rtol=1e-4, atol=1e-6)
        if system != "fedavg":
            chex.assert_trees_all_close(store, after.personal, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_convolutions_by_hand_are_traced_before_other_threads_start(monkeypatch):
    """While they are traced, everybody's convolutions are replaced."""
    settings = settings_of("femnist-cnn-fedavg", rehearse=True)
    before = network.conv2d
    _, traced = rounds_of_run(prepare(run_config(**settings)))
    compiled = traced(1)
    assert network.conv2d is before
    monkeypatch.setattr(hand_written, "direct", None)  # called no more
    assert callable(compiled())


@pytest.mark.thorough
def test_a_process_measures_each_form_and_alone_tells_of_memory(monkeypatch, capsys):
    monkeypatch.setattr(card, "wait_for_go", lambda name: None)
    for alone, forms in (
        (False, ["engine", "by hand, vmap", "by hand, map of 2"]),
        (True, ["engine"]),
    ):
        card.measure("million-own", rehearse=True, alone=alone)
        found = json.loads(capsys.readouterr().out)
        assert list(found["seconds"]) == forms
        assert not found["refused"]
        stages = ["rows", "states", "compilation", "first rounds", "evaluation"]
        assert list(found["memory"]) == (stages if alone else stages[:2])


def test_a_process_that_fails_says_which_error_it_was(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('{\"a\": 1}', flush=True)\nsys.argv[3]\n")
    child = card.Child(["--rounds"], str(script))
    assert child.line(20) == {"a": 1}
    assert child.line(20) == {"failed": "IndexError: list index out of range"}
    child.end()


def test_a_system_that_fails_leaves_the_others_be(monkeypatch, capsys):
    def law(name, rehearse):
        if name == "ifca":
            raise ValueError("no\nmemory")
        return {"same bits": True, "off by": 0.0}

    monkeypatch.setattr(card, "_law_of_a_system", law)
    card.laws_of_systems(["ifca", "local"], rehearse=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"law ifca": {"failed": "no memory"}},
        {"last": True, "law local": {"same bits": True, "off by": 0.0}},
    ]


def test_a_law_is_told_as_it_comes_and_a_process_that_is_late_stays(tmp_path, monkeypatch):
    clock, told = types.SimpleNamespace(monotonic=lambda: 0), {}
    monkeypatch.setattr(card, "time", clock)

    def child(name, *lines):
        script = tmp_path / name
        script.write_text("import time\n" + "\n".join(lines))
        return card.Child([], str(script))

    law = "print('{\"law %s\": 1%s}', flush=True)"
    children = [
        child("late.py", law % ("a", ""), "time.sleep(60)"),
        child("ends.py", law % ("b", ', "last": true')),
        child("fails.py", "raise ValueError('no memory')"),
    ]
    waiting = dict(enumerate(children))
    for law in card.laws_of(waiting, 1):
        told |= law
        if len(told) == 3:
            clock.monotonic = lambda: 2
    assert told == {
        "law a": 1, "law b": 1, "law, process 2": {"failed": "ValueError: no memory"},
    }  # fmt: skip
    assert waiting == {0: children[0]}
    children[0].end()


def test_a_process_that_is_late_stands_still_until_the_others_have_measured():
    told = []

    def child(name, late):
        def line(seconds):
            told.append(f"{name} answers")
            return {"seconds": {name: 1}}

        return types.SimpleNamespace(
            come=lambda seconds: None if late else {"ready": name}, line=line,
            send=lambda sent: told.append(f"{name} {sent.name}"),
            go=lambda: told.append(f"{name} goes"), end=lambda: told.append(f"{name} ends"),
        )  # fmt: skip

    children: dict[str, Any] = {"a": child("a", late=True), "b": child("b", late=False)}
    answers = list(card.measured(children, half=0, end=float("inf")))
    assert answers == [("b", {"seconds": {"b": 1}}), ("a", {"seconds": {"a": 1}})]
    assert told == [
        "a SIGSTOP", "b goes", "b answers", "b ends",
        "a SIGCONT", "a answers", "a goes", "a answers", "a ends",
    ]  # fmt: skip


def test_a_process_whose_parent_is_gone_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit):
        card.wait_for_go("some")
    assert json.loads(capsys.readouterr().out) == {"ready": "some"}


def metadata(kind, pid, name, tid=0):
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def test_kernels_of_a_card_are_those_on_its_streams():
    def event(name, pid, tid, took):
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "dur": took, "args": {}}

    events = [
        metadata("process_name", 1, "/device:GPU:0"), metadata("process_name", 2, "/host:CPU"),
        metadata("thread_name", 1, "Stream #7(Compute)", 7), metadata("thread_name", 1, "Steps", 8),
        event("gemm", 1, 7, 2.0), event("gemm", 1, 7, 3.0), event("copy", 1, 7, 1.0),
        event("0", 1, 8, 9.0), event("launch", 2, 7, 4.0),
    ]  # fmt: skip
    assert card_profile.kernels_of(events) == {"gemm": (2, 5.0), "copy": (1, 1.0)}


def test_the_table_has_ratios_to_the_faster_form_by_hand_and_the_laws_that_are_broken(
    tmp_path, capsys
):
    seconds = {"engine": [1e-3], "by hand, vmap": [4e-3], "by hand, map of 64": [2e-3]}
    (tmp_path / "card.json").write_text(json.dumps({
        "some": {
            "seconds": seconds, "chunk_size": 3, "planned_bytes": 5e6,
            "peak_bytes_of_all_forms": None,
        },
        "too large": {
            "seconds": {"by hand, map of 64": [6e-3], "engine": [2e-3]}, "chunk_size": 3,
            "planned_bytes": 5e6, "peak_bytes_of_all_forms": None,
        },
        "late": {"failed": "not ready"},
        "a step": {"seconds": {"windows": [1e-3], "rows": [2e-3]}},
        "some, alone": {
            "seconds": {"engine": [1e-3]}, "chunk_size": 3, "planned_bytes": 5e6,
            "peak_bytes_of_all_forms": 6e6,
            "memory": {"rows": {"peak": 1e6}, "compilation": {"peak": 6e6}},
        },
        "peer pfl, cnn": {"failed": "No module named 'torch'"},
        "peer fedjax, cnn": {"rounds_per_s": 4.0},
        "peer ours, cnn": {"rounds_per_s": 10.0},
        "peer fedjax, mlp": {"rounds_per_s": 5.0},
        "law fedavg": {"same bits": True, "off by": 1e-6},
        "law pmtl": {"same bits": False, "off by": 1e-6},
        "law ditto": {"same bits": True, "off by": float("nan")},
        "law ifca": {"failed": "out of memory"},
        "law cnn-bfloat16": {"same bits": True, "off by": 1e-3},
        "law, process 1": {"failed": "out of memory"},
    }))  # fmt: skip
    card.print_table(tmp_path / "card.json")
    printed = capsys.readouterr().out
    assert "least ratio 2.00, median 2.50" in printed
    assert "late: failed: not ready" in printed
    assert "a step: windows 1 ms, rows 2 ms\n" in printed
    assert "some, alone: engine 1 ms, 5 / 6 MB, peak after rows 1, compilation 6\n" in printed
    assert "peer pfl, cnn: failed: No module named 'torch'" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["too", "large", "2", "–", "6", "3.00", "3", "5", "/", "0", "MB"] in rows
    assert ["pfl", "–", "–", "–", "–"] in rows
    assert ["fedjax", "250", "2.5", "200", "–"] in rows
    assert ["ours", "100", "1.0", "–", "–"] in rows
    assert "2 of 5 laws hold" in printed
    assert "law pmtl" in printed
    assert "law ditto" in printed
    assert "process 1 did not end: out of memory" in printed
