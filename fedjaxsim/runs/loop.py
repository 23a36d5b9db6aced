"""The one loop of runs: segments, evaluations, checkpoints, until all rounds are done or told to.

What is run is S runs in one program, of which a single run is the case S = 1. What is recorded has
a leading axis of runs: one record for each run and evaluation.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjaxsim import metrics
from fedjaxsim.data.population import Population
from fedjaxsim.engine.checkpoint import Checkpoints
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.processes import from_all
from fedjaxsim.engine.segments import History, Segment
from fedjaxsim.engine.state import SimulationState, state_of
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy import guarantee, ledger
from fedjaxsim.report.files import Record
from fedjaxsim.runs.build import Experiment
from fedjaxsim.simulation import Simulation

_BETWEEN = 60.0
_SHARE = 20
_GROWTH = 10
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}

epsilon = functools.cache(guarantee.spent)
"""ε of some charges; the runs of a sweep, and its evaluations, ask for the same ones again."""


class Runs(Protocol):
    """S runs of one simulation as one program: a `ManyRuns`, or one run."""

    simulation: Simulation

    def init(self, key: jax.Array | int) -> SimulationState:
        """The state before the first round."""
        ...

    def run(self, state: SimulationState, rounds: int) -> tuple[SimulationState, History]:
        """So many more rounds, as one segment; its metrics are (rounds,) or (rounds, S)."""
        ...

    def evaluate(self, state: SimulationState, split: str = "test") -> Evaluation:
        """On the rows of a split; values are (m,) or (m, S)."""
        ...


@dataclasses.dataclass
class OneRun:
    """A simulation with its hyperparameters, as `Runs`.

    Attributes:
      simulation: what is run.
      hparams: hyperparameters.
    """

    simulation: Simulation
    hparams: Hyperparameters

    def init(self, key: jax.Array | int) -> SimulationState:
        """As `Runs.init`."""
        return self.simulation.init(key, self.hparams)

    def run(self, state: SimulationState, rounds: int) -> tuple[SimulationState, History]:
        """As `Runs.run`."""
        return self.simulation.run(state, self.hparams, rounds)

    def evaluate(self, state: SimulationState, split: str = "test") -> Evaluation:
        """As `Runs.evaluate`."""
        return self.simulation.evaluate(state, self.hparams, split)


@dataclasses.dataclass(frozen=True)
class Cadence:
    """When a checkpoint is due, asked after every evaluation.

    Attributes:
      rounds: after so many rounds; None for a rule of time.
      seconds: after so much time; None for a minute, or as much longer as it takes to keep the
        time for writing them at a twentieth.
    """

    rounds: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> "Cadence":
        """Reads `--checkpoint-every`: rounds as in `10`, time as in `30s`, `5min`, `2h`.

        Raises:
          ValueError: for anything else.
        """
        if text is None:
            return cls()
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *(rounds|s|min|h|)", text.strip())
        if found is None or float(found[1]) == 0 or (found[2] in ("", "rounds") and "." in text):
            raise ValueError(
                "checkpoint-every must be rounds, as in 10, or time, as in 30s, 5min or 2h, got "
                f"{text!r}"
            )
        if found[2] in _UNITS:
            return cls(seconds=float(found[1]) * _UNITS[found[2]])
        return cls(rounds=int(found[1]))

    def is_due(self, rounds: int, seconds: float, writing: float) -> bool:
        """Whether one is, so many rounds and seconds after the last, which took `writing`."""
        if self.rounds is not None:
            return rounds >= self.rounds
        wait = max(_BETWEEN, _SHARE * writing) if self.seconds is None else self.seconds
        return seconds > wait


class Outcome(NamedTuple):
    """What a loop has come to.

    Attributes:
      state: after the last round.
      rows: records of all evaluations, in order, S for each.
      evaluation: of the last state.
      seconds: of rounds and evaluations, without compilation, over all parts of the run.
      compile_seconds: tracing, lowering and compiling, since the loop began.
    """

    state: SimulationState
    rows: list[Record]
    evaluation: Evaluation
    seconds: float
    compile_seconds: float

    @property
    def round(self) -> int:
        """Rounds done."""
        return int(self.state.round)


def advance(
    runs: Runs,
    experiments: Sequence[Experiment],
    rounds: int,
    *,
    stop: Event,
    begin: SimulationState | None = None,
    numbers: Sequence[int] = (0,),
    checkpoints: Checkpoints | None = None,
    cadence: Cadence = Cadence(),
    extra: Mapping[str, Any] | None = None,
    of_sweep: bool = False,
    on_start: Callable[[list[Record]], None] | None = None,
    on_rows: Callable[[list[Record], float | None], None] | None = None,
    on_segment: Callable[[SimulationState, Segment], None] | None = None,
) -> Outcome:
    """Runs to the last round, from the last checkpoint where there is one.

    Args:
      runs: what is run.
      experiments: S of them, which give δ, evaluation and seed.
      rounds: how many are done at the end.
      stop: once it is set, in any of several processes, the loop ends after the segment in flight,
        with a checkpoint.
      begin: the state to start from, which is kept at once; by default that before the first round.
      numbers: S names of the runs in records.
      checkpoints: where states are kept; None keeps none.
      cadence: when.
      extra: what else each checkpoint notes.
      of_sweep: whether the last records have ε for replacement, too, and the state after the last
        round is not kept.
      on_start: called with the records of the checkpoint that this goes on from, or none.
      on_rows: called with the S records of each evaluation, and the rounds per second so far, None
        while unknown.
      on_segment: called with the state and what a segment gave, and before the first round.
    """
    config = experiments[0].config
    with _Clock().running() as clock:
        state = runs.init(config.seed) if begin is None else begin
        rows: list[Record] = []
        seconds = 0.0
        saved = None if checkpoints is None else checkpoints.last()
        if saved is not None:
            state = saved.state(state)
            rows, seconds = saved.note["rows"], saved.note["seconds"]
        if on_start is not None:
            on_start(rows)
        done = int(state.round)
        evaluation = None
        saved_at, saved_round, writing = time.monotonic(), done, 0.0

        def keep(segment: Segment) -> None:
            nonlocal evaluation
            evaluation = segment.evaluation
            both = of_sweep and done == rounds
            found = records(experiments, numbers, state, segment, replace=both)
            if config.patience is not None:
                validated = runs.evaluate(state, "validation").summary()
                found = [row | _judged_by(validated) for row in found]
            rows.extend(found)
            if on_rows is not None:
                on_rows(found, done / seconds if seconds else None)
            if on_segment is not None:
                on_segment(state, segment)

        def save() -> None:
            nonlocal saved_at, saved_round, writing
            if checkpoints is None:
                return
            start = time.monotonic()
            note = {"rows": rows, "seconds": seconds, **(extra or {})}
            checkpoints.save(done, state, note)
            saved_at, saved_round = time.monotonic(), done
            writing = saved_at - start

        if saved is None:
            keep(Segment(done, {}, runs.evaluate(state)))
            if begin is not None:
                save()

        def ends() -> bool:
            return done == rounds or stopping or stopped_early(rows, config.patience)

        stopping, _ = _together(stop.is_set())
        while not (done and ends()):
            clock.lap()
            # A segment at a time: what a run returns of its evaluations would add up.
            length = min(config.eval_every - done % config.eval_every, rounds - done)
            state, [segment] = runs.run(state, length)
            done += length
            seconds += clock.lap()
            keep(segment)
            since = time.monotonic() - saved_at
            due = cadence.is_due(done - saved_round, since, writing)
            stopping, due = _together(stop.is_set(), due)
            if due and not ends():
                save()
        if done < rounds or not of_sweep:
            save()
        if evaluation is None:
            evaluation = runs.evaluate(state)
    return Outcome(state, rows, evaluation, seconds, clock.compile_seconds)


def _together(stop: bool, due: bool = False) -> tuple[bool, bool]:
    """Whether any process is to stop, and whether a checkpoint is due by the first one's clock."""
    said = from_all([stop, due])
    return any(each[0] for each in said), said[0][1]


def records(
    experiments: Sequence[Experiment],
    numbers: Sequence[int],
    state: SimulationState,
    segment: Segment,
    *,
    replace: bool = False,
) -> list[Record]:
    """One evaluation of S runs as S records.

    Args:
      experiments: S of them.
      numbers: S names of the runs.
      state: after the segment.
      segment: what it gave.
      replace: whether ε for replacement is asked for, too; it takes as long again.

    Returns:
      For each run `run`, `round`, `train_loss` (the mean of the local losses during the segment,
      every participation with equal weight; None where nobody took part or measured it), the
      evaluation's metrics, `epsilon` and `epsilon_replace` so far (joint DP; inf where nothing is
      promised) and `delta`.
    """
    privacy = jax.tree.map(np.asarray, state.privacy)
    bare = dataclasses.replace(state, shared=(), personal=(), mechanism=(), privacy=privacy)
    several = privacy.charges[0].rounds.ndim > 1
    own = [state_of(bare, index) if several else bare for index in range(len(experiments))]
    charged = [tuple(ledger.charged(one.privacy)) for one in own]
    deltas = [experiment.delta for experiment in experiments]
    pairs = list(zip(charged, deltas, strict=True))
    by = experiments[0].simulation.accountant
    nothing = [None] * len(experiments)
    columns = {
        "train_loss": _train_loss(segment),
        **segment.evaluation.summary(),
        "epsilon": [epsilon(*pair, accountant=by) for pair in pairs],
        "epsilon_replace": (
            [epsilon(*pair, "replace", accountant=by) for pair in pairs] if replace else nothing
        ),
        "delta": deltas,
    }
    values = [
        nothing if value is None else np.broadcast_to(value, len(experiments)).tolist()
        for value in columns.values()
    ]
    return [
        {"run": run, "round": segment.round, **dict(zip(columns, of_run, strict=True))}
        for run, *of_run in zip(numbers, *values, strict=True)
    ]


def stopped_early(records: Sequence[Record], patience: int | None) -> bool:
    """Whether the last so many evaluations of a run were no better than the best one before them.

    Args:
      records: of one run, with the metric on validation rows by which runs are judged.
      patience: how many evaluations; None for all there are.
    """
    if patience is None or len(records) <= patience:
        return False
    [name] = (name for name in records[0] if name.startswith("validation_"))
    sign = 1 if metrics.of_column(name).larger_is_better else -1
    values = np.nan_to_num([sign * record[name] for record in records], nan=-np.inf)
    return bool(max(values[-patience:]) <= max(values[:-patience]))


def _judged_by(summary: Mapping[str, Any]) -> Record:
    """Of the metrics on validation rows, the one by which runs are judged on test rows."""
    as_test = {f"test_{name.partition('_')[2]}": name for name in summary}
    name = as_test[str(metrics.judged_by(as_test))]
    return {name: float(summary[name])}


def diverged(records: Sequence[Record]) -> Iterator[bool]:
    """Whether a run has diverged, evaluation by evaluation.

    It has from where its training loss, or a test metric that was finite at first, is not finite;
    and where its training loss is more than ten times its first one. A run that noise carries away
    from a good start is worse, and not diverging. Accuracy can look healthy for long meanwhile.

    Args:
      records: of one run, from its first evaluation on.
    """

    def finite(value: Any) -> bool:
        return value is None or math.isfinite(value)

    # A metric that has no value from the start (no client has test rows) says nothing.
    metrics = {name for record in records for name in record if name.startswith("test_")}
    watched = ["train_loss", *(name for name in metrics if finite(records[0].get(name)))]
    first, broken, growing = None, False, False
    for record in records:
        loss = record.get("train_loss")
        broken |= not all(finite(record.get(name)) for name in watched)
        if loss is not None and not broken:
            first = loss if first is None else first
            growing = loss > _GROWTH * first
        yield broken or growing


def fingerprint_of(population: Population) -> str:
    """Return a hash of all rows and of which client has which."""
    generate = population.generate
    found = hashlib.sha256(getattr(generate, "__qualname__", repr(generate)).encode())
    arrays = {f"field {name}": values for name, values in population.fields.items()}
    for name, ranges in population.splits.items():
        arrays |= {f"start {name}": ranges.start, f"count {name}": ranges.count}
    for name, values in sorted((arrays | {"names": population.names}).items()):
        array = np.ascontiguousarray(values)
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:16]


def digest(*settings: Any) -> str:
    """Return a hash of settings: what JSON can hold, and objects that print alike if equal."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _train_loss(segment: Segment) -> Any:
    weights = segment.metrics.get("participants", np.zeros(0))
    losses = segment.metrics.get("loss")
    if losses is None or not weights.sum():
        return None  # an algorithm of one's own need not measure it
    present = (weights > 0).reshape(-1, *[1] * (losses.ndim - 1))
    return weights @ np.where(present, losses, 0.0) / weights.sum()


class _Clock:
    """Tells the time spent compiling from the time spent computing.

    Attributes:
      compile_seconds: tracing, lowering and compiling, while the clock runs.
    """

    def __init__(self):
        self.compile_seconds = 0.0
        self._last = 0.0, 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator["_Clock"]:
        """Listens to the compiler."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self.lap()
        try:
            yield self
        finally:
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def lap(self) -> float:
        """Seconds since the last lap, without those of compilation."""
        now = time.perf_counter(), self.compile_seconds
        seconds = (now[0] - self._last[0]) - (now[1] - self._last[1])
        self._last = now
        return max(seconds, 1e-9)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event.startswith("/jax/core/compile/"):
            self.compile_seconds += duration_secs
