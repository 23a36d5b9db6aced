"""The ten minutes with a card, with stand-ins for its processes."""

import json
import subprocess
import sys
from pathlib import Path

import accelerator
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import environment_of_users

from fedjaxsim.extras import missing
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config

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
        assert accelerator.settings_of(name, True)["clients"] == 10


def test_a_loop_over_batches_of_clients_has_the_steps_of_their_longest():
    def found(chunk_size, **settings):
        settings = {"data": "random", "clients": 40, "rows": (10,), "batch_size": 4} | settings
        experiment = prepare(run_config(algorithm="fedavg", **settings), check_memory=False)
        return accelerator.trips(experiment, chunk_size)

    # Ten clients in two batches of them; 8 of their rows are for training, two minibatches.
    assert found(6, sampling_rate=0.25, local_epochs=1) == [2, 2]
    assert found(40, sampling="full", local_epochs=1) == [2]
    assert found(6, sampling_rate=0.25, local_steps=5) == [2, 5]


def measured(folder):
    return json.loads((folder / "bench.json").read_text())["workloads"]


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
    assert list(measured(tmp_path)) == ["softmax-10k", "mlp-pmtl"]
    printed = capsys.readouterr().out
    assert "softmax-10k, chunks of 16: out of memory" in printed
    assert "default: 500 ms" in printed


def test_ctrl_c_keeps_what_was_measured(answers, tmp_path):
    answers |= {None: 2.0, 16: 3.0, 4: KeyboardInterrupt()}
    assert accelerator.run(["softmax-10k"], 1.0, True, tmp_path) == 130
    assert list(measured(tmp_path)) == ["softmax-10k", "softmax-10k, chunks of 16"]


def test_nothing_starts_when_the_time_is_over(answers, tmp_path):
    assert accelerator.run(["softmax-10k"], 0.0, True, tmp_path) == 0
    assert not (tmp_path / "bench.json").exists()


def test_windows_along_the_width_are_the_plain_convolution():
    def plain(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout)

    rng = np.random.default_rng(0)
    x, kernel, weights = (
        np.round(4 * rng.standard_normal(shape)).astype(np.float32)
        for shape in ((2, 6, 5, 3), (3, 2, 3, 4), (2, 4, 4, 4))
    )
    got, expected = (
        jax.value_and_grad(lambda x, k, form=form: jnp.vdot(form(x, k), weights), (0, 1))(x, kernel)
        for form in (accelerator.conv_rows, plain)
    )
    chex.assert_trees_all_equal(got, expected)  # of whole numbers


def compiling(device, *command):
    """Run Python in the benchmarks' folder, where a device's compiler is installed."""
    extra = "tpu" if device == "v5e" else "cuda"
    if missing(extra) is not None:
        pytest.skip(f"needs the extra {extra}")
    # Their compilers end the process at a flag that is for CPUs alone.
    environment = environment_of_users() | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=Path(accelerator.__file__).parent,
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["h100", "v5e"])
def test_every_system_is_compiled_for_an_accelerator(device, tmp_path):
    names = list(accelerator.OF_SYSTEMS)
    flags = ["--rehearse", "--compile-only", device, "--out", str(tmp_path)]
    compiling(device, "accelerator.py", *names, *flags)
    found = json.loads((tmp_path / "compiled.json").read_text())
    assert set(found) == {f"{name} {device}" for name in names}
    assert all(each["launches"] > 0 for each in found.values())


EIGHT = """
from compiled import started_by_a_round
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.target import Target, compile_for

experiment = prepare(run_config(
    data="random", shape=(10,), clients=16, rows=(20,), labels=3, algorithm="pmtl", local_steps=2,
    sampling_rate=0.5, clip=1.0, noise_multiplier=1.0,
), check_memory=False)
program = compile_for(Target.named("v5e", 8), experiment.simulation, experiment.hparams, rounds=8)
print(*started_by_a_round(program.rounds.as_text(), 2).collectives.elements(), sep="\\n")
"""


@pytest.mark.thorough
def test_a_round_on_eight_devices_has_one_collective_the_sum_of_the_accumulator():
    [collective] = compiling("v5e", "-c", EIGHT).splitlines()
    assert collective.startswith("all-reduce (")
    # A message of 3 biases and 3 × 10 weights; integer counts follow once per program.
    assert "f32[3]{" in collective
    assert "f32[3,10]{" in collective
