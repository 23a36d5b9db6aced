"""Killed runs, sweeps and tunings resume bit for bit as if undisturbed."""

import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Event

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from problems import HANGS

from fedjaxsim.callbacks import Cadence, MetricsFile
from fedjaxsim.engine import checkpoint
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.privacy.events import Entry, PrivacySpend
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.runs import execute as execution
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.execute import execute
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.simulation import Simulation

SMALL = run_config(
    data="synthetic", clients=10, loss="squared", sampling_rate=0.4, learning_rate=0.01,
    rounds=6, eval_every=2, local_steps=1, epsilon=3.0,
)  # fmt: skip
EVERY = Cadence(rounds=3)
SAME = ("metrics.jsonl", "guarantee.json", "clients.csv")
"""Files that hold no time."""


class KilledError(BaseException):
    """The process ends here."""


def assert_same(one: RunDirectory, other: RunDirectory, experiment: Experiment) -> None:
    for name in SAME:
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes(), name
    like = experiment.simulation.init(9, experiment.hparams)
    states = (map(bits, jax.tree.leaves(each.load_state(like))) for each in (one, other))
    for leaf, same in zip(*states, strict=True):
        assert leaf == same
    times = ("rounds_per_second", "compile_seconds", "peak_bytes", "device_peak_bytes")
    one_summary, other_summary = (
        {name: value for name, value in each.summary().items() if name not in times}
        for each in (one, other)
    )
    assert one_summary == other_summary


def bits(leaf: jax.Array) -> bytes:
    key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes()


def run(experiment: Experiment, directory: RunDirectory, rounds: int | None = None) -> None:
    execute(experiment, directory, Event(), quiet=True, cadence=EVERY, rounds=rounds)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return prepare(SMALL)


@pytest.fixture(scope="module")
def undisturbed(experiment, tmp_path_factory) -> RunDirectory:
    directory = RunDirectory.create(tmp_path_factory.mktemp("undisturbed"))
    run(experiment, directory)
    return directory


def killed_at(moment: int, patch: pytest.MonkeyPatch) -> None:
    """End the process before or after its n-th operation on its files."""
    moments = itertools.count()

    def killing(function):
        def wrapped(*arguments, **options):
            if next(moments) == moment:
                raise KilledError
            result = function(*arguments, **options)
            if next(moments) == moment:
                raise KilledError
            return result

        return wrapped

    patch.setattr(RunDirectory, "write_config", killing(RunDirectory.write_config))
    for name in ("write_csv", "write_json"):
        patch.setattr(execution, name, killing(getattr(execution, name)))
    for name in ("start", "segment"):
        patch.setattr(MetricsFile, name, killing(getattr(MetricsFile, name)))
    patch.setattr(CheckpointFolder, "save", killing(CheckpointFolder.save))
    patch.setattr(checkpoint.os, "replace", killing(os.replace))


def test_a_run_killed_between_any_two_writes_goes_on_bit_for_bit(
    experiment, undisturbed, tmp_path, monkeypatch
):
    directory = RunDirectory.create(tmp_path)
    moments = random.Random(1).sample(range(36), 4)
    for moment in moments:
        with monkeypatch.context() as patch:
            killed_at(moment, patch)
            try:
                run(experiment, directory)
            except KilledError:
                continue
    run(experiment, directory)
    assert_same(directory, undisturbed, experiment)


@pytest.mark.thorough
@pytest.mark.parametrize("moment", range(36))
def test_a_run_killed_at_each_moment_goes_on_bit_for_bit(
    experiment, undisturbed, tmp_path, monkeypatch, moment
):
    directory = RunDirectory.create(tmp_path)
    with monkeypatch.context() as patch:
        killed_at(moment, patch)
        with pytest.raises(KilledError):
            run(experiment, directory)
    run(experiment, directory)
    assert_same(directory, undisturbed, experiment)


@pytest.mark.thorough
def test_a_run_goes_on_over_any_number_of_devices(experiment, undisturbed, tmp_path):
    setup = experiment.simulation.setup
    assert setup.devices is not None
    alone = Simulation(
        setup.algorithm, setup.population, setup.sampling, setup.minibatches, setup.mechanism
    )
    one = dataclasses.replace(experiment, simulation=alone)
    directory = RunDirectory(tmp_path / "copy")
    shutil.copytree(undisturbed.path, directory.path)
    whole = RunDirectory.create(tmp_path / "whole")
    for each in (directory, whole):
        run(one, each, rounds=9)
    assert directory.metrics()[:4] == undisturbed.metrics()
    run(one, directory, rounds=11)
    # An evaluation at the end of a plan; the others are where they would have been.
    assert [each["round"] for each in directory.metrics()] == [0, 2, 4, 6, 8, 9, 10, 11]
    run(one, whole, rounds=11)
    like = alone.init(9, one.hparams)
    for leaf, same in zip(
        jax.tree.leaves(directory.load_state(like)), jax.tree.leaves(whole.load_state(like)),
        strict=True,
    ):  # fmt: skip
        if leaf.dtype == np.float32:
            np.testing.assert_allclose(leaf, same, rtol=1e-5)
        else:
            assert bits(leaf) == bits(same)


@pytest.mark.thorough
def test_a_finished_run_is_extended_and_spends_what_all_its_rounds_cost(
    experiment, undisturbed, tmp_path
):
    directory = RunDirectory(tmp_path / "copy")
    shutil.copytree(undisturbed.path, directory.path)
    run(experiment, directory, rounds=10)
    records = directory.metrics()
    assert [record["round"] for record in records] == [0, 2, 4, 6, 8, 10]
    assert records[:4] == undisturbed.metrics()
    assert directory.config()["resolved"]["rounds"] == 10
    assert directory.config()["rounds"] == 6
    spent = directory.summary()["epsilon"]
    assert spent > 3.0
    entry = Entry(experiment.noise_multiplier, 0.4, 10)
    simulation = experiment.simulation
    charged = PrivacySpend(simulation.sampling.scheme, simulation.mechanism.event, (entry,))
    assert report([charged], experiment.delta).find("zero_out").epsilon == pytest.approx(spent)


def test_another_run_in_its_place_and_damage_are_refused(experiment, undisturbed, tmp_path):
    directory = RunDirectory(tmp_path / "copy")
    shutil.copytree(undisturbed.path, directory.path)
    config = dataclasses.replace(experiment.config, lam=0.5)
    other = dataclasses.replace(experiment, config=config)
    with pytest.raises(ValueError, match="other settings"):
        run(other, directory)
    x = experiment.simulation.population.fields["x"].copy()
    x[0, 0] += 1
    population = dataclasses.replace(
        experiment.simulation.population,
        fields={**experiment.simulation.population.fields, "x": x},
    )
    other = dataclasses.replace(
        experiment, simulation=experiment.simulation.with_population(population)
    )
    with pytest.raises(ValueError, match="other data"):
        run(other, directory)


# --- whole processes ------------------------------------------------------------------------------

KILLS = 5
PRIVATE = ["--epsilon", "3"]


@pytest.fixture(scope="module")
def kept_programs(tmp_path_factory):
    """Processes share a compilation cache, as a user's processes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDJAXSIM_COMPILATION_CACHE", str(tmp_path_factory.mktemp("programs")))
        yield


def process(arguments: list[str], devices: int) -> subprocess.Popen[str]:
    script = (
        "import sys, jax; from fedjaxsim.engine import devices;"
        "devices.use_all_cores = lambda: None;"
        f"jax.config.update('jax_num_cpu_devices', {devices});"
        "from fedjaxsim.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
    )


def finish(arguments: list[str], devices: int) -> None:
    with process(arguments, devices) as running:
        _, errors = running.communicate(timeout=HANGS)
    assert running.returncode == 0, errors


def kill_after(arguments: list[str], devices: int, words: str, lines: int) -> None:
    """Start a process and kill it once it has printed some lines of progress."""
    with process(arguments, devices) as running:
        assert running.stdout is not None
        seen = 0
        for line in running.stdout:
            seen += words in line
            if seen > lines:
                running.kill()
                break
        running.wait(timeout=HANGS)


@pytest.mark.usefixtures("kept_programs")
@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("private", [PRIVATE, []], ids=["private", "not private"])
def test_processes_that_are_killed_go_on_bit_for_bit(tmp_path, devices, private):
    flags = [
        "--quiet", "--data", "synthetic", "--clients", "10", "--loss", "squared",
        "--sampling-rate", "0.4", "--learning-rate", "0.01", "--local-steps", "1",
        "--rounds", "400", "--eval-every", "2", *private,
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    often = ["--checkpoint-every", "6"]
    finish(["run", *flags, "--out", str(whole)], devices)
    chance = random.Random(f"{devices}{private}")
    kill_after(["run", *flags, *often, "--out", str(killed)], devices, "ε", chance.randrange(60))
    for _ in range(KILLS - 1):
        again = ["resume", str(killed), "--quiet", *often]
        kill_after(again, devices, "ε", chance.randrange(60))
    if not RunDirectory(killed).is_finished():
        finish(["resume", str(killed), "--quiet"], devices)
    experiment = prepare(read_toml(Path(whole, "config.toml")))
    assert_same(RunDirectory(killed), RunDirectory(whole), experiment)


SWEEP = """
data = "synthetic-stream"
clients = 20
algorithm = "ppsgd"
loss = "squared"
sampling-rate = 0.5
rounds = 40
eval-every = 2
[sweep]
seed = [3, 4]
noise-multiplier = [0, 5]
learning-rate = [0.1, 0.4]
"""


@pytest.mark.usefixtures("kept_programs")
@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
def test_a_sweep_that_is_killed_goes_on_bit_for_bit(tmp_path, devices):
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP)

    def command(out: str) -> list[str]:
        return ["sweep", str(file), "--out", str(tmp_path / out), "--quiet",
                "--checkpoint-every", "4"]  # fmt: skip

    finish(command("whole"), devices)
    chance = random.Random(devices)
    for _ in range(KILLS):
        kill_after(command("killed"), devices, "round", chance.randrange(12))
    finish(command("killed"), devices)
    envelopes = ((tmp_path / out / "envelopes.parquet").read_bytes() for out in ("whole", "killed"))
    assert next(envelopes) == next(envelopes)
    whole, killed = (
        pq.read_table(tmp_path / out / "results.parquet") for out in ("whole", "killed")
    )
    assert str(whole.to_pylist()) == str(killed.to_pylist())
    whole, killed = (
        json.loads((tmp_path / out / "report.json").read_text()) for out in ("whole", "killed")
    )
    for each in (whole, killed):
        for cost in ("seconds", "compile_seconds", "peak_bytes"):
            del each["summary"][cost]
    assert whole == killed


@pytest.mark.usefixtures("kept_programs")
@pytest.mark.thorough
@pytest.mark.parametrize("private", [PRIVATE, []], ids=["private", "not private"])
def test_a_tuning_that_is_killed_goes_on_bit_for_bit(tmp_path, private):
    def command(out: str) -> list[str]:
        return [
            "tune", "--quiet", "--data", "synthetic", "--clients", "10", "--loss", "squared",
            "--learning-rate", "0.01", "--local-steps", "1", "--rounds", "6", "--eval-every", "1",
            "--wrt", "learning-rate", "--seeds", "2", "--steps", "4", "--compare-grid", "2",
            "--checkpoint-every", "2", *private, "--out", str(tmp_path / out),
        ]  # fmt: skip

    finish(command("whole"), 2)
    chance = random.Random(str(private))
    for _ in range(KILLS):
        kill_after(command("killed"), 2, "", chance.randrange(20))
    if not RunDirectory(tmp_path / "killed" / "run").is_finished():
        finish(command("killed"), 2)
    names = ("path.json", "path.csv", "tuned.toml", *(f"run/{name}" for name in SAME))
    for name in names:
        whole, killed = ((tmp_path / out / name).read_bytes() for out in ("whole", "killed"))
        assert whole == killed, name
