"""Sweeps: the runs of a file or of settings with lists, chunk by chunk."""

import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim import callbacks, store
from fedjaxsim.callbacks import StopOnInterrupt
from fedjaxsim.checks import SettingWarning
from fedjaxsim.clock import ROUNDS, Axis
from fedjaxsim.engine.batch import varying
from fedjaxsim.engine.checkpoint import Checkpoint
from fedjaxsim.extras import missing
from fedjaxsim.metrics import column_label, merge_metrics, require_direction
from fedjaxsim.privacy.guarantee import Report, report
from fedjaxsim.report.files import check_place
from fedjaxsim.report.labels import short_name
from fedjaxsim.report.progress import doing
from fedjaxsim.report.results import SPENT_OF_EXAMPLES, Run, metrics_of, selection_column
from fedjaxsim.runs.build import (
    Experiment,
    check_user_code,
    population_of,
    prepare,
    trusts_code,
)
from fedjaxsim.runs.directory import other_results
from fedjaxsim.runs.execute import log_finished
from fedjaxsim.runs.loggers import FOLDER as LOGS
from fedjaxsim.runs.loggers import Factory
from fedjaxsim.runs.memory import bytes_per_run
from fedjaxsim.runs.sweep_files import SWEEP
from fedjaxsim.runs.sweep_results import (
    SEARCH,
    Best,
    SweepDirectory,
    advise_on_noise,
    best_of,
    check_same,
    default_figures,
    warn_of_constants,
    write_report,
)
from fedjaxsim.runs.sweep_runs import Search, SweepRuns
from fedjaxsim.simulation_batch import SimulationBatch

_GB = 10**9
_AHEAD = 4
"""Most programs that are compiled at once: the rows of each are in memory."""


Family = list[dict[int, Experiment]]
"""Runs of one program: for each seed, experiments by the index of their run, on one simulation."""


class _Chunk(NamedTuple):
    """Runs of one seed that are computed at once."""

    runs: tuple[int, ...]
    first: Experiment
    batch: SimulationBatch

    @property
    def segment(self) -> int:
        """The rounds before the first evaluation."""
        return min(self.first.config.rounds, self.first.config.eval_every)


class SweepResult(NamedTuple):
    """The finished runs of a sweep.

    Attributes:
      path: the folder.
      best: the best final values; None without a finished run, or of runs that choose.
      left: the number of runs to finish.
      reports: the guarantees of the finished runs.
      advice: sentences on models of no use, and on messages that would leave less noise.
    """

    plan: SweepRuns
    path: Path
    runs: list[Run]
    best: Best | None
    left: int
    reports: Sequence[Report] = ()
    advice: Sequence[str | SettingWarning] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep whose input is checked, ready to run, or to go on in its folder.

    Attributes:
      chooses: whether the runs choose settings, and have no report.
      quiet: whether no progress is shown.
      axis: horizontal axis of the curves.
      loggers: a dict of trackers' factories, which get each finished run as a separate run.
    """

    plan: SweepRuns
    directory: SweepDirectory
    families: list[Family]
    checkpoint_every: int | None = None
    chooses: bool = False
    quiet: bool = False
    axis: Axis = ROUNDS
    loggers: Mapping[str, Factory] = dataclasses.field(default_factory=dict)

    @property
    def remark(self) -> str:
        """A sentence that the user should read before it runs; or ""."""
        return "" if self.chooses else self.plan.remark

    def run(self, stop: Event) -> SweepResult:
        """Compute the runs that are not finished, and write the report of all that are.

        Setting `stop` ends it after the rounds in flight; the same sweep then goes on.
        """
        plan, directory = self.plan, self.directory
        begun, finished = directory.checkpoint(), directory.finished()
        done = len(finished)
        self._log(directory.runs() if self.loggers else ())  # what an interruption left
        every = (_chunks(plan, family, finished, begun) for family in self.families)
        for chunk in _compiled_ahead(every, quiet=self.quiet):
            if begun and tuple(begun.note["runs"]) != chunk.runs:
                directory.checkpoints.clear()
            title = f"runs {done + 1}–{done + len(chunk.runs)} of {len(plan.runs)}"
            progress = callbacks.Progress(title, quiet=self.quiet)
            self._log(_compute(chunk, directory, stop, self.checkpoint_every, progress))
            if stop.is_set():
                break
            done += len(chunk.runs)
        runs = directory.runs()
        result = SweepResult(plan, directory.path, runs, None, len(plan.runs) - len(runs))
        if not runs or self.chooses:
            return result
        best, experiments = best_of(plan.ranking, runs), experiments_of(self.families)
        with doing("writing the report", quiet=self.quiet):
            reports = write_report(plan, directory, runs, best, experiments)
            self._draw(runs, best, experiments)
        worse = warn_of_constants(best, runs, experiments)
        advice = (*worse, *advise_on_noise(runs, experiments))
        return result._replace(best=best, reports=reports, advice=advice)

    def _log(self, runs: Sequence[Run]) -> None:
        """Forward finished runs to the loggers, without the swept settings in their rows."""
        folder, settings = self.directory.path, {"run", "delta", *self.plan.columns}
        name = f"{folder.parent.name}-{folder.name}" if self.chooses else folder.name
        for run in runs:
            rows = [{k: v for k, v in row.items() if k not in settings} for row in run.rows]
            path = folder / LOGS / f"{name}-{run.name}"
            log_finished(self.loggers, self.plan.runs[int(run.name)], path, rows)

    def _draw(self, runs: list[Run], best: Best, experiments: dict[int, Experiment]) -> None:
        if missing("plots") is not None:
            return
        from fedjaxsim.report import plots

        per_round = {str(run): of.per_round(self.axis) for run, of in experiments.items()}
        figures = default_figures(self.plan, runs, best.metric, self.axis, per_round)
        for picture, figure in figures.items():
            for ending in (".png", ".pdf"):
                plots.save(figure, (self.directory.path / picture).with_suffix(ending))


class SearchedSweep(NamedTuple):
    """A sweep that first chooses settings, whose input is checked.

    Attributes:
      choose: the runs that choose.
      prepare: makes the sweep of a plan with the chosen settings.
    """

    plan: Search
    choose: Sweep
    prepare: Callable[[SweepRuns], "Sweep | SearchedSweep"]

    @property
    def remark(self) -> str:
        """No sentence: nothing is known yet of the chosen runs."""
        return ""

    def run(self, stop: Event) -> SweepResult:
        """Choose, then run the chosen; as `Sweep.run`."""
        tuning, result = self.choose.plan, self.choose.run(stop)
        if result.left:
            return result
        best = best_of(tuning.ranking, result.runs)
        judged = column_label(selection_column(result.runs, best.metric), metrics_of(result.runs))
        with doing("checking the chosen runs", quiet=self.choose.quiet):
            chosen = self.prepare(self.plan.chosen(best.rows, judged))
        return chosen.run(stop)


def prepare_sweep(
    plan: SweepRuns | Search,
    out: Path,
    *,
    checkpoint_every: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    chooses: bool = False,
    axis: Axis = ROUNDS,
    loggers: Mapping[str, Factory] = MappingProxyType({}),
    say_how_far: Callable[[str], None] = lambda _: None,
) -> Sweep | SearchedSweep:
    """Check all input of a sweep before anything is computed, and open its folder."""
    check_place(out, "sweep")
    store.check_free(out)
    how: dict[str, Any] = {"checkpoint_every": checkpoint_every, "quiet": quiet, "axis": axis}
    how |= {"loggers": loggers}
    if isinstance(plan, Search):
        if not overwrite and (out / SWEEP).is_file() and not (out / SEARCH / SWEEP).is_file():
            raise other_results(out, "sweep", {}, {}, "without a search")
        prepare = functools.partial(prepare_sweep, overwrite=overwrite, **how)
        first = prepare(plan.tuning(), out / SEARCH, chooses=True, say_how_far=say_how_far)
        assert isinstance(first, Sweep)
        return SearchedSweep(plan, first, functools.partial(prepare, out=out))
    if not overwrite:
        check_same(out, plan)  # before code is traced, which takes minutes
    families = families_of(plan, say_how_far)
    firsts = [next(iter(family[0].values())) for family in families]
    metrics = merge_metrics(first.metrics for first in firsts)
    for first in firsts:
        if chooses and not first.simulation.population.has("validation"):
            raise ValueError("a search chooses on validation rows: set validation-fraction")
    if plan.best_over or chooses:
        require_direction(next(iter(metrics)), metrics)
    fingerprint = "-".join(first.simulation.population.fingerprint for first in firsts)
    code = "-".join(first.code_fingerprint for first in firsts)
    directory = SweepDirectory.open(out, plan, fingerprint, metrics, code=code, overwrite=overwrite)
    directory.checkpoint()  # refuses that of another sweep
    directory.ledgers()  # refuses damaged ones
    return Sweep(plan, directory, families, chooses=chooses, **how)


def families_of(
    plan: SweepRuns, say_how_far: Callable[[str], None] = lambda _: None
) -> list[Family]:
    """Prepare all runs of a sweep; runs of a family share the simulation of its first seed."""
    prepared, families = [], plan.families()
    for groups in families:
        if prepared:
            say_how_far(f"{len(prepared)} of {len(families)} programs")
        first = prepare(plan.runs[groups[0][0]])
        prepared.append([
            {run: prepare(plan.runs[run], first.simulation) for run in group} for group in groups
        ])  # fmt: skip
    firsts = [next(iter(family[0].values())) for family in prepared]
    unchecked = [first for first in firsts if not trusts_code(first.config)]
    # The check compiles, so what is refused without it comes first.
    for number, first in enumerate(unchecked, 1):
        program = f"{short_name(first.config.algorithm)}, {number} of {len(unchecked)} programs"
        say_how_far(f"checking your code with {program} (--trust-own-code leaves this out)")
        check_user_code(first)
    return prepared


def experiments_of(families: list[Family]) -> dict[int, Experiment]:
    """Return the experiments by the index of their run."""
    groups = itertools.chain(*families)
    return {run: experiment for group in groups for run, experiment in group.items()}


def _compute(
    chunk: _Chunk,
    directory: SweepDirectory,
    stop: Event,
    checkpoint_every: int | None,
    progress: callbacks.Progress,
) -> list[Run]:
    """Run a chunk to its end, or to its next checkpoint; return its runs if they are finished."""
    runs, first, batch = chunk
    config, recorded = first.config, callbacks.MetricsFile(directory.rows, exact=True)
    checkpoints = callbacks.Checkpoints(
        directory.checkpoints,
        [recorded],
        every=checkpoint_every,
        note={"runs": runs, "places": batch.capacity},
        keep_last=False,
    )
    state = checkpoints.restore(batch.init(config.seed))
    validated = batch.simulation.population.has("validation")
    state, _ = batch.run(
        state,
        config.rounds - int(state.round),
        eval_every=config.eval_every,
        callbacks=[
            *([callbacks.Validation()] if validated else []),
            recorded,
            progress,
            checkpoints,
            StopOnInterrupt(stop),
        ],
        delta=first.delta,
        keep=0,
        eval_clients=config.sample,
    )
    if int(state.round) < config.rounds:
        return []
    replace, charges = recorded.run.tight_epsilon(state, "replace"), recorded.run.charges(state)
    rows = [{**row, "run": runs[row["run"]], "delta": first.delta} for row in recorded.rows]
    for row, epsilon, of_run in zip(rows[-len(runs) :], replace, charges, strict=True):
        row["epsilon_replace"] = epsilon
        if any(charged.event.unit == "example" for charged in of_run):
            spent = report(of_run, first.delta).epsilons()
            row |= {name: spent[name] for name in SPENT_OF_EXAMPLES if name in spent}
    return directory.add(rows, dict(zip(runs, charges, strict=True)))


def _compiled_ahead(families: Iterator[Iterator[_Chunk]], *, quiet: bool) -> Iterator[_Chunk]:
    """Yield the chunks of all families, while threads compile what the next families begin with."""
    count = min(os.cpu_count() or 1, _AHEAD)
    pool = ThreadPoolExecutor(count)

    def begun() -> Iterator[tuple[list[Future[Any]], Iterator[_Chunk]]]:
        for chunks in families:
            if (first := next(chunks, None)) is not None:
                programs = first.batch.lower(first.first.config.seed, first.segment)
                compiling = [pool.submit(program.compile) for program in programs]
                yield compiling, itertools.chain([first], chunks)

    coming, waiting = begun(), collections.deque[tuple[list[Future[Any]], Iterator[_Chunk]]]()
    try:
        while True:
            with doing("compiling", quiet=quiet):
                waiting.extend(itertools.islice(coming, count + 1 - len(waiting)))
                if not waiting:
                    return
                compiling, chunks = waiting.popleft()
                for future in compiling:
                    future.result()
            yield from chunks
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _chunks(
    plan: SweepRuns, family: Family, done: set[int], checkpoint: Checkpoint | None
) -> Iterator[_Chunk]:
    """Cut the unfinished runs of a family into chunks that fit the memory budget."""
    experiments = experiments_of([family])
    all_hparams = [experiment.hparams for experiment in experiments.values()]
    simulation = next(iter(experiments.values())).simulation
    fitting = 1
    if max(map(len, family)) > 1:
        run_bytes = bytes_per_run(simulation, all_hparams[0])
        fitting = max(1, int(plan.options.memory * _GB // run_bytes))
    # The places of a program follow from the plan or from the checkpoint that it resumes, not
    # from the runs left: otherwise a checkpoint would not fit the program that reads it.
    places = max(len(_cut([*group], fitting)[0]) for group in family)
    if checkpoint and checkpoint.note["runs"][0] in experiments:
        places = checkpoint.note["places"]
    shared: SimulationBatch | None = None
    for index, group in enumerate(family):
        if index:
            config = next(iter(group.values())).config
            simulation = simulation.with_population(population_of(config))
        # The first of these chunks is the interrupted one, whatever was done before it.
        for runs in _cut([run for run in group if run not in done], min(fitting, places)):
            settings = [group[run].hparams for run in runs]
            if shared is None:
                padding = [settings[-1]] * (places - len(settings))
                axes = varying(all_hparams)
                shared = SimulationBatch(simulation, settings + padding, axes=axes)
            yield _Chunk(runs, group[runs[0]], shared.with_runs(simulation, settings))


def _cut(runs: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Cut runs into as few chunks as fit, of about one size."""
    count = -(-len(runs) // most)
    return [tuple(map(int, part)) for part in np.array_split(runs, count)] if count else []
