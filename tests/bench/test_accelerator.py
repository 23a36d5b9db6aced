"""The ten minutes with a card, rehearsed on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import problems
import pytest
from problems import HANGS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accelerator.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return problems.script(SCRIPT)


def test_sizes_around_the_default_are_tried_and_none_above_the_cohort(script):
    assert script.tried(256, 10_000) == [64, 16, 1024]
    assert script.tried(178, 100) == [44, 64, 11]
    assert script.tried(62_500, 10**6) == [15_625, 3906, 250_000]
    assert script.tried(64, 100) == [16, 4]
    assert script.tried(2, 3) == []


def test_the_place_of_the_default_counts_those_that_are_faster(script):
    def record(default, *others):
        chunks = [{} if speed is None else {"rounds_per_second": speed} for speed in others]
        return {"default": {"rounds_per_second": default}, "chunks": chunks}

    assert script.place(record(5.0, 4.0, 6.0, 7.0)) == (3, 4)
    assert script.place(record(5.0, 4.0, None)) == (1, 3)  # one that did not fit
    assert script.place(record(5.0)) is None
    assert script.place({"default": None, "chunks": []}) is None


def test_names_are_those_of_the_list_in_its_order(script):
    assert script.chosen("convolutions, softmax-10k") == ["softmax-10k", "convolutions"]
    assert script.chosen(None) == list(script.NAMES)
    with pytest.raises(ValueError, match="unknown workload 'softmx'"):
        script.chosen("softmx")


def test_workloads_are_files_of_settings_with_changes(script):
    for name, (_, changes) in script.WHAT.items():
        settings = script.settings_of(name, False, chunk_size=16)
        assert settings["chunk_size"] == 16
        given = {key: list(v) if isinstance(v, tuple) else v for key, v in changes.items()}
        assert given.items() <= settings.items()
        assert script.settings_of(name, True)["clients"] == 6


def test_a_share_of_a_ceiling_is_the_rate_over_it(script):
    machine = {"devices": 1, "device_kind": "card", "platform": "gpu", "versions": {"jax": "1"}}
    limits = {"machine": machine, "memory_bytes": 2**33, "float32_gflops": 400.0,
              "bfloat16_gflops": 800.0, "memory_gb_per_s": 50.0}  # fmt: skip
    default = {"rounds_per_second": 10.0, "compile_seconds": 3.0, "gflop_per_round": 8.0,
               "mb_per_round": 2500.0, "device_peak_mb": None, "rounds_mb": 700.0,
               "chunk_size": 100}  # fmt: skip
    other = {"chunk_size": 25, "rounds_per_second": 5.0, "compile_seconds": 3.0,
             "device_peak_mb": 9.0, "rounds_mb": 700.0}  # fmt: skip
    record = {**script.empty(), "default": default, "chunks": [other]}
    results = {"rehearsal": False, "ceilings": limits, "seconds": 1.0}
    page = script.page({**results, "measured": {"softmax-10k": record}})
    # 80 GFLOP/s of 400 and of 800, and 25 GB/s of 50.
    assert "| softmax-10k | 10 | 3 | 700 | 80 | 20 % | 10 % | 50 % |" in page
    assert "| softmax-10k | 100 (default) | 10 | 1 | 3 | 700 |" in page
    assert "| softmax-10k | 25 | 5 | 0.5 | 3 | 9 |" in page
    assert "- softmax-10k: the default is 1 of 2" in page


def test_a_workload_that_is_cut_keeps_its_default(script, monkeypatch):
    answers = [{"rounds_per_second": 2.0, "chunk_size": 64, "clients_per_round": 100}]

    def in_child(settings, seconds):
        if not answers:
            raise subprocess.TimeoutExpired("child", seconds)
        return answers.pop()

    monkeypatch.setattr(script, "in_child", in_child)
    record = script.empty()
    script.listen("softmax-10k", record, True, share=60.0, left=600.0)
    assert record["status"] == "cut after 90 s"
    assert script.in_words(record) == "2 rounds/s, cut after 90 s"


def test_ctrl_c_keeps_what_was_measured(script, tmp_path, monkeypatch, capsys):
    def in_child(settings, seconds):
        raise KeyboardInterrupt

    def ask(name, *_):
        if name == script.CEILINGS:
            return {"machine": None}
        return {"rounds_per_second": 2.0, "chunk_size": None}

    monkeypatch.setattr(script, "ask", ask)
    monkeypatch.setattr(script, "in_child", in_child)
    monkeypatch.setattr(script, "page", lambda results: "page")
    assert script.run(["ppsgd-grid", "softmax-10k", "mlp-pmtl"], 1.0, True, tmp_path) == 130
    found = json.loads((tmp_path / "accelerator.json").read_text())["measured"]
    assert found["ppsgd-grid"]["default"]["rounds_per_second"] == 2.0
    assert found["softmax-10k"]["status"] == "stopped by Ctrl-C"
    assert found["mlp-pmtl"]["status"] == "not begun"
    assert "stopped by Ctrl-C" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_rehearsal_has_everything_that_a_card_is_asked_for(tmp_path):
    names = ["softmax-10k-own", "ppsgd-grid", "convolutions", "peer-pfl"]
    finished = subprocess.run(
        [sys.executable, SCRIPT, "--rehearse", "--workloads", ",".join(names), "--out", tmp_path],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert finished.returncode == 0, finished.stderr
    assert [line.split()[1] for line in finished.stdout.splitlines()[:4]] == names
    found = json.loads((tmp_path / "accelerator.json").read_text())
    assert found["rehearsal"]
    ceilings = found["ceilings"]
    assert ceilings["machine"]["platform"] == "cpu"
    assert min(ceilings["float32_gflops"], ceilings["memory_gb_per_s"]) > 0
    assert list(found["measured"]) == names
    own, grid, forms, peer = (found["measured"][name] for name in names)
    for workload in (own, grid):
        assert workload["status"] == "done"
        assert min(workload["default"][name] for name in ("gflop_per_round", "mb_per_round")) > 0
    assert own["default"]["clients_per_round"] == 6
    assert all(each["rounds_per_second"] > 0 for each in own["chunks"])
    assert grid["default"]["clients_per_round"] == 3 * 1000
    assert [each["name"] for each in forms["told"]] == ["default", "Winograd", "lax.conv"]
    assert peer["told"][0]["name"] == "pfl"
    page = (tmp_path / "accelerator.md").read_text()
    assert all(f"| {name} |" in page for name in names[:2])
    assert "A rehearsal" in page
