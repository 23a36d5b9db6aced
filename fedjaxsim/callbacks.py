"""Callbacks of a run: progress, records, loggers, checkpoints, patience, an end by Ctrl-C.

`Simulation.run(…, callbacks=[…])` calls them, or functions `(state, segment)`, after evaluations.
"""

import contextlib
import importlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from fedjaxsim import checks, extras, metrics
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.loop import Callback as Callback
from fedjaxsim.engine.loop import Record, Segment, require_callbacks, rows_of
from fedjaxsim.engine.loop import RunLoop as RunLoop
from fedjaxsim.engine.processes import from_all, is_first
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy.assumptions import EVALUATED, STOPPING
from fedjaxsim.records import MetricsFile as MetricsFile
from fedjaxsim.records import Records as Records
from fedjaxsim.records import RunsReport as RunsReport
from fedjaxsim.records import comparison as comparison
from fedjaxsim.records import report as report
from fedjaxsim.report.files import strict
from fedjaxsim.report.progress import Bar, in_words, number
from fedjaxsim.signals import stop_on_signal

_BETWEEN, _SHARE = 60.0, 20
"""Default cadence of checkpoints: seconds between them, and times the duration of writing one."""
SMALL = 64 * 10**6
"""Bytes of a state that is copied, and written while the next rounds compute."""
LOGGERS = "tensorboard", "wandb"
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Progress(Callback):
    """Show a bar with the latest metrics on a terminal; elsewhere, print a line per evaluation.

    Args:
      title: name of the run.
      quiet: whether nothing is printed.
    """

    everywhere, initial = False, True

    def __init__(self, title: str = "run", *, quiet: bool = False):
        self._title, self._quiet = title, quiet

    def start(self, state: SimulationState) -> None:
        """Show the bar."""
        self._begin = int(state.round)
        bar = Bar(self._title, self.run.rounds, quiet=self._quiet)
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


class Logger(Callback):
    """Send each evaluation to a logger.

    It gets the finite numbers of the record (see `RunLoop.records`), and `rounds/NAME`, the mean of
    each per-round metric over the segment.

    Args:
      name: "tensorboard" or "wandb", whose environment variables (WANDB_MODE, WANDB_PROJECT) apply.
      title: name of the run.
      settings: settings of the run, by name.
      directory: parent of tensorboard's folder `tensorboard`.
    """

    everywhere, initial = False, True

    def __init__(
        self,
        name: str,
        title: str = "run",
        settings: Mapping[str, Any] | None = None,
        directory: Path | str | None = None,
    ):
        checks.one_of(LOGGERS, log=name)
        extras.require(name)
        if name == "tensorboard" and directory is None:
            raise ValueError("log tensorboard needs a directory for its files (out)")
        self._name, self._title = name, title
        self._settings, self._directory = dict(settings or {}), Path(directory or ".")

    def start(self, state: SimulationState) -> None:
        """Open the log."""
        self._write = self._opened(self.run.closing)

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Log an evaluation."""
        record = self.run.record(state, segment)
        values = {name: value for name, value in record.items() if name != "round"}
        values |= {f"rounds/{k}": each.mean() for k, each in segment.metrics.items() if len(each)}
        known = {name: float(value) for name, value in values.items() if value is not None}
        finite = {name: value for name, value in known.items() if math.isfinite(value)}
        self._write(finite, step=segment.round)

    def _opened(self, closing: contextlib.ExitStack) -> Callable[..., Any]:
        """Open a log; return the function that writes values by name at a `step`."""
        if self._name == "tensorboard":
            from tensorboardX import SummaryWriter

            writer = SummaryWriter(str(self._directory / "tensorboard"))
            closing.callback(writer.close)

            def write(values: Mapping[str, float], step: int) -> None:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
                writer.flush()

            return write
        wandb: Any = importlib.import_module("wandb")
        project = os.environ.get("WANDB_PROJECT", "fedjaxsim")
        wandb.init(project=project, name=self._title, config=self._settings)
        closing.callback(wandb.finish)
        return wandb.log


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
    summary = found.summary()
    columns = {name: summary[name] for name in (f"validation_{each}" for each in found.values)}
    for record, more in zip(run.records(state, segment), rows_of(columns, run.size), strict=True):
        record.update({name: value for name, value in more.items() if name in columns})
    return found


class Patience(Callback):
    """Stop a run whose metric on validation rows no longer improves.

    The metric is the first of `metrics.METRICS` that the run has, added to the run's record for
    later callbacks, or the one that the run releases. It must state its direction. A mean that is
    NaN, because a client has failed, is no improvement. The guarantee covers the choice of the last
    round by a released metric in a run with a budget, and no other: see docs/runs.md.

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
        return self._judge(float(record[f"validation_{name}"]), evaluation.direction(name))

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


class Cadence(NamedTuple):
    """Interval of checkpoints in `rounds` or `seconds`; by default as in `Checkpoints`."""

    rounds: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: "Cadence | str | int | None") -> "Cadence":
        """Read `--checkpoint-every`: rounds as in `10`, time as in `30s`, `5min`, `2h`."""
        if text is None or isinstance(text, Cadence):
            return text or cls()
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *(rounds|s|min|h|)", str(text).strip())
        of_rounds = found is not None and found[2] in ("", "rounds")
        if found is None or float(found[1]) == 0 or (of_rounds and "." in found[1]):
            raise ValueError(
                "checkpoint-every must be rounds, as in 10, or time, as in 30s, 5min or 2h, got "
                f"{text!r}"
            )
        amount = float(found[1])
        return cls(int(amount)) if of_rounds else cls(seconds=amount * _UNITS[found[2]])

    def is_due(self, rounds: int, seconds: float, writing: float) -> bool:
        """Return whether a checkpoint is due; writing the last one took `writing` seconds."""
        if self.rounds is not None:
            return rounds >= self.rounds
        wait = max(_BETWEEN, _SHARE * writing) if self.seconds is None else self.seconds
        return seconds > wait


class Checkpoints(Callback):
    """Keep the last three states of a run in a folder, including the state after the last round.

    In the list of callbacks it comes after those whose memory it keeps.

    Args:
      folder: the folder.
      callbacks: callbacks whose `memory` is kept with the state, one of each class.
      every: rounds or time between checkpoints, as in 10, "30s" or "5min", rounded up to the next
        evaluation; by default a minute, or longer if writing would take more than a twentieth of
        the time.
      note: other values of JSON to keep.
      keep_last: whether the state after the last round is kept.
    """

    def __init__(
        self,
        folder: CheckpointFolder | Path | str,
        callbacks: Sequence[Callback] = (),
        *,
        every: Cadence | str | int | None = None,
        note: Mapping[str, Any] | None = None,
        keep_last: bool = True,
    ):
        require_callbacks(callbacks)
        is_path = isinstance(folder, Path | str)
        self._folder = CheckpointFolder(Path(folder)) if is_path else folder
        self._callbacks = {type(each).__name__: each for each in callbacks}
        self._cadence, self._note, self._keep_last = Cadence.parse(every), note, keep_last
        self._saved: tuple[int, float, float] = 0, 0.0, 0.0
        self._writing: Future[float] | None = None

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
        self._finish(self._prepared(state)())

    def _prepared(self, state: SimulationState, *, copied: bool = False) -> Callable[[], float]:
        """Return the function that writes a checkpoint and returns its seconds."""
        memory = {name: each.memory for name, each in self._callbacks.items()}
        note = {**(self._note or {}), "memory": memory}
        write = self._folder.prepared(int(state.round), state, note, copied=copied)
        self._saved = int(state.round), time.monotonic(), self._saved[2]

        def timed() -> float:
            begin = time.monotonic()
            for each in self._callbacks.values():
                each.sync()
            write()
            return time.monotonic() - begin

        return timed

    def _finish(self, seconds: float | None = None) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            seconds = writing.result()
        if seconds is not None:
            self._saved = *self._saved[:2], seconds

    def start(self, state: SimulationState) -> None:
        """Count rounds and time from here."""
        self._saved = int(state.round), time.monotonic(), 0.0
        self._thread = self.run.closing.enter_context(ThreadPoolExecutor(1))

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Write a checkpoint if one is due by the clock of the first process."""
        if self._writing is not None and self._writing.done():
            self._finish()
        round_, at, writing = self._saved
        due = self._cadence.is_due(segment.round - round_, time.monotonic() - at, writing)
        if not from_all(due)[0] or segment.round >= self.run.rounds:
            return
        self._finish()
        if bytes_of(state) > SMALL:
            self.save(state)
            return
        # Waiting for the disk takes longer than copying.
        write = self._prepared(state, copied=True)
        self._writing = self._thread.submit(copy_context().run, write)

    def end(self, state: SimulationState) -> None:
        """Write the last state."""
        self._finish()
        done = int(state.round)
        if done != self._saved[0] and (self._keep_last or done < self.run.rounds):
            self.save(state)
