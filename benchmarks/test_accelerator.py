"""The ten minutes with a card, with stand-ins for its processes."""

import subprocess

import accelerator
import pytest

from fedjaxsim.bench.results import Results

MACHINE = {"name": "here", "processor": "some", "cores": 2, "device_kind": "cpu", "devices": 2}


def test_sizes_around_the_default_are_tried_and_none_above_the_cohort():
    assert accelerator.tried(256, 10_000) == [64, 16, 1024]
    assert accelerator.tried(178, 100) == [44, 64, 11]
    assert accelerator.tried(62_500, 10**6) == [15_625, 3906, 250_000]
    assert accelerator.tried(64, 100) == [16, 4]
    assert accelerator.tried(2, 3) == []


def test_workloads_are_files_of_settings_with_changes():
    for name, (_, changes) in accelerator.WHAT.items():
        settings = accelerator.settings_of(name, False, chunk_size=16)
        assert settings["chunk_size"] == 16
        given = {key: list(v) if isinstance(v, tuple) else v for key, v in changes.items()}
        assert given.items() <= settings.items()
        assert accelerator.settings_of(name, True)["clients"] == 6


@pytest.fixture
def answers(monkeypatch):
    """Answers of processes by chunk size, None for the default; an exception is raised."""
    found = {}

    def in_child(settings, seconds):
        answer = found[settings.get("chunk_size")]
        if isinstance(answer, BaseException):
            raise answer
        sizes = {"chunk_size": 64, "clients_per_round": 100}
        return {"machine": dict(MACHINE), "rounds_per_second": answer, **sizes}

    monkeypatch.setattr(accelerator, "in_child", in_child)
    monkeypatch.setattr(accelerator, "in_process", lambda *_: {"default": 0.5})
    return found


def test_defaults_come_first_and_what_fails_is_left_out(answers, tmp_path, capsys):
    late = subprocess.TimeoutExpired("child", 90)
    answers |= {None: 2.0, 16: ChildProcessError("out of memory"), 4: late}
    assert accelerator.run(["softmax-10k", "mlp-pmtl"], 1.0, True, tmp_path) == 0
    assert list(Results.read(tmp_path / "bench.json").processes) == ["softmax-10k", "mlp-pmtl"]
    printed = capsys.readouterr().out
    assert "softmax-10k, chunks of 16: out of memory" in printed
    assert "default: 500 ms" in printed


def test_ctrl_c_keeps_what_was_measured(answers, tmp_path):
    answers |= {None: 2.0, 16: 3.0, 4: KeyboardInterrupt()}
    assert accelerator.run(["softmax-10k"], 1.0, True, tmp_path) == 130
    found = Results.read(tmp_path / "bench.json").processes
    assert list(found) == ["softmax-10k", "softmax-10k, chunks of 16"]


def test_nothing_starts_when_the_time_is_over(answers, tmp_path):
    assert accelerator.run(["softmax-10k"], 0.0, True, tmp_path) == 0
    assert not (tmp_path / "bench.json").exists()
