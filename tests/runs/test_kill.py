"""Killed runs, sweeps and tunings resume bit for bit as if undisturbed."""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st
from support.disk import Disk, KilledError
from support.problems import HANGS, bits, same
from support.several import PROGRAM, environment
from support.usual_runs import SQUARED

from fedjaxsim import store
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.events import PrivacySpend
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.runs import execute as execution
from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.execute import Stage, execute, start_from
from fedjaxsim.runs.output import RunOutput
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.signals import Stop
from fedjaxsim.simulation import Simulation
from fedjaxsim.store import StorageError

pytestmark = pytest.mark.usual_runs
SMALL = run_config(**SQUARED, rounds=6, epsilon=3.0)
EVERY = 3
OUTPUT = RunOutput(quiet=True, checkpoint_every=EVERY)
SAME = ("metrics.jsonl", "guarantee.json", "clients.csv")
"""Files that hold no time."""


def assert_same(one: RunDirectory, other: RunDirectory, experiment: Experiment) -> None:
    for name in SAME:
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes(), name
    like = experiment.simulation.init(9, experiment.hparams)
    assert same(*(each.checkpoints().last().state(like) for each in (one, other)))
    times = ("_second", "_seconds", "peak_bytes")
    one_summary, other_summary = (
        {name: value for name, value in each.summary().items() if not name.endswith(times)}
        for each in (one, other)
    )
    assert one_summary == other_summary


def run(experiment: Experiment, directory: RunDirectory, rounds: int | None = None) -> None:
    execute(Stage(experiment, directory, rounds), Stop(), OUTPUT)


@pytest.fixture(scope="module")
def experiment() -> Iterator[Experiment]:
    with pytest.MonkeyPatch.context() as patch:
        # Pictures take a second.
        patch.setattr(execution, "missing", lambda extra: "no pictures")
        yield prepare(SMALL)


@pytest.fixture(scope="module")
def undisturbed(experiment, tmp_path_factory) -> RunDirectory:
    directory = RunDirectory.create(tmp_path_factory.mktemp("undisturbed"))
    run(experiment, directory)
    return directory


def outcome(disk: Disk, experiment, directory, patch: pytest.MonkeyPatch, **options) -> bool:
    """Run on a disk; return whether the run came to its end."""
    with patch.context() as patched:
        patched.setattr(store, "os", disk)
        try:
            run(experiment, directory, **options)
        except (KilledError, StorageError):
            return False
    return True


ERRORS = (KilledError, errno.ENOSPC, errno.EIO)


def fault_at(n: int, error, experiment, undisturbed, path, patch) -> bool:
    """Let the n-th change of a run's files fail; the folder then opens, and the run goes on."""
    directory = RunDirectory.create(path / f"{n}-{error}")
    ended = outcome(Disk(n, error), experiment, directory, patch)
    assert not ended or n > 50
    kept = directory.checkpoints(experiment.fingerprints).last()
    assert kept is None or not kept.skipped
    metrics = [each.path / "metrics.jsonl" for each in (directory, undisturbed)]
    if metrics[0].is_file():
        whole = store.whole_lines(metrics[0])
        assert whole == store.whole_lines(metrics[1])[: len(whole)]
    run(experiment, directory)
    assert_same(directory, undisturbed, experiment)
    assert not [each for each in directory.path.rglob(".*") if each.name != store.LOCK] or (
        error is KilledError
    )
    return ended


@pytest.mark.thorough
def test_a_run_goes_on_bit_for_bit_after_a_fault_of_any_write_sync_open_or_rename(
    experiment, undisturbed, tmp_path, monkeypatch
):
    """A file is opened, written, synced and renamed in six steps: each meets each kind of fault."""
    for n in itertools.count():
        error = ERRORS[(n + n // 6) % 3]
        if fault_at(n, error, experiment, undisturbed, tmp_path, monkeypatch):
            break


class Model:
    """A run's folder, and what must be in it after anything that may happen to it."""

    def __init__(self, experiment, path, patch):
        self.experiment, self.patch, self._path = experiment, patch, path
        self.kept, self.rounds, self._cuts = 0, SMALL.rounds, 0
        self.directory, self._disk = RunDirectory.create(path / "run"), Disk()

    def go(self, n=None, error=KilledError, *, stop=False) -> None:
        """Begin or resume the run; note each checkpoint that was reported as kept."""
        save, event = CheckpointFolder.save, Stop()
        self._disk.arm(n, error)
        if stop:
            event.set()

        def noting(folder, round_, *arguments):
            save(folder, round_, *arguments)
            self.kept = round_

        with self.patch.context() as patched:
            patched.setattr(CheckpointFolder, "save", noting)
            patched.setattr(store, "os", self._disk)
            with contextlib.suppress(KilledError, StorageError):
                stage = Stage(self.experiment, self.directory, self.rounds)
                execute(stage, event, OUTPUT)

    def power_cut(self, n: int) -> None:
        self.go(n)
        self._cuts += 1
        after = self._path / f"cut{self._cuts}"
        self._disk.cut(self.directory.path, after)
        self.directory, self._disk = RunDirectory(after), Disk()
        self._disk.keep(after)

    def damage(self, place: int) -> None:
        """Flip a bit of the last checkpoint."""
        rounds = self.directory.checkpoints().rounds()
        if len(rounds) > 1:
            file = self.directory.path / "checkpoints" / f"{rounds[-1]}.state"
            content = bytearray(file.read_bytes())
            content[place % len(content)] ^= 1
            file.write_bytes(content)
            self.kept = rounds[-2]

    def check(self) -> None:
        last = self.directory.checkpoints(self.experiment.fingerprints).last()
        assert (0 if last is None else last.round) >= self.kept
        if (self.directory.path / "guarantee.json").is_file():
            # No smaller ε than that of any round on record, whose bounds by RDP are looser.
            spent = self.directory.guarantee()["zero_out"]["joint_dp"]
            [epsilon] = [each["epsilon"] for each in spent.values()]
            assert epsilon >= max(row["epsilon"] for row in self.directory.metrics()) / 1.4


PLACES = st.integers(0, 60)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("go"), PLACES, st.sampled_from(ERRORS)),
        st.tuples(st.just("power_cut"), PLACES),
        st.tuples(st.just("damage"), st.integers(0, 10**6)),
        st.tuples(st.just("stop")),
        st.tuples(st.just("extend"), st.integers(1, 2)),
    ),
    min_size=2,
    max_size=8,
)


def check_history(steps, experiment, longest, path, patch) -> None:
    model = Model(experiment, path, patch)
    for name, *arguments in steps:
        if name == "stop":
            model.go(stop=True)
        elif name == "extend":
            model.rounds = min(model.rounds + 2 * arguments[0], LONGEST)
        else:
            getattr(model, name)(*arguments)
        model.check()
    model.go()
    model.check()
    wanted = [row for row in longest.metrics() if row["round"] <= model.rounds]
    found = model.directory.metrics()
    spent = {"epsilon": 0, "epsilon_tight": None}
    assert [row | spent for row in found] == [row | spent for row in wanted]
    # The last row of a plan has the tight value, the same row of a longer plan a bound.
    assert all(one["epsilon"] <= other["epsilon"] for one, other in zip(found, wanted, strict=True))
    assert model.directory.summary()["epsilon"] == found[-1]["epsilon"]
    assert model.directory.released() == model.rounds


LONGEST = 10


@pytest.fixture(scope="module")
def longest(experiment, tmp_path_factory) -> RunDirectory:
    directory = RunDirectory.create(tmp_path_factory.mktemp("longest"))
    run(experiment, directory, rounds=LONGEST)
    return directory


def test_the_folder_is_what_it_must_be_after_a_history(experiment, longest, tmp_path, monkeypatch):
    steps = [
        ("go", 20, KilledError), ("power_cut", 24), ("go", 26, errno.ENOSPC), ("stop",),
        ("extend", 2), ("go", 21, KilledError), ("damage", 1234), ("stop",),
    ]  # fmt: skip
    check_history(steps, experiment, longest, tmp_path, monkeypatch)


@pytest.mark.thorough
@hypothesis.settings(
    max_examples=20, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(steps=STEPS)
def test_the_folder_is_what_it_must_be_after_any_history(
    experiment, longest, tmp_path_factory, monkeypatch, steps
):
    check_history(steps, experiment, longest, tmp_path_factory.mktemp("history"), monkeypatch)


def test_a_stage_does_not_start_from_less_than_was_released(experiment, tmp_path, monkeypatch):
    directory = RunDirectory.create(tmp_path / "run")
    run(experiment, directory)
    for damage in (lambda file: file.write_bytes(b""), Path.unlink):
        damage(directory.path / "checkpoints" / "6.state")
        with pytest.raises(ValueError, match=r"resume .* --rounds 6"):
            start_from(directory.path, experiment)
        run(experiment, directory)
    assert start_from(directory.path, experiment)[1][0]["rounds"] == 6


def test_rounds_that_a_stage_lost_by_a_kill_are_rounds_of_that_stage():
    """Of groups in turn: two stages of 4 and 2 rounds have 2 + 1 turns, one of 6 rounds has 2."""
    in_turn = {"sampling": "groups", "groups": 3, "noise_multiplier": 4.0}
    settings = {"data": "synthetic", "clients": 6, "loss": "squared", "learning_rate": 0.01}
    experiment = prepare(run_config(**settings, **in_turn, local_steps=1, rounds=4))
    simulation, first = experiment.simulation, experiment.init()
    [account], [entry] = simulation.accounts, experiment.planned(0, 1).entries
    privacy = first.privacy
    for number in range(4):
        privacy = ledger.drew(privacy, first.key, number)
        privacy = ledger.update(
            privacy,
            *account,
            lambda charges, number=number: ledger.charge(charges, *entry[:2], number),
        )
    done = dataclasses.replace(first, round=jnp.int32(4), privacy=privacy)
    stage = simulation.start_from(done, experiment.hparams)
    killed = execution._guarantee(experiment, stage, planned=4, released=2)
    expected = gaussian.epsilon(experiment.delta, math.sqrt(2 + 1) / 4)
    assert killed.find("zero_out").epsilon == pytest.approx(expected, rel=1e-6)
    drawn = [ledger.hex_digest(ledger.key_digest(state.key)) for state in (first, stage)]
    assert killed.draws == tuple(zip(drawn, (4, 2), strict=True))


@pytest.mark.thorough
def test_a_run_goes_on_over_any_number_of_devices(experiment, undisturbed, tmp_path):
    sim = experiment.simulation
    assert sim.devices is not None
    alone = Simulation(sim.algorithm, sim.population, sim.sampling, sim.minibatches, sim.mechanism)
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
    states = (each.checkpoints().last().state(like) for each in (directory, whole))
    for leaf, other in zip(*map(jax.tree.leaves, states), strict=True):
        if leaf.dtype == np.float32:
            np.testing.assert_allclose(leaf, other, rtol=1e-5)
        else:
            assert bits(leaf) == bits(other)


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
    entry = Entry(experiment.noise_multiplier, SMALL.sampling_rate, 10)
    simulation = experiment.simulation
    charged = PrivacySpend(simulation.sampler.scheme, simulation.mechanism.event, (entry,))
    assert report([charged], experiment.delta).find("zero_out").epsilon == pytest.approx(spent)


def test_another_run_in_its_place_and_damage_are_refused(experiment, undisturbed, tmp_path):
    directory = RunDirectory(tmp_path / "copy")
    shutil.copytree(undisturbed.path, directory.path)
    config = experiment.config.replace(lam=0.5)
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

PRIVATE = ["--epsilon", "3"]
ON_TWO_DEVICES = """
import jax
from fedjaxsim.engine import processes
processes.use_all_cores = lambda: None
jax.config.update("jax_num_cpu_devices", 2)
"""


def process(arguments: list[str], stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"{ON_TWO_DEVICES}{PROGRAM}", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment(),
    )


def finish(arguments: list[str]) -> None:
    with process(arguments) as running:
        _, errors = running.communicate(timeout=HANGS)
    assert running.returncode == 0, errors


def kill_after(arguments: list[str], words: str, lines: int) -> None:
    """Start a process, stop and continue it at each line of progress, and kill it after some."""
    with process(arguments, subprocess.STDOUT) as running:
        assert running.stdout is not None
        seen = 0
        for line in running.stdout:
            seen += words in line
            if seen > lines:
                running.kill()
                break
            running.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, running.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            running.send_signal(signal.SIGCONT)
        running.wait(timeout=HANGS)


@pytest.mark.thorough
def test_processes_that_are_killed_go_on_bit_for_bit(tmp_path):
    flags = [
        "--quiet", "--data", "synthetic", "--clients", "10", "--loss", "squared",
        "--sampling-rate", "0.4", "--learning-rate", "0.01", "--local-steps", "1",
        "--rounds", "400", "--eval-every", "2", *PRIVATE,
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    often = ["--checkpoint-every", "6"]
    finish(["run", *flags, "--out", str(whole)])
    chance = random.Random(0)
    for _ in range(2):  # begun, and resumed
        kill_after(["run", *flags, *often, "--out", str(killed)], "ε", chance.randrange(60))
    if not RunDirectory(killed).is_finished():
        finish(["resume", str(killed), "--quiet"])
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


@pytest.mark.thorough
def test_a_sweep_that_is_killed_goes_on_bit_for_bit(tmp_path):
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP)

    def command(out: str) -> list[str]:
        return ["sweep", str(file), "--out", str(tmp_path / out), "--quiet",
                "--checkpoint-every", "4"]  # fmt: skip

    finish(command("whole"))
    kill_after(command("killed"), "round", random.Random(2).randrange(12))
    finish(command("killed"))
    whole, killed = (
        pq.read_table(tmp_path / out / "results.parquet") for out in ("whole", "killed")
    )
    assert str(whole.to_pylist()) == str(killed.to_pylist())
    whole, killed = (
        json.loads((tmp_path / out / "report.json").read_text()) for out in ("whole", "killed")
    )
    for each in (whole, killed):
        del each["summary"]["peak_bytes"]
    assert whole == killed


@pytest.mark.thorough
def test_a_tuning_that_is_killed_goes_on_bit_for_bit(tmp_path):
    def command(out: str) -> list[str]:
        return [
            "tune", "--quiet", "--data", "synthetic", "--clients", "10", "--loss", "squared",
            "--learning-rate", "0.01", "--local-steps", "1", "--rounds", "6", "--eval-every", "1",
            "--wrt", "learning-rate", "--seeds", "2", "--steps", "4",
            *PRIVATE, "--out", str(tmp_path / out),
        ]  # fmt: skip

    finish(command("whole"))
    kill_after(command("killed"), "", random.Random(1).randrange(20))
    path = tmp_path / "killed" / "path.json"
    if not path.exists() or "stopped" not in json.loads(path.read_text()):
        finish(command("killed"))
    for name in ("path.json", "tuned.toml"):
        whole, killed = ((tmp_path / out / name).read_bytes() for out in ("whole", "killed"))
        assert whole == killed, name
