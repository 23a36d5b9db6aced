"""Callbacks of a run: progress, records, checkpoints, patience, an end by Ctrl-C.

`Simulation.run(…, callbacks=[…])` calls them, or functions `(state, segment)`, after evaluations.
`compare_records` makes a table of the records of several runs.
"""

import contextlib
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from fedjaxsim import checks, metrics, store
from fedjaxsim.divergence import Record, failures
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.loop import Callback as Callback
from fedjaxsim.engine.loop import RunLoop as RunLoop
from fedjaxsim.engine.loop import Segment, require_callbacks, rows_of
from fedjaxsim.engine.processes import from_all, is_first
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy.assumptions import EVALUATED, STOPPING
from fedjaxsim.report.files import lines, strict
from fedjaxsim.report.progress import Bar, in_words, number
from fedjaxsim.report.results import SPENT, Run, System, compared, table_of_means
from fedjaxsim.signals import stop_on_signal

_logger = logging.getLogger(__name__)
_NONE = -1
"""The round of the last line of an empty file."""


class Progress(Callback):
    """Show a bar with the latest metrics on a terminal; elsewhere, print a line per evaluation.

    The first line whose ε is a quick bound says so. Runs of a sweep print one line when they are
    done. Of several processes the first one does; none if it is `quiet`.
    """

    initial = True

    def __init__(self, title: str = "run", *, quiet: bool = False):
        self._title, self._quiet = title, quiet

    def start(self, state: SimulationState) -> None:
        """Show the bar."""
        self._begin, self._told_bound = int(state.round), False
        quiet, is_batch = self._quiet or not is_first(), self.run.size is not None
        bar = Bar(self._title, self.run.rounds, quiet=quiet, only_last=is_batch)
        self._bar = self.run.closing.enter_context(bar)

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Show an evaluation, with the speed so far."""
        done, seconds = segment.round - self._begin, self.run.phase_times.seconds["rounds"]
        speed = done / seconds if done else None
        self.show(self.run.records(state, segment), speed)

    def show(self, records: Sequence[Record], speed: float | None) -> None:
        """Show an evaluation's record of each run, with the rounds/s without compilation."""
        alone, done = self.run.size is None, records[0]["round"]
        words = ""
        if alone:
            record = strict(records[0])
            bound = record.get("epsilon_tight") is False and bool(record["epsilon"])
            tell = bound and not self._told_bound
            self._told_bound |= bound
            words = in_words(record, speed, self.run.metrics, quick_bound=tell)
        elif speed is not None:
            words = f"{number(len(records) * speed)} rounds/s"
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

    The clients are in the segment's evaluation.
    """
    evaluation = run.evaluate(state, "validation", segment.evaluation.clients)
    columns = {
        f"validation_{name}": evaluation.summary()[f"validation_{name}"]
        for name in evaluation.values
    }
    for record, more in zip(run.records(state, segment), rows_of(columns, run.size), strict=True):
        record.update(more)
    return evaluation


class Patience(Callback):
    """Stop a run whose metric on validation rows no longer improves.

    The metric is that by which runs are judged, or the one that the run releases. A mean that is
    NaN is no improvement. The guarantee covers the choice of the last round by a
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
        """Refuse to go on with a run that was stopped, or to follow releases without a budget."""
        if self._released and state.privacy.limit is None:
            raise ValueError(
                "Patience(released=True) needs a state with a budget, from Simulation.with_budget: "
                "no other guarantee covers rounds that follow from releases"
            )
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
        name = as_test[str(metrics.primary_metric(as_test, evaluation.records))]
        better = metrics.require_direction(name, evaluation.records)
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
        self._callbacks = {type(callback).__name__: callback for callback in callbacks}
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
            _logger.warning("%s; %s", last.skipped[0], after)
        for name, callback in self._callbacks.items():
            callback.memory = last.note["memory"].get(name, callback.memory)
        return last.state(state)

    def save(self, state: SimulationState) -> None:
        """Write a checkpoint; all processes must call it together."""
        begin = time.monotonic()
        for callback in self._callbacks.values():
            callback.sync()
        memory = {name: callback.memory for name, callback in self._callbacks.items()}
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


class Records(Callback):
    """Keep the records of all evaluations in `rows` (see `Run.records`)."""

    initial = True
    released = 0
    """As in `MetricsFile`; memory keeps no round that a checkpoint does not."""

    def __init__(self):
        self.memory = list[Record]()

    @property
    def rows(self) -> list[Record]:
        """The records."""
        return self.memory

    def start(self, state: SimulationState) -> None:
        """Forget evaluations after `state`."""
        done = int(state.round)
        self.memory = [row for row in self.memory if 0 < done >= row["round"]]

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Add an evaluation, in place of an earlier one of this round."""
        while self.memory and self.memory[-1]["round"] == segment.round:
            self.memory.pop()
        self.memory += self.run.records(state, segment)


class MetricsFile(Callback):
    """Write the records of all evaluations to a file, a line of JSON each.

    A checkpoint keeps the round of the last line. Lines after it stay in the file until their
    evaluation is done again, for they say what was released. Without a checkpoint a start replaces
    the file.

    Args:
      path: the file; its folders are made.
      exact: whether numbers that are not finite are written as they are, not as null.
    """

    initial = True

    def __init__(self, path: Path | str, *, exact: bool = False):
        self._path, self._exact, self._last = Path(path), exact, _NONE
        self._later: list[bytes] = []

    @property
    def memory(self) -> Any:
        """The round of the last line."""
        return self._last

    @memory.setter
    def memory(self, last: Any) -> None:
        _, self._later = split_lines_at_round(self._path, last)
        self._last = last

    @property
    def rows(self) -> list[Record]:
        """The records, read from the file; null is NaN."""
        rows = (json.loads(line) for line in self._lines())
        return [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]

    @property
    def released(self) -> int:
        """The last round whose evaluation is in the file and still to be done again, or 0."""
        return last_round(self._later)

    def keep_lines(self) -> None:
        """Keep the lines that the file holds until their evaluations are done again."""
        self._later = split_lines_at_round(self._path, _NONE)[1]

    def start(self, state: SimulationState) -> None:
        """Cut the file after the evaluations up to `state`."""
        done = int(state.round)
        if done == 0 and self._last > _NONE:
            self._later = []  # another run with this callback
        if done == 0:
            self._last = _NONE
        if is_first():
            store.make_folder(self._path.parent)
            earlier_lines = [line for line in self._lines() if last_round([line]) <= done]
            store.write(self._path, b"".join([*earlier_lines, *self._later]))
        self._last = min(self._last, done)

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Add an evaluation to the file, in place of an earlier one of this round."""
        records = self.run.records(state, segment)
        added = lines(records, exact=self._exact)
        before = [line for line in self._later if last_round([line]) <= segment.round]
        self._later = self._later[len(before) :]
        if is_first():
            again = segment.round == self._last
            if not again and not before and not self._later:
                store.append(self._path, added)
            elif again or added != b"".join(before):
                earlier_lines = [
                    line for line in self._lines() if last_round([line]) < segment.round
                ]
                store.write(self._path, b"".join([*earlier_lines, added, *self._later]))
        self._last = segment.round

    def _lines(self) -> list[bytes]:
        return split_lines_at_round(self._path, self._last)[0]

    def sync(self) -> None:
        """Make the file durable."""
        if is_first() and self._last > _NONE:
            store.sync(self._path)


Recorded = Records | MetricsFile


class Log(Callback):
    """Forward the record of each evaluation to a tracker, `write(record, step)`.

    The record has numbers alone: losses, metrics, ε if there is one, and the seconds of each phase
    so far. The step is the round. A logger that fails is warned of once, and the run goes on.

    Args:
      write: the writer; `fedjaxsim.runs.loggers` has factories.
      path: file that keeps the last step, so that a run that resumes writes none twice; None keeps
        it in memory.
    """

    initial = True

    def __init__(self, write: Callable[[Record, int], Any], path: Path | None = None):
        self._write, self._path, self._last, self._fails = write, path, _NONE, False

    def start(self, state: SimulationState) -> None:
        """Read the last step that was written."""
        self.open(self.run.closing)

    def open(self, closing: contextlib.ExitStack) -> None:
        """Read the last step that was written; the writer is closed at the end of `closing`."""
        self._last = last_step(self._path)
        close = getattr(self._write, "close", None)
        if close is not None and is_first():
            closing.callback(self._tried, close)

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Write an evaluation that was not written before."""
        seconds = {f"seconds/{name}": value for name, value in self.run.phase_times.seconds.items()}
        self.add(self.run.records(state, segment)[0] | seconds)

    def add(self, record: Record) -> None:
        """Write the record of a round, if it was not written before."""
        values = {name: value for name, value in strict(record).items() if value is not None}
        step = values.pop("round")
        if step <= self._last or self._fails or not is_first():
            return
        # First, so that a run killed in between does not write the step again.
        before = self._last
        self._keep(step)
        if not self._tried(self._write, values, step):
            self._keep(before)

    def _keep(self, step: int) -> None:
        """Note the last step that was written."""
        self._last = step
        if self._path is not None:
            store.make_folder(self._path.parent)
            store.write(self._path, str(step).encode())

    def _tried(self, function: Callable[..., Any], *args: Any) -> bool:
        """Call a function of the logger; return whether it worked. Warn of the first failure."""
        try:
            function(*args)
        except Exception as error:
            if not self._fails:
                warnings.warn(
                    f"the logger fails, and the run goes on without it: {type(error).__name__}: "
                    f"{error}",
                    stacklevel=3,
                )
            self._fails = True
            return False
        return True


def last_step(path: Path | None) -> int:
    """Return the last step in the file of a `Log`; −1 without one."""
    return int(path.read_text("utf-8")) if path is not None and path.exists() else _NONE


class RunsReport(NamedTuple):
    """Table of runs, which prints itself.

    Each of `rows` is a label: its mean over seeds with a 95 % interval, its difference from the
    first label on the seeds that both have, with p (see `fedjaxsim compare`), and its largest
    `epsilon`, `epsilon_replace` and `delta`.
    """

    rows: list[Record]

    def __repr__(self) -> str:
        """Align the columns."""
        means = table_of_means(self.rows, self.rows[0]["metric"], spent=[*SPENT][:2])
        table = [[heading.replace("\n", " ") for heading in means.headings], *means.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(map(str.ljust, line, widths)) for line in table)
        return "\n".join(line.rstrip() for line in lines)


def compare_records(
    runs: Mapping[str, Recorded | Sequence[Recorded]], metric: str | None = None
) -> RunsReport:
    """Make the table of runs of `fedjaxsim compare`: means over seeds, differences and ε.

    Publish private runs of one system only if their seeds differ.

    Args:
      runs: by label, the `Records` or `MetricsFile` of a finished run, or a list of them, a seed
        each. Differences are from the first label.
      metric: a column of the records; by default the one that judges the first run.
    """
    if not isinstance(runs, Mapping) or not runs:
        raise ValueError(f"runs must be a dict of Records by label, got {runs!r}")
    systems = []
    for label, recordings in runs.items():
        of_seeds = {}
        for seed, recording in enumerate(
            recordings if isinstance(recordings, Sequence) else [recordings]
        ):
            rows = recording.rows if isinstance(recording, Recorded) else []
            if not rows or recording.run.size is not None:
                raise ValueError(
                    f"{label!r} needs Records that were callbacks of one finished run, or a list "
                    f"of them with a seed each, got {checks.described(recording)}"
                )
            table = [
                row | {"failed": failed, "delta": recording.run.delta}
                for row, failed in zip(strict(rows), failures(rows), strict=True)
            ]
            of_seeds[seed] = Run(label, {}, seed, table, metrics=recording.run.metrics)
        systems.append(System(label, label, of_seeds, {}))
    if metric is not None:
        checks.one_of(systems[0].first.rows[-1], metric=metric)
    return RunsReport(compared(systems, metric))


def fits(path: Path) -> Callable[[Mapping[str, Any]], None]:
    """Return the check that a checkpoint's note belongs to the `MetricsFile` at a path."""

    def check(note: Mapping[str, Any]) -> None:
        last = note.get("memory", {}).get(MetricsFile.__name__)
        if last is not None:
            split_lines_at_round(path, last)

    return check


def split_lines_at_round(path: Path, last: int) -> tuple[list[bytes], list[bytes]]:
    """Return the whole lines of a file (none if it is missing) up to a round, and those after it.

    Round -1 is before all lines. Raises ValueError if no line is of that round, or one is no
    record.
    """
    content = path.read_bytes() if path.is_file() else b""
    *records, _ = content.split(b"\n")  # the last one is empty, or was cut
    while records and _round(records[-1]) is None:
        records.pop()  # never reached the disk
    rounds = list(map(_round, records))
    if None in rounds:
        raise ValueError(f"{path} has a line that is no record")
    if last > _NONE and last not in rounds:
        raise ValueError(f"{path} lacks the line of round {last}")
    count = sum(round_ is not None and round_ <= last for round_ in rounds)
    full_lines = [line + b"\n" for line in records]
    return full_lines[:count], full_lines[count:]


def last_round(rows: Sequence[bytes]) -> int:
    """Return the last round of some lines; 0 without any."""
    return max((_round(line) or 0 for line in rows), default=0)


def _round(line: bytes) -> int | None:
    """Return the round of a record; None if the line holds none."""
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
