"""The work of `fedjaxsim sweep`: a file's runs, chunk by chunk, or the best of a random number."""

import collections
import dataclasses
import itertools
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjaxsim import callbacks, checks, keys
from fedjaxsim.callbacks import StopOnInterrupt
from fedjaxsim.cli.flags import Work
from fedjaxsim.cli.messages import say
from fedjaxsim.cli.process import stoppable
from fedjaxsim.divergence import DivergingWarning
from fedjaxsim.engine.batch import varying
from fedjaxsim.engine.checkpoint import Checkpoint
from fedjaxsim.engine.checks import require_key
from fedjaxsim.engine.evaluation import EvaluationPlan
from fedjaxsim.keys import Stream
from fedjaxsim.metrics import column_label, merge_metrics, primary_metric, require_direction
from fedjaxsim.privacy import ledger, selection
from fedjaxsim.privacy.assumptions import no_guarantee
from fedjaxsim.privacy.guarantee import Guarantee, Report
from fedjaxsim.report.files import make_directory, strict, write_json
from fedjaxsim.report.progress import doing, print_guarantee, warn_if_no_matplotlib
from fedjaxsim.report.results import metrics_of, selection_column
from fedjaxsim.runs.build import (
    Experiment,
    check_own_code,
    draws_of,
    population_of,
    prepare,
)
from fedjaxsim.runs.directory import GUARANTEE, fingerprint_of
from fedjaxsim.runs.memory import bytes_per_run
from fedjaxsim.runs.public import MODEL, write_model
from fedjaxsim.runs.sweep_results import (
    SEARCH,
    SweepDirectory,
    advise_on_noise,
    best_of,
    default_figures,
    print_report,
    write_report,
)
from fedjaxsim.runs.sweep_runs import SweepRuns, read_plan, read_sweep
from fedjaxsim.signals import stopped
from fedjaxsim.simulation import Simulation
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


def prepare_sweep(
    file: Path | None,
    out: Path,
    changes: Mapping[str, Any] = {},
    seeds: int | None = None,
    **how: Any,
) -> Work:
    """Check all input of a sweep, for `read_plan`; return the work.

    `how` are the options of `_prepared`.
    """
    plan = read_plan(file, changes, seeds)
    if isinstance(plan, SweepRuns):
        return _prepared(plan, out, **how)
    tuning = plan.tuning()
    choose = _prepared(tuning, out / SEARCH, chooses=True, **how)

    def search() -> int:
        if code := choose():
            return code
        runs = SweepDirectory(out / SEARCH, tuning).runs()
        best = best_of(tuning, runs)
        judged = column_label(selection_column(runs, best.metric), metrics_of(runs))
        with doing("checking the chosen runs", quiet=how["quiet"]):
            chosen = _prepared(plan.chosen(best.rows, judged), out, **how)
        return chosen()

    return search


def _prepared(
    plan: SweepRuns,
    out: Path,
    *,
    checkpoint_every: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    chooses: bool = False,
) -> Work:
    """Check runs, and return the work; runs that choose have no report."""
    families = families_of(plan)
    firsts = [next(iter(family[0].values())) for family in families]
    metrics = merge_metrics(first.metrics for first in firsts)
    for first in firsts:
        if plan.options.metric is not None:
            checks.one_of(first.metrics, metric=plan.options.metric)
        if chooses and not _validates(first.simulation):
            raise ValueError("a search chooses on validation rows: set validation-fraction")
    if plan.best_over or chooses:
        judged = primary_metric([f"test_{name}" for name in metrics], metrics)
        require_direction(plan.options.metric or str(judged).removeprefix("test_"), metrics)
    fingerprint = "-".join(fingerprint_of(first.simulation.population) for first in firsts)
    directory = SweepDirectory.open(out, plan, fingerprint, metrics, overwrite=overwrite)
    begun, finished = directory.checkpoint(), directory.finished()

    def work() -> int:
        if plan.remark and not chooses:
            say(f"warning: {plan.remark}")
        draws, done = warn_if_no_matplotlib(), len(finished)
        kept = "finished runs and checkpoints are kept; the same command continues"
        with stoppable(lambda: kept) as stop:
            every = (_chunks(plan, family, finished, begun) for family in families)
            for chunk in _compiled_ahead(every, quiet=quiet):
                if begun and tuple(begun.note["runs"]) != chunk.runs:
                    directory.checkpoints.clear()
                title = f"runs {done + 1}–{done + len(chunk.runs)} of {len(plan.runs)}"
                progress = callbacks.Progress(title, quiet=quiet)
                _compute(chunk, directory, stop, checkpoint_every, progress)
                if stop.is_set():
                    break
                done += len(chunk.runs)
        runs = directory.runs()
        left = len(plan.runs) - len(runs)
        if chooses and not left:
            return 0
        if runs and not chooses:
            experiments = _experiments(list(itertools.chain(*families)))
            best = best_of(plan, runs)
            with doing("writing the report", quiet=quiet):
                reports = write_report(plan, directory, runs, best, experiments)
                if draws:
                    from fedjaxsim.report import plots

                    for picture, figure in default_figures(plan, runs, best.metric).items():
                        for ending in (".png", ".pdf"):
                            plots.save(figure, (directory.path / picture).with_suffix(ending))
            advice = advise_on_noise(runs, experiments)
            print_report(plan, runs, best, reports, advice)
        print(f"files in {directory.path}")
        if not left:
            return 0
        name, code = stopped([stop.number])
        unfinished = f"{left} of {len(plan.runs)} runs to finish"
        again = "run the same command again to resume"
        print(f"stopped by {name} with {unfinished}; {again}", file=sys.stderr)
        return code

    return work


def families_of(plan: SweepRuns) -> list[Family]:
    """Prepare all runs of a sweep; those of a family share the simulation of its first seed."""
    found = []
    for groups in plan.families():
        first = prepare(plan.runs[groups[0][0]])
        check_own_code(first)
        found.append([
            {run: prepare(plan.runs[run], first.simulation) for run in group} for group in groups
        ])  # fmt: skip
    return found


def _experiments(family: Family) -> dict[int, Experiment]:
    return {run: experiment for group in family for run, experiment in group.items()}


def _validates(simulation: Simulation) -> bool:
    return bool(simulation.population.splits["validation"].count.any())


def _compute(
    chunk: _Chunk,
    directory: SweepDirectory,
    stop: Event,
    checkpoint_every: int | None,
    progress: callbacks.Progress,
) -> None:
    """Run a chunk to its end, or to its next checkpoint."""
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
    state, _ = batch.run(
        state,
        config.rounds - int(state.round),
        eval_every=config.eval_every,
        callbacks=[
            *([callbacks.Validation()] if _validates(batch.simulation) else []),
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
        return
    replace = recorded.run.tight_epsilon(state, "replace")
    rows = [{**row, "run": runs[row["run"]], "delta": first.delta} for row in recorded.rows]
    for row, epsilon in zip(rows[-len(runs) :], replace, strict=True):
        row["epsilon_replace"] = epsilon
    directory.add(rows, dict(zip(runs, recorded.run.charges(state), strict=True)))


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
                for each in compiling:
                    each.result()
            yield from chunks
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _chunks(
    plan: SweepRuns, family: Family, done: set[int], checkpoint: Checkpoint | None
) -> Iterator[_Chunk]:
    """Cut the unfinished runs of a family into chunks that fit the memory budget."""
    experiments = _experiments(family)
    all_hparams = [experiment.hparams for experiment in experiments.values()]
    simulation = next(iter(experiments.values())).simulation
    fitting = 1
    if max(map(len, family)) > 1:
        each = bytes_per_run(simulation, all_hparams[0])
        fitting = max(1, int(plan.options.memory * _GB // each))
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


# --- the best of a random number of runs ----------------------------------------------------------


SELECTION = "selection.json"
_UNREPLACED = "the price of a selection is known for zero-out"
_ASSUMED = (
    "Published are the best run's release, settings and score. The number of runs and all other "
    "runs stay secret, as do metrics without noise."
)


def prepare_selection(
    file: Path | None, out: Path, changes: Mapping[str, Any], seeds: int | None, spec: str,
    score: tuple[float, float], *, overwrite: bool,
) -> Work:  # fmt: skip
    """Check all input of a selection among the runs of a sweep; return the work.

    `spec` is the distribution of the number of runs, for `selection.parse`; `score` has z of the
    score that each run releases at its end, and the public bound of a client's score.
    """
    runs, plan = selection.parse(spec), read_sweep(file, changes, seeds)
    if "seed" in plan.keys:
        raise ValueError("select-privately gives each run a seed of its own: leave out seed")
    candidates = _candidates(plan)
    judged = [each.evaluation_plan(*score, plan.options.metric) for each in candidates]
    report = _selection_report(runs, candidates, judged)
    if candidates[0].config.has_secret_seed:
        report = report.of_secret_seed()
    if report.find("zero_out").epsilon is None:
        raise ValueError(f"there is nothing to select privately: {report.short()}")
    make_directory(out, (SELECTION, MODEL, GUARANTEE), "selection", overwrite=overwrite)

    def work() -> int:
        seed = candidates[0].config.seed
        rng = np.random.default_rng([seed, Stream.SELECTION])
        drawn = [int(rng.integers(len(candidates))) for _ in range(runs.draw(rng))]
        # Without a bar or lines: a log would tell the number of runs, which is secret.
        with stoppable(lambda: "nothing was selected") as stop:
            best: tuple[float, int, Any, Any] | None = None
            for number, index in enumerate(drawn):
                if stop.is_set():
                    break
                # No plain run of the seed draws from this key.
                key = keys.stream(_of_all_runs(seed), Stream.SELECTION, number)
                found = _run(candidates[index], judged[index], key, stop)
                if found is not None and (best is None or found[0] > best[0]):
                    best = (found[0], index, *found[1:])
            interrupted = stop.is_set()
        if interrupted:
            # The runs so far may not be published: how many finished is not a random number.
            name, code = stopped([stop.number])
            say(f"stopped by {name}: nothing was selected; run the same command again")
            return code
        content: dict[str, Any] = {"number_of_runs": spec, "candidates": len(candidates)}
        if best is not None:
            _, index, scored, shared = best
            content |= {"settings": plan.swept[index], f"private_{scored.name}": scored.mean}
            write_model(out / MODEL, shared)
        write_json(out / GUARANTEE, report.to_json())
        write_json(out / SELECTION, strict(content))
        print("  ".join(f"{key} {value}" for key, value in content.items()))
        print_guarantee(report, out / GUARANTEE, explain=False)
        print(f"files in {out}")
        return 0

    return work


def _candidates(plan: SweepRuns) -> list[Experiment]:
    """Prepare all runs, and check that each may be published."""
    by_run = _experiments(list(itertools.chain(*families_of(plan))))
    found = [experiment for _, experiment in sorted(by_run.items())]
    for experiment in found:
        if why := no_guarantee(experiment.planned()):
            raise ValueError(f"a candidate has no guarantee: {why}")
        if not _validates(experiment.simulation):
            raise ValueError("select-privately needs rows to validate on: validation-fraction")
    shared = {
        "delta": {experiment.delta for experiment in found},
        "number of clients": {experiment.simulation.num_clients for experiment in found},
        "sampling": {experiment.simulation.sampler.scheme.kind for experiment in found},
    }
    for name, values in shared.items():
        if len(values) > 1:
            raise ValueError(f"candidates must have one {name}, got {sorted(values)}")
    return found


def _selection_report(
    runs: selection.NegativeBinomial,
    candidates: Sequence[Experiment],
    judged: Sequence[EvaluationPlan],
) -> Report:
    charges = [
        [each.planned(), plan.spend(each.simulation.num_clients)]
        for each, plan in zip(candidates, judged, strict=True)
    ]
    first = candidates[0]
    epsilon = selection.epsilon(runs, charges, first.delta)
    public = [s for each in candidates for s in (*each.simulation.public, *each.config.public)]

    def guarantee(of_run: Guarantee) -> Guarantee:
        known = of_run.adjacency == "zero_out"
        return dataclasses.replace(
            of_run,
            epsilon=epsilon if known else None,
            accountant="rdp_selection",
            status="upper_bound" if known else "none",
            assumptions=tuple(dict.fromkeys((*of_run.assumptions, *public, _ASSUMED))),
            reason="" if known else _UNREPLACED,
        )

    of_first = first.simulation.guarantee(first.init(), first.delta).guarantees
    # The theorem gives examples no ε here.
    found = tuple(guarantee(each) for each in of_first if each.unit == "client")
    # Draws of a secret number of keys.
    return Report(found, first.delta, draws=(draws_of(_of_all_runs(first.config.seed), 1),))


def _of_all_runs(seed: int) -> jax.Array:
    """Return the key that the keys of all runs come from."""
    return keys.stream(require_key(seed), Stream.SELECTION)


def _run(experiment: Experiment, plan: EvaluationPlan, key: jax.Array, stop: Event) -> Any:
    """Run one candidate; return its score (larger is better), release and server state."""
    simulation, hparams = experiment.simulation, experiment.hparams
    # A warning of messages that are not finite, or of a diverging loss, has no noise.
    with warnings.catch_warnings(action="ignore", category=DivergingWarning):
        state, history = simulation.run(
            simulation.init(key, hparams),
            hparams,
            experiment.config.rounds,
            callbacks=[StopOnInterrupt(stop)],
            keep=1,
            evaluate_privately=plan,
        )
    score = history[-1].private if len(history) else None
    if score is None:
        return None
    planned = experiment.planned(), plan.spend(simulation.num_clients)
    selection.require_planned(planned, ledger.charged(state.privacy))
    sign = 1 if score.larger_is_better else -1
    return sign * score.mean, score, jax.tree.map(np.asarray, state.shared)
