"""Callbacks of a run: progress, records, checkpoints, patience, an end by Ctrl-C.

`Simulation.run(…, callbacks=[…])` calls them, or functions `(state, segment)`, after evaluations.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from fedjaxsim import checks, metrics
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.loop import Callback as Callback
from fedjaxsim.engine.loop import Record, Segment, require_callbacks, rows_of
from fedjaxsim.engine.loop import RunLoop as RunLoop
from fedjaxsim.engine.processes import from_all, is_first
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy.assumptions import EVALUATED, STOPPING
from fedjaxsim.records import MetricsFile as MetricsFile
from fedjaxsim.records import Records as Records
from fedjaxsim.records import RunsReport as RunsReport
from fedjaxsim.records import report as report
from fedjaxsim.report.files import strict
from fedjaxsim.report.progress import Bar, in_words, number
from fedjaxsim.signals import stop_on_signal


class Progress(Callback):
    """Show a bar with the latest metrics on a terminal; elsewhere, print a line per evaluation.

    Of several processes the first one does; none if it is `quiet`.
    """

    initial = True

    def __init__(self, title: str = "run", *, quiet: bool = False):
        self._title, self._quiet = title, quiet

    def start(self, state: SimulationState) -> None:
        """Show the bar."""
        self._begin = int(state.round)
        bar = Bar(self._title, self.run.rounds, quiet=self._quiet or not is_first())
        self._bar = self.run.closing.enter_context(bar)

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Show an evaluation, with the speed so far."""
        done, seconds = segment.round - self._begin, self.run.clock.seconds["rounds"]
        speed = done / seconds if done else None
        self.show(self.run.records(state, segment), speed)

    def show(self, records: Sequence[Record], speed: float | None) -> None:
        """Show an evaluation's record of each run, with the rounds/s without compilation."""
        alone, done = self.run.size is None, records[0]["round"]
        words = in_words(strict(records[0]), speed) if alone else f"{len(records)} runs"
        if not alone and speed is not None:
            words += f"  {number(len(records) * speed)} run-rounds/s"
        self._bar.show(done, words)


class Validation(Callback):
    """Add each metric's value on validation rows to the records, for choices between runs.

    It comes before the callbacks that keep the records. No guarantee covers such a choice.
    """

    initial = True

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Evaluate on validation rows."""
        validate(self.run, state, segment)


def validate(run: RunLoop, state: SimulationState, segment: Segment) -> Evaluation:
    """Evaluate on validation rows; add columns `validation_METRIC` to the segment's records.

    The clients are those of the segment's evaluation.
    """
    found = run.evaluate(state, "validation", segment.evaluation.clients)
    columns = {f"validation_{name}": found.summary()[f"validation_{name}"] for name in found.values}
    for record, more in zip(run.records(state, segment), rows_of(columns, run.size), strict=True):
        record.update(more)
    return found


class Patience(Callback):
    """Stop a run whose metric on validation rows no longer improves.

    The metric is the first of `metrics.METRICS` that the run has, or the one that it releases. A
    mean that is NaN is no improvement. The guarantee covers the choice of the last round by a
    released metric in a run with a budget, and no other: see docs/runs.md.

    Args:
      evaluations: number of consecutive evaluations without improvement that stops the run.
      released: whether it reads the metric that the run releases, and nothing else.

    Attributes:
      memory: the best value before the last evaluations, and theirs; the larger, the better.
    """

    initial = True

    def __init__(self, evaluations: int, *, released: bool = False):
        checks.count(evaluations=evaluations)
        self._evaluations, self._released, self.memory = evaluations, released, []
        self.public = (EVALUATED,) if released else (STOPPING,)

    @property
    def exhausted(self) -> bool:
        """True if the last evaluations were no better than the best one before them."""
        values, last = self.memory, self._evaluations
        return len(values) > last and max(values[-last:]) <= max(values[:-last])

    def start(self, state: SimulationState) -> bool:
        """Refuse to go on with a run that was stopped."""
        if int(state.round) == 0:
            self.memory = []
        return not self.exhausted

    def segment(self, state: SimulationState, segment: Segment) -> bool:
        """Judge the run on its validation rows."""
        if segment is self.run.stopped:  # it has been judged
            if not self._released:
                validate(self.run, state, segment)
            return False
        if self._released:
            if segment.private is None:
                return False
            return self._judge(segment.private.mean, segment.private.larger_is_better)
        record = self.run.record(state, segment)
        evaluation = validate(self.run, state, segment)
        as_test = {f"test_{name}": name for name in evaluation.values}
        name = as_test[str(metrics.judged_by(as_test))]
        better = metrics.larger_is_better(name, evaluation.records)
        return self._judge(float(record[f"validation_{name}"]), better)

    def _judge(self, value: float, larger_is_better: bool) -> bool:
        sign = 1 if larger_is_better else -1
        values = [*self.memory, -math.inf if math.isnan(value) else sign * value]
        last = self._evaluations
        self.memory = [max(values[:-last]), *values[-last:]] if len(values) > last else values
        return not self.exhausted


class StopOnInterrupt(Callback):
    """End a run after the rounds in flight at the first Ctrl-C, at once at the second.

    SIGTERM and SIGHUP count as Ctrl-C.

    Args:
      event: stops the run when it is set; None listens to signals, in the main thread only.
    """

    interrupts = True

    def __init__(self, event: Event | None = None):
        self._given = event

    def start(self, state: SimulationState) -> bool:
        """Listen; a run that was stopped before it began still runs one segment."""
        self._event = self._given or self.run.closing.enter_context(stop_on_signal())
        return int(state.round) == 0 or not self._event.is_set()

    def segment(self, state: SimulationState, segment: Segment) -> bool:
        """Stop if the user has asked to."""
        return not self._event.is_set()


class Checkpoints(Callback):
    """Keep the last three states of a run in a folder, including the state after the last round.

    In the list of callbacks it comes after those whose memory it keeps.

    Args:
      folder: the folder.
      callbacks: callbacks whose `memory` is kept with the state, one of each class.
      every: rounds between checkpoints, up to the next evaluation; by default a minute passes, or
        longer if writing would take more than a twentieth of the time.
      note: other values of JSON to keep.
      keep_last: whether the state after the last round is kept.
    """

    def __init__(
        self,
        folder: CheckpointFolder | Path | str,
        callbacks: Sequence[Callback] = (),
        *,
        every: int | None = None,
        note: Mapping[str, Any] | None = None,
        keep_last: bool = True,
    ):
        require_callbacks(callbacks)
        if every is not None:
            checks.count(every=every)
        is_path = isinstance(folder, Path | str)
        self._folder = CheckpointFolder(Path(folder)) if is_path else folder
        self._callbacks = {type(each).__name__: each for each in callbacks}
        self._every, self._note, self._keep_last = every, note, keep_last

    def restore(self, state: SimulationState) -> SimulationState:
        """Return the last state that was kept, and set the memory of the callbacks.

        An empty folder returns `state`, from `init`. Raises ValueError if the checkpoint is
        damaged, or belongs to another run.
        """
        last = self._folder.last()
        if last is None:
            return state
        if last.skipped and is_first():
            after = f"continuing after round {last.round}"
            print(f"fedjaxsim: warning: {last.skipped[0]}; {after}", file=sys.stderr)
        for name, each in self._callbacks.items():
            each.memory = last.note["memory"].get(name, each.memory)
        return last.state(state)

    def save(self, state: SimulationState) -> None:
        """Write a checkpoint; all processes must call it together."""
        begin = time.monotonic()
        for each in self._callbacks.values():
            each.sync()
        memory = {name: each.memory for name, each in self._callbacks.items()}
        self._folder.save(int(state.round), state, {**(self._note or {}), "memory": memory})
        self._saved(state, time.monotonic() - begin)

    def _saved(self, state: SimulationState, seconds: float = 0.0) -> None:
        self._round, self._due = int(state.round), time.monotonic() + wait_after(seconds)

    def start(self, state: SimulationState) -> None:
        """Count rounds and time from here."""
        self._saved(state)

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Write a checkpoint if one is due by the clock of the first process."""
        due = time.monotonic() > self._due
        if self._every is not None:
            due = segment.round >= self._round + self._every
        if from_all(due)[0] and segment.round < self.run.rounds:
            self.save(state)

    def end(self, state: SimulationState) -> None:
        """Write the last state."""
        done = int(state.round)
        if done != self._round and (self._keep_last or done < self.run.rounds):
            self.save(state)


def wait_after(seconds: float) -> float:
    """Return the seconds until the next checkpoint, if writing one took `seconds`."""
    return max(60.0, 20 * seconds)
