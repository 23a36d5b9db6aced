"""The command `fedjaxsim sweep`: a file's runs, chunk by chunk, into a directory of results."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjaxsim import callbacks, checks, metrics
from fedjaxsim.callbacks import Cadence
from fedjaxsim.cli.stopping import stoppable
from fedjaxsim.engine import processes
from fedjaxsim.engine.batch import varying
from fedjaxsim.engine.checkpoint import Checkpoint
from fedjaxsim.report.progress import can_draw
from fedjaxsim.report.results import Run, choosing
from fedjaxsim.runs.build import Experiment, check_own_code, population_of, prepare, versions
from fedjaxsim.runs.directory import fingerprint_of, settings_digest
from fedjaxsim.runs.memory import bytes_per_run
from fedjaxsim.runs.sweep_results import (
    SEARCH,
    Best,
    SweepDirectory,
    best_of,
    print_report,
    runs_of_sweep,
    write_report,
)
from fedjaxsim.runs.sweep_runs import SweepRuns, read_plan
from fedjaxsim.signals import stopped
from fedjaxsim.simulation import Simulation
from fedjaxsim.sweep import SimulationBatch

_GB = 10**9


@dataclasses.dataclass(frozen=True)
class Family:
    """Runs that differ in hyperparameters and seeds, for which one program is compiled.

    Attributes:
      simulation: simulation on the population of the first seed.
      groups: for each seed, the experiments by the index of their run.
    """

    simulation: Simulation
    groups: list[dict[int, Experiment]]

    @property
    def experiments(self) -> dict[int, Experiment]:
        """Experiments of all groups."""
        return {run: experiment for group in self.groups for run, experiment in group.items()}


class _Chunk(NamedTuple):
    """Runs of one seed that are computed at once."""

    runs: tuple[int, ...]
    first: Experiment
    batch: SimulationBatch


def prepare_sweep(
    file: Path,
    out: Path,
    data: str | None = None,
    *,
    seeds: Sequence[int] | None = None,
    checkpoint_every: str | None,
    overwrite: bool,
    quiet: bool,
) -> Callable[[], int]:
    """Check all input of a sweep; return a function that runs it and gives the exit code.

    Args:
      file: TOML file of the sweep.
      out: directory of the results.
      data: source of the clients, in place of the file's.
      seeds: seeds of all runs, in place of the file's.
      checkpoint_every: rounds or time, for `Cadence.parse`.
      overwrite: whether results in the directory are replaced.
      quiet: no progress bar.
    """
    plan = read_plan(file, data, seeds)
    how: Any = {
        "checkpoint_every": checkpoint_every, "overwrite": overwrite,
        "quiet": quiet,
    }  # fmt: skip
    if isinstance(plan, SweepRuns):
        return _prepared(plan, out, **how)
    tuning = plan.tuning()
    choose = _prepared(tuning, out / SEARCH, chooses=True, **how)

    def search() -> int:
        if code := choose():
            return code
        results = SweepDirectory(out / SEARCH, tuning).results()
        runs = runs_of_sweep(results, tuning.columns, dict(tuning.base))
        best = best_of(runs, tuning.columns, tuning.best_over, _judged(tuning))
        judged = choosing(runs, best.metric)
        return _prepared(plan.chosen(best.rows, metrics.label(judged)), out, **how)()

    return search


def _judged(plan: SweepRuns) -> str | None:
    return plan.options.metric and f"test_{plan.options.metric}"


def _prepared(
    plan: SweepRuns,
    out: Path,
    *,
    checkpoint_every: str | None,
    overwrite: bool,
    quiet: bool,
    chooses: bool = False,
) -> Callable[[], int]:
    """Check runs, and return a function that does them; runs that choose have no report."""
    cadence = Cadence.parse(checkpoint_every)
    families = families_of(plan)
    for family in families:
        _check_metric(plan, family)
        if chooses and not _validates(family.simulation):
            raise ValueError("a search chooses on validation rows: set validation-fraction")
    fingerprint = "-".join(fingerprint_of(family.simulation.population) for family in families)
    processes.agree({
        "settings": plan.fingerprint, "clients' rows": fingerprint,
        "versions": settings_digest(versions()), "overwrite": str(overwrite),
        "number of devices": str(jax.local_device_count()),
    })  # fmt: skip
    directory = SweepDirectory.open(out, plan, versions(), fingerprint, overwrite=overwrite)
    processes.agree({})  # the first process has made the directory
    begun, finished = directory.checkpoint(), directory.finished()
    processes.agree({f"results in {out}": settings_digest([sorted(finished), begun is None])})

    def work() -> int:
        draws, done = processes.is_first() and can_draw(), len(finished)
        kept = "finished runs and checkpoints are kept; the same command continues"
        with stoppable(lambda: kept) as stop:
            for chunk in _chunks(plan, families, finished, begun):
                if begun and tuple(begun.note["runs"]) != chunk.runs:
                    _first_alone(directory.checkpoints.clear)
                title = f"runs {done + 1}–{done + len(chunk.runs)} of {len(plan.runs)}"
                progress = callbacks.Progress(title, quiet=quiet)
                _compute(chunk, directory, stop, cadence, progress)
                if any(processes.from_all(stop.is_set())):
                    break
                done += len(chunk.runs)
        results = directory.results()
        left = len(plan.runs) - len(results["run"].unique())
        if chooses and not left:
            return 0
        if len(results) and not chooses and processes.is_first():
            experiments = {k: v for family in families for k, v in family.experiments.items()}
            runs = runs_of_sweep(results, plan.columns, dict(plan.base))
            best = best_of(runs, plan.columns, plan.best_over, _judged(plan))
            write_report(plan, directory, runs, best, experiments)
            if draws:
                _draw(plan, directory, runs, best)
            print_report(plan, runs, best)
        print(f"files in {directory.path}")
        if not left:
            return 0
        name, code = stopped(processes.from_all(stop.number))
        print(
            f"stopped by {name} with {left} of {len(plan.runs)} runs to finish; "
            "run the same command again to resume",
            file=sys.stderr,
        )
        return code

    return work


def _draw(plan: SweepRuns, directory: SweepDirectory, runs: Sequence[Run], best: Best) -> None:
    from fedjaxsim.report import plots
    from fedjaxsim.runs.sweep_results import default_figures

    for name, figure in default_figures(plan, runs, best.metric).items():
        for ending in (".png", ".pdf"):
            plots.save(figure, (directory.path / name).with_suffix(ending))


def families_of(plan: SweepRuns) -> list[Family]:
    """Prepare all runs of a sweep; those of a family share a simulation."""
    found = []
    for groups in plan.families():
        first = prepare(plan.runs[groups[0][0]])
        check_own_code(first)
        of_seeds = [
            {run: prepare(plan.runs[run], first.simulation) for run in group} for group in groups
        ]
        found.append(Family(first.simulation, of_seeds))
    return found


def _validates(simulation: Simulation) -> bool:
    return bool(simulation.population.splits["validation"].count.any())


def _check_metric(plan: SweepRuns, family: Family) -> None:
    """Check that the runs have the metric that they are judged by."""
    wanted = plan.options.metric
    names = next(iter(family.experiments.values())).metrics
    if wanted is not None:
        checks.one_of(names, metric=wanted)


def _compute(
    chunk: _Chunk,
    directory: SweepDirectory,
    stop: Event,
    cadence: Cadence,
    progress: callbacks.Progress,
) -> None:
    """Run a chunk to its end, or to its next checkpoint."""
    runs, first, batch = chunk
    config, recorded = first.config, callbacks.MetricsFile(directory.rows, exact=True)
    checkpoints = callbacks.Checkpoints(
        directory.checkpoints,
        [recorded],
        every=cadence,
        note={"runs": runs, "places": batch.capacity},
        keep_last=False,
    )
    state = checkpoints.restore(batch.init(config.seed))
    state, _ = batch.run(
        state,
        config.rounds - int(state.round),
        eval_every=config.eval_every,
        callbacks=[
            *([callbacks.Validation()] if _validates(batch.simulation) else []),
            recorded,
            progress,
            checkpoints,
            callbacks.StopOnInterrupt(stop),
        ],
        delta=first.delta,
        keep=0,
        eval_clients=config.sample,
    )
    if int(state.round) < config.rounds:
        return
    replace = recorded.run.epsilon(state, "replace")

    def add() -> None:
        rows = [{**row, "run": runs[row["run"]], "delta": first.delta} for row in recorded.rows]
        for row, epsilon in zip(rows[-len(runs) :], replace, strict=True):
            row["epsilon_replace"] = epsilon
        directory.add(rows)

    _first_alone(add)


def _first_alone(write: Callable[[], None]) -> None:
    """Call a function in the first process; the others wait until it is done."""
    if processes.is_first():
        write()
    processes.from_all("written")


def _chunks(
    plan: SweepRuns, families: Sequence[Family], done: set[int], checkpoint: Checkpoint | None
) -> Iterator[_Chunk]:
    """Cut the unfinished runs into chunks that fit the memory budget."""
    for family in families:
        simulation, experiments = family.simulation, family.experiments
        all_hparams = [experiment.hparams for experiment in experiments.values()]
        each = bytes_per_run(simulation, all_hparams[0])
        fitting = max(1, int(plan.options.memory * _GB // each))
        # The places of a program follow from the plan or from the checkpoint that it resumes, not
        # from the runs left: otherwise a checkpoint would not fit the program that reads it.
        places = max(len(_cut([*group], fitting)[0]) for group in family.groups)
        if checkpoint and checkpoint.note["runs"][0] in experiments:
            places = checkpoint.note["places"]
        shared: SimulationBatch | None = None
        for index, group in enumerate(family.groups):
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
