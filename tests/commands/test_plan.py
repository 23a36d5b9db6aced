"""`fedjaxsim plan`: memory counted by hand, what arrays take, and devices that are not there."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import pytest
from support.problems import HANGS, environment_of_users
from support.refusals import check_refusals, parsed

from fedjaxsim.extras import missing
from fedjaxsim.kernels.backend import Backend, planning_for
from fedjaxsim.runs import target
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.target import _GPUS, Target, compile_for, copied_bytes, plan_memory

M, ROWS, FEATURES, CLASSES = 10, 6, 5, 3
FLAGS = (
    f"plan --data random --clients {M} --rows {ROWS} --shape {FEATURES} --labels {CLASSES} "
    "--test-fraction 0.5 --sampling-rate 0.5 --local-steps 1"
)
OWN, ROW = 4 * (FEATURES + 1) * CLASSES, 4 * (FEATURES + 1)
"""Bytes of a client's model, and of an example with its label."""


def test_what_is_asked_of_a_plan_is_checked_before_data_are_read():
    check_refusals(
        lambda flags: parsed(f"{FLAGS} {flags}"),
        {
            "--out runs/plan": "out has no effect on plan",
            "--devices 0": "devices must be at least 1",
            "--device b200": "device must be one of h100, a100, v5e, got 'b200'",
        },
    )


def test_devices_that_are_not_here_need_their_name(refused):
    assert "devices" in refused(f"{FLAGS} --devices 999")


@pytest.mark.parametrize(("device", "extra"), [("h100", "cuda"), ("a100", "cuda"), ("v5e", "tpu")])
def test_a_compiler_that_is_not_installed_names_its_extra(refused, monkeypatch, device, extra):
    for library in ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu"):
        monkeypatch.setitem(sys.modules, library, None)
    assert f"pip install 'fedjaxsim[{extra}]'" in refused(f"plan --device {device}")


def experiment_of(**settings: Any):
    """A run of M clients, and this machine's first devices."""
    config = run_config(
        data="random", clients=M, rows=(ROWS,), shape=(FEATURES,), labels=CLASSES,
        test_fraction=0.5, sampling_rate=0.5, local_steps=1, **settings,
    )  # fmt: skip
    return prepare(config, check_memory=False)


def bytes_on(device, arrays):
    """What arrays take on one device."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)}
    return sum(
        part.data.nbytes
        for leaf in leaves.values()
        for part in leaf.addressable_shards
        if part.device == device
    )


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_memory_is_that_counted_by_hand_and_that_of_the_arrays(count, monkeypatch):
    allocated = target._allocated
    monkeypatch.setattr(target, "_allocated", lambda *programs: allocated(*programs) + 10**6)
    experiment = experiment_of(algorithm="ditto", clip=1.0, noise_multiplier=1.0)
    devices = tuple(jax.devices()[:count])
    several = dataclasses.replace(experiment.simulation, devices=devices if count > 1 else None)
    found = compile_for(Target.here(), several, experiment.hparams)
    need = found.need
    assert need.states == M * OWN // count
    held = {1: M * ROWS, 2: 32}[count]  # the half of the rows, rounded to a power of two
    assert need.rows == held * ROW + 2 * 2 * 4 * M  # ranges of two splits everywhere
    state, rows = several.init(0, experiment.hparams), several.placed
    used = {split: rows[split] for split in ("train", "test")}
    assert bytes_on(devices[0], (state, used)) == need.rows + need.states + need.server
    programs = found.rounds, found.evaluation
    # A compiler pads arguments by a megabyte.
    assert need.peak == allocated(*programs) + 10**6 > 10**6
    assert need._replace(compiler=0).peak < 10**6
    for program, working in zip(programs, (need.rounds, need.evaluation), strict=True):
        analysis = program.memory_analysis()
        known = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
        known += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        # An argument that a program does not read is none of its own.
        assert 0 <= known - working <= need.rows + need.states + need.server + 200


@pytest.mark.parametrize("count", [1, 2])
def test_rows_are_copied_by_devices_that_cannot_read_them_in_the_hosts_array(count):
    experiment = experiment_of(algorithm="local")
    devices = tuple(jax.devices()[:count])
    sim = dataclasses.replace(experiment.simulation, devices=devices if count > 1 else None)
    fields = sim.population.fields

    def copied(device):
        return sum(
            part.data.nbytes
            for name, leaf in sim.placed["train"].fields.items()
            for part in leaf.addressable_shards
            if part.device == device
            and not 0
            <= part.data.unsafe_buffer_pointer() - fields[name].ctypes.data
            < fields[name].nbytes
        )

    assert copied_bytes(sim.population, count) == max(map(copied, devices))


def test_a_streamed_run_needs_a_cohort_on_the_device_and_the_states_on_the_host():
    experiment = experiment_of(algorithm="local", streamed=True)
    found = plan_memory(experiment, Target.here())
    cohort = experiment.simulation.sampler.scheme.capacity
    assert found["host_states"] == M * OWN
    assert found["states"] == 2 * cohort * OWN
    assert found["rows"] >= cohort * ROWS // 2 * ROW
    assert found["needs"] < found["has"]


def test_the_command_prints_the_table_or_its_numbers(ask, ask_json, monkeypatch):
    command = f"{FLAGS} --algorithm local"
    found = ask_json(command)
    assert (found["clients"], found["devices"]) == (M, jax.device_count())
    parts = sum(found[name] for name in ("rows", "states", "server"))
    device = parts + max(found["rounds"], found["evaluation"])
    assert found["needs"] == found["process"] + found["devices"] * device <= found["peak"]
    monkeypatch.setattr(target, "plan_memory", lambda *run: found)  # compiled once
    printed = ask(command)
    assert "personal states" in printed
    assert printed.endswith("it fits\n")


def test_layouts_are_those_of_the_device_that_is_planned_for():
    experiment = experiment_of(algorithm="ditto", model="mlp", clip=1.0, noise_multiplier=1.0)

    sim = dataclasses.replace(experiment.simulation, devices=None)
    # The models of 30 settings are above 4 kB, so that a CPU runs clients one after another.
    assert sim.program.plan.for_runs(30).scans
    with planning_for(Backend("gpu", 10**9)):
        sim = dataclasses.replace(sim, devices=None)
    assert not sim.program.plan.for_runs(30).scans
    # Everything fits, so that all of a cohort run at once.
    assert sim.plan_for(experiment.hparams).chunk_size == sim.sampler.scheme.capacity


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*_GPUS, "v5e"])
def test_a_run_is_compiled_for_devices_that_are_not_there(name):
    extra = "tpu" if name == "v5e" else "cuda"
    if missing(extra) is not None:
        pytest.skip(f"needs the extra {extra}")
    for count in (1, 2):
        command = [*FLAGS.split(), "--json", "--device", name, "--devices", str(count)]
        # Their compilers end the process at a flag that is for CPUs alone.
        done = subprocess.run(
            [sys.executable, "-m", "fedjaxsim", *command, "--algorithm", "local"],
            env=environment_of_users() | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE, check=True, timeout=HANGS,
        )  # fmt: skip
        found = json.loads(done.stdout)
        assert (found["device"], found["devices"]) == (name, count)
        assert found["states"] == M * OWN // count
        assert found["rounds"] > 0
        assert found["fits"]
