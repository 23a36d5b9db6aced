"""Callbacks of a run, in Python: the order of their hooks, and a run that is killed and resumes."""

import errno
import json
import math
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from support.problems import HANGS

import fedjaxsim as fjs
from fedjaxsim import store
from fedjaxsim.callbacks import (
    Callback,
    Checkpoints,
    MetricsFile,
    Patience,
    Progress,
    Records,
    wait_after,
)
from fedjaxsim.divergence import DivergingWarning
from fedjaxsim.engine import loop
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.privacy import guarantee
from fedjaxsim.simulation_batch import SimulationBatch


@pytest.fixture
def made(shared_fedavg):
    """A private simulation of clients with validation rows, and its hyperparameters."""
    return shared_fedavg, shared_fedavg.hyperparameters(
        learning_rate=0.05, clip=0.2, noise_multiplier=2.0, sampling_rate=0.5
    )


class Noting(Callback):
    """Notes the hooks that are called, and answers what it is told to."""

    def __init__(self, start=None, segments=()):
        self.seen: list[Any] = []
        self._start, self._segments = start, list(segments)

    def start(self, state):
        self.seen.append(("start", int(state.round), self.run.rounds))
        self.run.closing.callback(self.seen.append, "close")
        return self._start

    def segment(self, state, segment):
        self.seen.append(("segment", int(state.round), segment.round))
        return self._segments.pop(0) if self._segments else None

    def end(self, state):
        self.seen.append(("end", int(state.round)))


def run(made, rounds, callbacks, state=None, **options):
    sim, hparams = made
    state = sim.init(0, hparams) if state is None else state
    return sim.run(state, hparams, rounds, eval_every=2, callbacks=callbacks, **options)


def leaves(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.shared, state.privacy.charges))]


def test_hooks_are_called_around_segments_that_end_at_multiples_of_eval_every(made):
    noting = Noting()
    state, history = run(made, 3, [noting])
    steps = [("segment", 2, 2), ("segment", 3, 3)]
    assert noting.seen == [("start", 0, 3), *steps, ("end", 3), "close"]
    again = Noting()
    state, history = run(made, 4, [again], state)
    assert [each.round for each in history] == [4, 6, 7]
    assert again.seen[0] == ("start", 3, 7)


class Meddling(Callback):
    """Tries to change what a run does: its functions, its end, its ledger, clients' states."""

    def __init__(self):
        self.first = None

    def segment(self, state, segment):
        self.first = self.first or state.privacy
        for name, value in {"advance": print, "charges": print, "rounds": 99}.items():
            with pytest.raises(AttributeError):
                setattr(self.run, name, value)
            object.__setattr__(self.run, name, value)  # nobody reads it there
        object.__setattr__(state, "privacy", self.first)
        for leaf in jax.tree.leaves(state.personal):
            assert not np.asarray(leaf).flags.writeable


@pytest.mark.parametrize("system", ["shared_fedavg", "shared_streamed"])
def test_a_callback_cannot_change_what_the_run_does(system, request):
    sim = request.getfixturevalue(system)
    values = {"learning_rate": 0.05, "clip": 0.2, "noise_multiplier": 2.0, "sampling_rate": 0.5}
    made = sim, sim.hyperparameters(**values | ({"lam": 0.3} if "lam" in sim.records else {}))
    meddling = Meddling()
    state, history = run(made, 4, [meddling])
    alone, expected = run(made, 4, [])
    assert [each.round for each in history] == [2, 4]
    assert repr(history) == repr(expected)
    assert sim.guarantee(state) == sim.guarantee(alone)
    for name in ("evaluate", "guarantee", "_planned_noise"):
        with pytest.raises(AttributeError, match=f"{name} of a Simulation stays as it is"):
            setattr(sim, name, print)


def test_one_callback_stops_the_run_and_all_hear_of_it(made):
    stopping, other = Noting(segments=[None, False]), Noting()
    state, history = run(made, 10, [stopping, other])
    assert int(state.round) == 4
    assert other.seen[-3:] == [("segment", 4, 4), ("end", 4), "close"]
    state, _ = run(made, 10, [lambda state, segment: segment.evaluation.mean("loss") < 0])
    assert int(state.round) == 2
    none, started = Noting(start=False), Noting()
    state, history = run(made, 10, [none, started])
    assert (int(state.round), len(history)) == (0, 0)
    assert started.seen == [("start", 0, 10), ("end", 0), "close"]


def test_after_an_error_callbacks_are_closed_and_there_is_no_end(made):
    noting = Noting()

    def fail(state, segment):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(made, 4, [noting, fail])
    assert noting.seen == [("start", 0, 4), ("segment", 2, 2), "close"]


def test_epsilon_is_composed_once_however_often_a_run_evaluates(made, monkeypatch):
    """On the way records hold the bound by RDP, at the end the tight value."""
    sim, _ = made
    composed = []

    def counted(*args, **kwargs):
        composed.append(args)
        return guarantee.tight_epsilon(*args, **kwargs)

    monkeypatch.setattr(loop, "tight_epsilon", counted)
    records = []
    last = run(made, 6, [lambda state, segment: None, each := Noted(records)])[0]
    assert each.run.rounds == 2 * len(records) == 6
    assert len(composed) == 1
    tight = sim.guarantee(last).find("zero_out").epsilon
    assert records[-1]["epsilon"] == pytest.approx(tight)
    assert each.run.rdp_epsilon(last)[0] > tight
    spent = [record["epsilon"] for record in records[:-1]]
    assert spent == sorted(spent)
    assert spent[0] > 0


class Noted(Callback):
    """Keeps the records of a run."""

    def __init__(self, records):
        self.records = records

    def segment(self, state, segment):
        self.records.append(self.run.record(state, segment))


def test_the_seconds_of_phases_are_those_that_the_user_waits(made):
    """Rounds per second are of rounds: what callbacks and evaluations take counts apart."""
    began, each = time.perf_counter(), Noted([])
    history = run(made, 6, [lambda state, segment: time.sleep(0.05), each])[1]
    waited, phases = time.perf_counter() - began, each.run.phase_times.seconds
    assert phases["write"] >= 0.05 * len(history)
    assert min(phases["rounds"], phases["evaluate"]) > 0
    assert sum(phases.values()) <= waited


def test_only_the_last_segments_are_kept_where_that_is_asked(made):
    _, history = run(made, 5, [], keep=1)
    assert [each.round for each in history] == [5]


def watched(folder):
    """The callbacks of a run in a folder: progress, metrics and patience, and its checkpoints."""
    metrics, patience = MetricsFile(folder / "metrics.jsonl"), Patience(100)
    checkpoints = Checkpoints(folder / "checkpoints", [metrics, patience], every=2)
    return [patience, metrics, Progress("fedavg"), checkpoints]


def test_a_run_that_is_killed_resumes_bit_for_bit(made, tmp_path, capsys):
    sim, hparams = made
    whole = run(made, 6, watched(tmp_path / "whole"))[0]
    printed = capsys.readouterr().err

    def killing(state, segment):
        if segment.round == 4:
            raise KeyboardInterrupt

    *others, checkpoints = watched(tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        run(made, 6, [*others, killing, checkpoints])
    *others, checkpoints = watched(tmp_path / "killed")
    state = checkpoints.restore(sim.init(0, hparams))
    assert int(state.round) == 2
    state, history = run(made, 4, [*others, checkpoints], state)
    assert [each.round for each in history] == [4, 6]
    for mine, wanted in zip(leaves(state), leaves(whole), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    folders = tmp_path / "whole", tmp_path / "killed"
    one, other = ((folder / "metrics.jsonl").read_text() for folder in folders)
    assert one == other
    one_state, other_state = (folder / "checkpoints" / "6.state" for folder in folders)
    assert one_state.read_bytes() == other_state.read_bytes()
    rows = [json.loads(line) for line in one.splitlines()]
    assert [row["round"] for row in rows] == [0, 2, 4, 6]
    spent = sim.guarantee(whole).find("zero_out").epsilon
    assert rows[-1]["epsilon"] == pytest.approx(spent)
    assert {"train_loss", "test_loss", "validation_nmse"} <= rows[-1].keys()
    assert [f"fedavg  {n}/6" in printed for n in (0, 2, 4, 6)] == [True] * 4
    kept = Checkpoints(tmp_path / "killed" / "checkpoints", others[:2]).restore(state)
    for mine, wanted in zip(leaves(kept), leaves(whole), strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_states_are_kept_at_the_rounds_asked_for(made, tmp_path, monkeypatch):
    sim, hparams = made
    folder = CheckpointFolder(tmp_path / "checkpoints")
    run(made, 6, [Checkpoints(folder, every=2)])
    assert folder.rounds() == [2, 4, 6]
    (tmp_path / "checkpoints" / "6.state").unlink()
    (tmp_path / "checkpoints" / "4.state").unlink()
    kept = Checkpoints(folder).restore(sim.init(0, hparams))
    for mine, wanted in zip(leaves(kept), leaves(run(made, 2, [])[0]), strict=True):
        np.testing.assert_array_equal(mine, wanted)

    def broken(descriptor):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(store.os, "fsync", broken)
    with pytest.raises(store.StorageError, match="broken"):
        run(made, 4, [Checkpoints(folder, every=2, keep_last=False)])


@pytest.mark.thorough
def test_the_records_of_several_runs_are_those_of_each(made, tmp_path):
    sim, hparams = made
    settings = [hparams, hparams.replace(noise_multiplier=4.0)]
    several, alone = MetricsFile(tmp_path / "several"), MetricsFile(tmp_path / "alone")
    many = SimulationBatch(sim, settings, jax.devices()[:1])
    many.run(many.init(0), 2, callbacks=[several, Progress("two")])
    sim.run(sim.init(0, settings[1]), settings[1], 2, callbacks=[alone])
    rows = [row for row in several.rows if row["run"] == 1]
    for row, wanted in zip(rows, alone.rows, strict=True):
        del row["run"]
        assert row.keys() == wanted.keys()
        assert row == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(ValueError, match="2 runs"):
        many.run(many.init(0), 2, callbacks=[Patience(3)])


def test_a_run_from_an_earlier_state_leaves_no_later_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    state: Any = SimpleNamespace(round=2)
    lines = [f'{{"round": {round_}}}\n' for round_ in (0, 2, 4)]
    path.write_text("".join(lines))
    file = MetricsFile(path)
    file.memory = 4  # it was there that the callback ended
    file.start(state)
    assert path.read_text() == "".join(lines[:2])


def test_a_file_of_records_is_read_back_and_grows_no_memory(made, tmp_path):
    records, path = Records(), tmp_path / "metrics"
    exact, file = MetricsFile(tmp_path / "exact", exact=True), MetricsFile(path)
    sizes = []

    def weigh(state, segment):
        sizes.append(len(json.dumps(file.memory)) + sum(map(len, file._later)))

    state, _ = run(made, 20, [records, exact, file, weigh])
    assert "train_loss" not in records.rows[0]  # nobody has taken part
    assert exact.rows == file.rows == records.rows
    assert max(sizes) - min(sizes) < 50
    assert not any(isinstance(each, list) and each for each in vars(file).values())
    run(made, 2, [file], state)
    assert [row["round"] for row in file.rows] == [*range(0, 23, 2)]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="lacks the line of round 22"):
        _ = file.rows


def test_messages_that_are_not_finite_are_counted_where_people_look(made, tmp_path, capsys):
    sim, hparams = made
    file = MetricsFile(tmp_path / "metrics.jsonl")
    wild = hparams.replace(learning_rate=1e30)
    with pytest.warns(DivergingWarning, match="not finite and counted as zero"):
        _, [segment] = run((sim, wild), 2, [file, Progress("wild")])
    sent = int(segment.metrics["participants"].sum())
    start, row = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "nonfinite" not in start
    assert row["nonfinite"] == sent > 0
    assert f"{sent} messages not finite" in capsys.readouterr().err


def test_ctrl_c_ends_a_run_after_the_rounds_in_flight(made, capfd):
    stop: Any = fjs.callbacks.StopOnInterrupt()

    def interrupt(state, segment):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop._event.wait(HANGS)

    before = threading.active_count()
    state, _ = run(made, 10, [interrupt, stop])
    assert int(state.round) == 2
    assert threading.active_count() == before
    assert "stopping after the rounds in flight" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ([0.1, 0.1, 0.1], True),
        ([0.1, 0.1], False),
        ([0.1, 0.1, 0.2], False),
        ([0.1, 0.3, 0.2, 0.3], True),
        ([0.1, -math.inf, -math.inf], True),
        ([-math.inf, -math.inf, 0.1], False),
    ],
)
def test_patience_counts_evaluations_that_are_no_better_than_the_best_before(values, stops):
    patience = Patience(2)
    patience.memory = values
    assert patience.exhausted == stops


@pytest.mark.parametrize(("name", "sign"), [("accuracy", 1), ("loss", -1)])
def test_patience_reads_validation_rows_with_the_sign_of_the_metric(name, sign):
    scores = iter([0.5, 0.25, math.nan])

    class Seen(dict):
        """A segment, whose evaluation is of a sample, and its record."""

        evaluation = Evaluation("test", np.ones(1, int), {}, clients=np.zeros(1, np.int32))

    class Run:
        size = stopped = None

        def evaluate(self, state, split, clients):
            assert clients is Seen.evaluation.clients
            return Evaluation(split, np.ones(1, int), {name: np.array([next(scores)])})

        def record(self, state, segment):
            return segment

        def records(self, state, segment):
            return [segment]

    patience: Any = Patience(10)
    patience.run = Run()
    for index in range(3):
        record = Seen()
        patience.segment(None, record)
        assert list(record) == [f"validation_{name}"], index
    assert patience.memory == [sign * 0.5, sign * 0.25, -math.inf]


def test_writing_takes_at_most_a_twentieth_of_the_time():
    assert [wait_after(seconds) for seconds in (2.0, 10.0)] == [60.0, 200.0]
