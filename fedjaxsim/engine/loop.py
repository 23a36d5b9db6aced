"""The loop of every run: segments of rounds, an evaluation after each, and callbacks.

A single run has no axis of runs; otherwise it is treated as S runs in one program.
"""

import contextlib
import dataclasses
import html
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedjaxsim import checks
from fedjaxsim.algorithm import Metrics
from fedjaxsim.checks import described
from fedjaxsim.divergence import Record
from fedjaxsim.engine.evaluation import (
    Evaluation,
    EvaluationPlan,
    PrivateMetric,
    release_evaluation,
)
from fedjaxsim.engine.processes import from_all, to_host
from fedjaxsim.engine.state import SimulationState, state_of
from fedjaxsim.extras import importing
from fedjaxsim.metrics import METRICS, MetricRecords
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.assumptions import no_guarantee
from fedjaxsim.privacy.entries import Adjacency, check_delta
from fedjaxsim.privacy.events import PrivacySpend
from fedjaxsim.privacy.guarantee import rdp_epsilon, tight_epsilon

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class Segment:
    """Results of the rounds between two evaluations.

    Attributes:
      round: rounds done at its end.
      metrics: a dict of per-round metrics, (rounds,) numpy arrays: means over the cohort of the
        algorithm's metrics, and "participants", "overflow", "clipped", "nonfinite",
        "noise_multiplier".
      evaluation: on the test split, after the last round.
      private: the released evaluation on the validation split, if the run releases any.

    Example:
      >>> history[-1].metrics["participants"]  # `history` as in `Simulation`
      array([2, 2, 2], dtype=int32)
    """

    round: int
    metrics: dict[str, np.ndarray] = dataclasses.field(repr=False)
    evaluation: Evaluation
    private: PrivateMetric | None = None


_OF_ROUNDS = "participants", "overflow", "clipped", "nonfinite", "noise_multiplier"
"""Metrics of a round, not of its clients."""
_SHOWN = 12
"""Most evaluations that a history shows."""


class History(tuple[Segment, ...]):
    """The segments of a run, in the order of rounds.

    Example:
      >>> [segment.round for segment in history]  # `history` as in `Simulation`
      [3]
    """

    def __repr__(self) -> str:
        """Return a table of metrics, without the middle of a long run; S runs show their range."""
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in table) or "()"

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        rows = (f"<tr><td>{'</td><td>'.join(map(html.escape, row))}</td></tr>"
                for row in self._table())  # fmt: skip
        return f"<table>{''.join(rows)}</table>"

    def _table(self) -> list[list[str]]:
        half, table = _SHOWN // 2, list[list[str]]()
        for segment in self if len(self) <= _SHOWN else self[:half] + self[-half:]:
            summary, split = segment.evaluation.summary(), segment.evaluation.split
            shown = {"round": f"{segment.round:,}"}
            for key in (f"{split}_{name}" for name in segment.evaluation.values):
                extremes = f"{np.min(summary[key]):.4g}", f"{np.max(summary[key]):.4g}"
                shown[key] = " to ".join(dict.fromkeys(extremes))
            table += [[*shown.values()]] if table else [[*shown], [*shown.values()]]
        if len(self) > _SHOWN:
            table.insert(1 + half, ["…"] * len(table[0]))
        return table

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with one row per evaluation and, of several runs at once, per run.

        Its columns are "round"; "run", 0 to S − 1, of several runs; the per-round metrics
        ("participants", …), averaged over the segment's rounds or, of the algorithm's, over all who
        took part in them; and the keys of `Evaluation.summary`.
        """
        with importing("tables"):
            import pandas as pd

        rows: list[Record] = []
        for segment in self:
            means = {name: _mean(segment, name) for name, v in segment.metrics.items() if len(v)}
            values = means | segment.evaluation.summary()
            size = next(iter(np.broadcast_shapes(*map(np.shape, values.values()))), None)
            rows += rows_of({"round": segment.round} | values, size)
        return pd.DataFrame(rows)


def _mean(segment: Segment, name: str) -> Any:
    """Average a round's number over the rounds, or a client's over all who took part in them."""
    values = segment.metrics[name]
    if name in _OF_ROUNDS or "participants" not in segment.metrics:
        return np.mean(values, axis=0)
    participants = segment.metrics["participants"]  # of a round or, of several seeds, of each run
    weights = participants.reshape(participants.shape + (1,) * (values.ndim - participants.ndim))
    total = weights.sum(axis=0)
    # An empty cohort has no mean.
    mean = np.sum(weights * np.where(weights > 0, values, 0.0), axis=0) / np.maximum(total, 1)
    return np.where(total > 0, mean, np.nan)[()]  # a number, and no array, of one run


def rows_of(columns: Mapping[str, Any], size: int | None) -> list[Record]:
    """Return a row for each of `size` runs; columns are (size,) or, if the runs share them, ().

    If `size` is None there is one run and no `run` column.
    """
    spread = [np.broadcast_to(column, size or 1).tolist() for column in columns.values()]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*spread, strict=True)]
    return rows if size is None else [{"run": run, **row} for run, row in enumerate(rows)]


_PHASES = "compile", "rounds", "evaluate", "write"


class Callback:
    """Watch, keep or stop a run. The methods do nothing; a subclass overrides those it needs.

    Each process of a run calls its callbacks in the same order, and a run that one process stops
    ends in all of them.

    Attributes:
      initial: whether `segment` is called before the first round, too, with an empty segment.
      interrupts: whether a run that it stops may be resumed: the last evaluation may then be of a
        sample, as in a run that was not stopped.
      public: sentences on what it does with private data, which every report of the state names.
      memory: a value of JSON that `fjs.callbacks.Checkpoints` keeps, and sets before `start` when a
        run resumes.
      run: the run, set before `start`.
    """

    initial = False
    interrupts = False
    public: tuple[str, ...] = ()
    memory: Any = None
    run: "RunLoop"

    def start(self, state: SimulationState) -> bool | None:
        """Prepare for the first segment after `state`; return False to run none.

        `self.run.closing` closes its resources after the end, an error or an interruption.
        """

    def segment(self, state: SimulationState, segment: Segment) -> bool | None:
        """Read the state after a segment, and its results; return False to stop the run here.

        The buffers of `state` are reused by the next segment. If the run ends early after an
        evaluation of a sample, the last segment comes once more, evaluated on all clients.
        """

    def sync(self) -> None:
        """Make the files durable that `memory` refers to, before a checkpoint keeps it."""

    def end(self, state: SimulationState) -> None:
        """Finish after the last segment, also if the run was stopped; not after an error."""


Callbacks = Sequence[Callback | Callable[[SimulationState, Segment], bool | None]]
"""Functions `(state, segment)` are callbacks, too."""


class PhaseTimes:
    """Seconds of the phases of a run: a phase inside another counts once, and so does compilation.

    "compile" includes tracing and lowering, in the thread of the run alone; "write" is what
    callbacks do.
    """

    def __init__(self):
        self.seconds: dict[str, float] = dict.fromkeys(_PHASES, 0.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a block, or of calls of a function."""
        begin, before = time.perf_counter(), sum(self.seconds.values())
        yield
        inside = sum(self.seconds.values()) - before
        self.seconds[name] += max(time.perf_counter() - begin - inside, 1e-9)

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        here = threading.get_ident() == self._thread
        if here and event.startswith("/jax/core/compile/"):
            self.seconds["compile"] += duration_secs


class _Progress:
    """Results of a run so far."""

    def __init__(self):
        self.course: list[Record] = []
        self.nonfinite = 0
        self.stopped: Segment | None = None
        self.metrics: MetricRecords = METRICS
        self.recorded: Segment | None = None
        self.records: list[Record] = []


@dataclasses.dataclass(frozen=True)
class RunLoop:
    """A run, or S runs in one program, as its callbacks see it: they cannot change what it does.

    Attributes:
      evaluate: `(state, split, clients) -> Evaluation` of a sample; `clients` None is all of them.
      rounds: rounds done at its end.
      size: S; None for one run, without an axis of runs.
      plan: the evaluations that one run releases, if any.
      sample: the clients whom evaluations before the last one are of; None for all.
      state_of: `(state, run) -> state`, of one of S runs.
      closing: resources that are closed when the run is over.
    """

    evaluate: Callable[[SimulationState, str, np.ndarray | None], Evaluation]
    rounds: int
    delta: float
    size: int | None = None
    plan: EvaluationPlan | None = None
    sample: np.ndarray | None = None
    state_of: Callable[[SimulationState, int], SimulationState] = state_of
    closing: contextlib.ExitStack = dataclasses.field(
        default_factory=contextlib.ExitStack, init=False
    )
    phase_times: PhaseTimes = dataclasses.field(default_factory=PhaseTimes, init=False)
    _progress: _Progress = dataclasses.field(default_factory=_Progress, init=False)

    def __post_init__(self):
        check_delta(self.delta)
        timed = self.phase_times.phase("evaluate")(self.evaluate)
        object.__setattr__(self, "evaluate", timed)

    @property
    def course(self) -> list[Record]:
        """Round, training loss and means of test metrics of each segment so far."""
        return self._progress.course

    @property
    def nonfinite(self) -> int:
        """The number of messages that were not finite so far."""
        return self._progress.nonfinite

    @property
    def metrics(self) -> MetricRecords:
        """The records of the metrics of its evaluations."""
        return self._progress.metrics

    @property
    def stopped(self) -> Segment | None:
        """The last segment of a run that ended early, evaluated on all clients.

        None if its evaluation was not of a sample, or if it was interrupted.
        """
        return self._progress.stopped

    def record(self, state: SimulationState, segment: Segment) -> Record:
        """Return the record of an evaluation of a single run, see `records`."""
        if self.size is not None:
            raise ValueError(f"a callback of this kind takes a single run, got {self.size} runs")
        return self.records(state, segment)[0]

    def records(self, state: SimulationState, segment: Segment) -> list[Record]:
        """Return the flat record of an evaluation of each run, to which callbacks may add.

        It has `run` (0 to S − 1, if there are several), `round`, `train_loss` (mean of the local
        losses of the segment, each participation with equal weight; absent without any), the
        evaluation's summary, `nonfinite` (messages that were not finite and counted as zero, if
        any), `private_` and the name of a metric (the released mean, if any), and `epsilon`
        (zero-out, joint DP; inf without a guarantee). `epsilon_tight` says which it is: True for
        the accountant's value, after the last planned round; False for the larger bound by RDP.
        With a budget it is the whole budget's ε, and `epsilon_spent` bounds what was spent.
        """
        if self._progress.recorded is not segment:
            columns: Record = {"round": segment.round}
            loss = _train_loss(segment)
            columns |= {} if loss is None else {"train_loss": loss}
            columns |= segment.evaluation.summary()
            nonfinite = np.sum(segment.metrics.get("nonfinite", 0), axis=0)
            if np.any(nonfinite):
                columns["nonfinite"] = nonfinite
            if segment.private is not None:
                columns[f"private_{segment.private.name}"] = segment.private.mean
            columns |= self._epsilons(state, segment.round == self.rounds)
            self._progress.recorded = segment
            self._progress.records = rows_of(columns, self.size)
        return self._progress.records

    def _epsilons(self, state: SimulationState, last: bool) -> Record:
        """Return the columns of ε."""
        limit = state.privacy.limit
        if limit is None:
            epsilon = self.tight_epsilon(state) if last else self.rdp_epsilon(state)
            return {"epsilon": epsilon, "epsilon_tight": last}
        spent, planned = self.rdp_epsilon(state), tight_epsilon(limit.planned, self.delta)
        epsilon = [math.inf if math.isinf(epsilon_of_run) else planned for epsilon_of_run in spent]
        return {"epsilon": epsilon, "epsilon_tight": True, "epsilon_spent": spent}

    def tight_epsilon(
        self, state: SimulationState, adjacency: Adjacency = "zero_out"
    ) -> list[float]:
        """Compute the tight ε of each run so far, in up to a second; with a budget, what it spent.

        It is for joint DP, and inf without a guarantee.
        """
        return [tight_epsilon(charges, self.delta, adjacency) for charges in self.charges(state)]

    def rdp_epsilon(self, state: SimulationState) -> list[float]:
        """Return an upper bound on each run's `tight_epsilon`, by RDP in milliseconds."""
        limit = state.privacy.limit
        most = math.inf if limit is None or self.delta < limit.delta else limit.epsilon

        def of_run(charges):
            bound = rdp_epsilon(charges, self.delta)
            return bound if any(map(no_guarantee, charges)) else min(most, bound)

        return list(map(of_run, self.charges(state)))

    def charges(self, state: SimulationState) -> list[tuple[PrivacySpend, ...]]:
        """Return the charges of each run."""
        privacy = to_host(state.privacy)
        bare = dataclasses.replace(state, shared=(), personal=(), mechanism=(), privacy=privacy)
        states = (
            [bare] if self.size is None else [self.state_of(bare, run) for run in range(self.size)]
        )
        return [tuple(ledger.charged(run_state.privacy)) for run_state in states]


def run_segments(
    advance: Callable[[SimulationState, int], tuple[SimulationState, Metrics]],
    run: RunLoop,
    state: SimulationState,
    eval_every: int | None,
    callbacks: Callbacks,
    keep: int | None,
) -> tuple[SimulationState, History]:
    """Run up to the last round; return the last state and the last `keep` segments.

    Callbacks see `run` and copies of the states, but not `advance`, `(state, rounds) -> (state,
    metrics)`, one compiled segment.

    The buffers of `state` are reused. `eval_every` counts rounds over the life of the state;
    None is one evaluation at the end.
    """
    require_callbacks(callbacks)
    if keep is not None:
        checks.count(0, keep=keep)
    evaluate, rounds, plan, sample = run.evaluate, run.rounds, run.plan, run.sample
    progress, closing, phase_times = run._progress, run.closing, run.phase_times
    hooked = [callback for callback in callbacks if isinstance(callback, Callback)]
    stated = (text for callback in callbacks for text in getattr(callback, "public", ()))
    state = state.announce(sentences=stated)
    steps = [
        callback.segment if isinstance(callback, Callback) else callback for callback in callbacks
    ]
    interrupts = [getattr(callback, "interrupts", False) for callback in callbacks]
    history: deque[Segment] = deque(maxlen=keep)
    segment, ended, done = None, False, int(state.round)

    def released(state: SimulationState) -> tuple[SimulationState, PrivateMetric | None]:
        """Release an evaluation, if the run does and its budget allows it."""
        if plan is None:
            return state, None
        return release_evaluation(state, evaluate(state, "validation", None), plan)

    with closing, phase_times:
        for callback in hooked:
            callback.run = run
        goes_on = _all_go_on([callback.start(_shown(state)) for callback in hooked])
        initial = [callback for callback in hooked if callback.initial]
        if goes_on and done == 0 and initial:
            state, private = released(state)
            evaluation = evaluate(state, "test", sample)
            progress.metrics = evaluation.records
            first = Segment(0, {}, evaluation, private)
            goes_on = _all_go_on([callback.segment(_shown(state), first) for callback in initial])
        while goes_on and done < rounds:
            length = rounds - done
            if eval_every is not None:
                length = min(length, eval_every - done % eval_every)
            with phase_times.phase("rounds"):
                state, metrics = advance(state, length)
                # Fewer rounds than asked for where the budget of the state ends.
                before, done, planned = done, int(state.round), done + length
                metrics = {
                    name: np.asarray(values)[: done - before] for name, values in metrics.items()
                }
            if done == before:
                ended = True
                break
            last = done == rounds or done < planned
            evaluation = evaluate(state, "test", None if last else sample)
            progress.metrics = evaluation.records
            state, private = released(state)
            segment = Segment(done, metrics, evaluation, private)
            history.append(segment)
            progress.nonfinite += int(np.sum(metrics.get("nonfinite", 0)))
            progress.course += _course(segment, alone=not progress.course and done == rounds)
            with phase_times.phase("write"):
                answers = [step(_shown(state), segment) for step in steps]
            lasting = [i or answer for i, answer in zip(interrupts, answers, strict=True)]
            ended = not _all_go_on(lasting) or done < planned
            ended |= plan is not None and private is None
            goes_on = not ended and _all_go_on(answers)
        if segment and segment.evaluation.clients is not None and (ended or history):
            evaluation = evaluate(state, "test", None)
            full_segment = dataclasses.replace(segment, evaluation=evaluation)
            if ended:
                progress.stopped = full_segment
                with phase_times.phase("write"):
                    for step in steps:
                        step(_shown(state), full_segment)
            if history:
                history[-1] = full_segment
        with phase_times.phase("write"):
            for callback in hooked:
                callback.end(_shown(state))
    return state, History(history)


def _shown(state: SimulationState) -> SimulationState:
    """Return a copy of a state, with the same arrays, for a callback; it is read-only."""

    def fixed(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):  # clients' states of a streamed simulation
            leaf = leaf.view()
            leaf.flags.writeable = False
        return leaf

    return jax.tree.map(fixed, state)


def require_callbacks(callbacks: Any) -> None:
    """Check that an argument is a list of callbacks."""
    if not isinstance(callbacks, Sequence):
        raise ValueError(f"callbacks must be a list, got {described(callbacks)}")
    for callback in callbacks:
        if isinstance(callback, type):
            raise ValueError(
                f"callbacks must be objects, such as {callback.__name__}(), got the class"
            )
        if not isinstance(callback, Callback):
            try:
                inspect.signature(callback).bind("state", "segment")
            except TypeError:
                got = described(callback)
                raise ValueError(f"a callback must take (state, segment), got {got}") from None


def _all_go_on(answers: Sequence[bool | None]) -> bool:
    """Return whether no callback of any process stops the run."""
    return all(from_all(all(answer is None or bool(answer) for answer in answers)))


def _train_loss(segment: Segment) -> Any:
    took_part = segment.metrics.get("participants", np.zeros(0)).sum()
    return _mean(segment, "loss") if took_part and "loss" in segment.metrics else None


def _course(segment: Segment, alone: bool) -> list[Record]:
    """Return the course of a run in a segment, the only one in two halves."""
    metrics, evaluation = segment.metrics, segment.evaluation
    half = len(next(iter(metrics.values()), ())) // 2
    cuts = [slice(half), slice(half, None)] if alone and half else [slice(None)]
    rows = []
    for cut in cuts:
        part = dataclasses.replace(
            segment, metrics={n: values[cut] for n, values in metrics.items()}
        )
        rows.append({"round": segment.round, "train_loss": _train_loss(part)})
    return [
        *rows[:-1],
        rows[-1] | {f"test_{name}": evaluation.mean(name) for name in evaluation.values},
    ]
