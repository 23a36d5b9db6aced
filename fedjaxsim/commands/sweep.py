"""The command `fedjaxsim sweep`: a file's runs, chunk by chunk, into a directory of results."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedjaxsim import callbacks
from fedjaxsim.callbacks import Cadence
from fedjaxsim.commands.messages import INTERRUPTED
from fedjaxsim.engine import processes
from fedjaxsim.engine.batch import varying
from fedjaxsim.engine.checkpoint import Checkpoint
from fedjaxsim.engine.memory import bytes_per_run
from fedjaxsim.report.progress import can_draw, stop_on_interrupt
from fedjaxsim.runs.build import Experiment, population_of, prepare, versions
from fedjaxsim.runs.fingerprints import digest, fingerprint_of
from fedjaxsim.runs.sweep_directory import SweepDirectory
from fedjaxsim.runs.sweep_report import print_report, write_report
from fedjaxsim.runs.sweep_runs import SweepRuns, hyperparameters_of, read_sweep
from fedjaxsim.simulation import Simulation
from fedjaxsim.sweep import SimulationBatch

if TYPE_CHECKING:
    import pyarrow as pa

_GB = 10**9


@dataclasses.dataclass(frozen=True)
class _Family:
    """Runs that differ in hyperparameters and seeds, for which one program is compiled.

    Attributes:
      simulation: simulation on the population of the first seed.
      groups: runs by seed, each (run index, experiment).
    """

    simulation: Simulation
    groups: list[list[tuple[int, Experiment]]]

    @property
    def experiments(self) -> list[tuple[int, Experiment]]:
        """Runs of all groups."""
        return [each for group in self.groups for each in group]

    @functools.cached_property
    def axes(self) -> Any:
        """Hyperparameters that differ between any two of the runs."""
        return varying([experiment.hparams for _, experiment in self.experiments])


def prepare_sweep(command: Any) -> Callable[[], int]:
    """Check all input of a sweep; return what runs it and gives the exit code.

    Raises:
      FileNotFoundError: if there is no such file, or no data where it says.
      ValueError: for a bad setting in any of the runs, or if the directory holds another sweep or a
        damaged file.
    """
    plan = read_sweep(command.config, command.data)
    cadence = Cadence.parse(command.checkpoint_every)
    families = _families(plan)
    data = "-".join(fingerprint_of(family.simulation.population) for family in families)
    if processes.several():
        processes.agree({"settings": plan.fingerprint, "clients' rows": data,
                         "versions": digest(versions()), "overwrite": str(command.overwrite),
                         "number of devices": str(jax.local_device_count())})  # fmt: skip
    directory = SweepDirectory.open(
        command.out, plan, versions(), data, overwrite=command.overwrite
    )
    if processes.several():
        processes.agree({})  # the first process has made the directory
    begun, finished = directory.checkpoint(), directory.finished()
    if processes.several():
        processes.agree({f"results in {command.out}": digest([sorted(finished), begun is None])})

    def work() -> int:
        draws = can_draw() if processes.is_first() else False
        with stop_on_interrupt() as stop:
            _compute(plan, families, directory, begun, stop, cadence, quiet=command.quiet)
        results = directory.results()
        if len(results) and processes.is_first():
            experiments = {run: each for family in families for run, each in family.experiments}
            write_report(plan, directory, results, experiments)
            if draws:
                _draw(plan, directory, results)
            print_report(plan, results)
        print(f"files in {directory.path}")
        left = len(plan.runs) - len(results["run"].unique())
        if not left:
            return 0
        print(
            f"stopped by Ctrl-C with {left} of {len(plan.runs)} runs to finish; "
            "run the same command again to resume",
            file=sys.stderr,
        )
        return INTERRUPTED

    return work


def _draw(plan: SweepRuns, directory: SweepDirectory, results: "pa.Table") -> None:
    from fedjaxsim.report import plots
    from fedjaxsim.runs.default_figures import default_figures

    for name, figure in default_figures(plan, results).items():
        plots.save(figure, directory.path / name)


def _families(plan: SweepRuns) -> list[_Family]:
    families: dict[Any, _Family] = {}
    for group in plan.groups():
        first = plan.runs[group[0]]
        arrays = (*hyperparameters_of(first), "seed")
        kind = type(first), *((k, v) for k, v in vars(first).items() if k not in arrays)
        known = families.get(kind)
        simulation = prepare(first).simulation if known is None else known.simulation
        experiments = [(run, prepare(plan.runs[run], simulation)) for run in group]
        if known is None:
            families[kind] = _Family(simulation, [experiments])
        else:
            known.groups.append(experiments)
    return list(families.values())


def _compute(
    plan: SweepRuns,
    families: list[_Family],
    directory: SweepDirectory,
    checkpoint: Checkpoint | None,
    stop: Event,
    cadence: Cadence,
    *,
    quiet: bool,
) -> None:
    """Run what is not finished yet, the chunk that was interrupted first."""
    done = directory.finished()
    count = len(done)
    for family in families:
        for many, runs in _chunks(plan, family, done, checkpoint):
            if checkpoint and tuple(checkpoint.note["runs"]) != runs:
                _first_alone(directory.checkpoints.clear)
            title = f"runs {count + 1}–{count + len(runs)} of {len(plan.runs)}"
            progress = callbacks.Progress(title, quiet=quiet)
            _compute_chunk(
                many, runs, dict(family.experiments)[runs[0]], directory, stop, cadence, progress
            )
            if any(processes.from_all(stop.is_set())):
                return
            count += len(runs)


def _compute_chunk(
    many: SimulationBatch,
    runs: tuple[int, ...],
    first: Experiment,
    directory: SweepDirectory,
    stop: Event,
    cadence: Cadence,
    progress: callbacks.Progress,
) -> None:
    """Run a chunk to its end, or to its next checkpoint."""
    config, recorded = first.config, callbacks.Records()
    checkpoints = callbacks.Checkpoints(
        directory.checkpoints,
        [recorded],
        every=cadence,
        note={"runs": runs, "places": many.capacity},
        keep_last=False,
    )
    state = checkpoints.restore(many.init(config.seed))
    state, _ = many.run(
        state,
        config.rounds - int(state.round),
        eval_every=config.eval_every,
        callbacks=[recorded, progress, checkpoints, callbacks.StopOnInterrupt(stop)],
        delta=first.delta,
        keep=0,
    )
    if int(state.round) < config.rounds:
        return
    found = recorded.memory
    rows = [{**row, "run": runs[row["run"]], "delta": first.delta} for row in found["rows"]]
    replace = recorded.run.epsilon(state, "replace")
    for row, epsilon in zip(rows[-len(runs) :], replace, strict=True):
        row["epsilon_replace"] = epsilon
    times = {name: found[name] for name in ("seconds", "compile_seconds")}
    _first_alone(lambda: directory.add(rows, **times))


def _first_alone(write: Callable[[], None]) -> None:
    """Call a function in the first process; the others wait until it is done."""
    if processes.is_first():
        write()
    processes.from_all("written")


def _chunks(
    plan: SweepRuns, family: _Family, done: set[int], checkpoint: Checkpoint | None
) -> Iterator[tuple[SimulationBatch, tuple[int, ...]]]:
    """Yield programs with their runs, within the memory budget."""
    budget = plan.options.memory * _GB
    each = bytes_per_run(family.simulation.setup, family.groups[0][0][1].hparams)
    fitting = max(1, int(budget // each))
    # The places of a program follow from the plan or from the checkpoint that it resumes, not from
    # the runs left: otherwise a checkpoint would not fit the program that reads it.
    places = max(len(_cut(range(len(group)), fitting)[0]) for group in family.groups)
    if checkpoint and checkpoint.note["runs"][0] in dict(family.experiments):
        places = checkpoint.note["places"]
    fitting = min(fitting, places)
    shared: SimulationBatch | None = None
    for group in family.groups:
        experiments = dict(group)
        config = group[0][1].config
        simulation = family.simulation
        if config.seed != family.groups[0][0][1].config.seed:
            simulation = simulation.with_population(population_of(config))
        # The first of these chunks is the interrupted one, whatever was done before it.
        for runs in _cut([run for run in experiments if run not in done], fitting):
            settings = [experiments[run].hparams for run in runs]
            if shared is None:
                padding = [settings[-1]] * (places - len(settings))
                shared = SimulationBatch(simulation, settings + padding, axes=family.axes)
            yield shared.with_runs(simulation, settings), runs


def _cut(runs: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Cut runs into as few chunks as fit, of about one size."""
    count = -(-len(runs) // most)
    return [tuple(map(int, part)) for part in np.array_split(runs, count)] if count else []
