"""The command `fedjaxsim sweep`: a file's runs, chunk by chunk, into a directory of results."""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedjaxsim.engine.program import SimulationState
from fedjaxsim.engine.settings_axis import varying
from fedjaxsim.privacy import calibration, ledger
from fedjaxsim.report import plots
from fedjaxsim.report.default_figures import default_figures
from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import stop_on_interrupt
from fedjaxsim.runs.build import Experiment, population_of, prepare, versions
from fedjaxsim.runs.many import ManyRuns
from fedjaxsim.runs.memory import bytes_per_run
from fedjaxsim.runs.plan import HYPERPARAMETERS, Plan, read_plan
from fedjaxsim.runs.rows import records
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.states import from_arrays, to_arrays
from fedjaxsim.runs.sweep_directory import Checkpoint, SweepDirectory
from fedjaxsim.runs.sweep_progress import SweepProgress
from fedjaxsim.runs.sweep_report import print_report, write_report
from fedjaxsim.simulation import Segment, Simulation

if TYPE_CHECKING:
    from fedjaxsim.cli.sweep import Sweep

_GB = 10**9
_ALIKE: Any = {name: getattr(RunConfig(), name) for name in HYPERPARAMETERS}
"""The hyperparameters, all alike, so that what is left tells families apart."""
_BETWEEN_CHECKPOINTS = 60.0
"""Seconds; more where writing one takes long."""


@dataclasses.dataclass(frozen=True)
class _Family:
    """The runs that differ in hyperparameters and seeds: one program serves them all.

    Attributes:
      simulation: on the population of the first seed.
      groups: runs by seed, each (run index, experiment).
    """

    simulation: Simulation
    groups: list[list[tuple[int, Experiment]]]

    @property
    def experiments(self) -> list[tuple[int, Experiment]]:
        """All runs."""
        return [each for group in self.groups for each in group]

    @functools.cached_property
    def axes(self) -> Any:
        """Which hyperparameters differ between any two of the runs."""
        return varying([experiment.hparams for _, experiment in self.experiments])


def prepare_sweep(command: "Sweep") -> Callable[[], int]:
    """Checks all input of a sweep; what is returned runs it and gives the exit code.

    Raises:
      FileNotFoundError: if there is no such file, or no data where it says.
      ValueError: for a bad setting in any of the runs, or if the directory holds another sweep.
    """
    plan = read_plan(command.config, command.data)
    families = _families(plan)
    directory = SweepDirectory.open(command.out, plan, versions(), overwrite=command.overwrite)

    def work() -> int:
        with stop_on_interrupt() as stop:
            _compute(plan, families, directory, stop, quiet=command.quiet)
        results = directory.join()
        if len(results):
            experiments = {run: each for family in families for run, each in family.experiments}
            write_report(plan, directory, results, experiments)
            for name, figure in default_figures(plan, results).items():
                plots.save(figure, directory.path / name)
            print_report(plan, results)
        print(f"files in {directory.path}")
        left = len(plan.runs) - len(directory.finished())
        if not left:
            return 0
        print(
            f"stopped by Ctrl-C with {left} of {len(plan.runs)} runs to finish; "
            "the same command goes on from here",
            file=sys.stderr,
        )
        return 130

    return work


def _families(plan: Plan) -> list[_Family]:
    families: dict[RunConfig, _Family] = {}
    for group in plan.groups():
        first = plan.runs[group[0]]
        kind = dataclasses.replace(first, **_ALIKE, seed=0)
        known = families.get(kind)
        simulation = prepare(first).simulation if known is None else known.simulation
        experiments = [(run, prepare(plan.runs[run], simulation)) for run in group]
        if known is None:
            families[kind] = _Family(simulation, [experiments])
        else:
            known.groups.append(experiments)
    return list(families.values())


def _compute(
    plan: Plan, families: list[_Family], directory: SweepDirectory, stop: Event, *, quiet: bool
) -> None:
    """Runs what is not finished yet, the chunk that was interrupted first."""
    done = directory.finished()
    checkpoint = directory.load_checkpoint()
    with SweepProgress(len(plan.runs), len(done), quiet=quiet) as progress:
        for family in families:
            for many, seed, runs in _chunks(plan, family, done, checkpoint):
                resumed = checkpoint if checkpoint and checkpoint.runs == runs else None
                chunk = _Chunk(many, family, seed, runs, directory, progress)
                chunk.run(resumed, stop)
                if stop.is_set():
                    return


def _chunks(
    plan: Plan, family: _Family, done: set[int], checkpoint: Checkpoint | None
) -> Iterator[tuple[ManyRuns, int, tuple[int, ...]]]:
    """Programs with the seeds and runs that they hold, within the memory budget."""
    budget = plan.options.memory * _GB
    each = bytes_per_run(family.simulation, family.groups[0][0][1].hparams)
    fitting = max(1, int(budget // each))
    # The places of a program follow from the plan, or from the checkpoint that it goes on with, and
    # not from what is left: else a checkpoint would not fit the program that reads it.
    places = max(len(_cut(range(len(group)), fitting)[0]) for group in family.groups)
    if checkpoint and checkpoint.places and set(checkpoint.runs) & set(dict(family.experiments)):
        places = checkpoint.places
    fitting = min(fitting, places)
    shared: ManyRuns | None = None
    for group in family.groups:
        experiments = dict(group)
        config = group[0][1].config
        simulation = family.simulation
        if config.seed != family.groups[0][0][1].config.seed:
            simulation = simulation.with_population(population_of(config))
        interrupted = checkpoint.runs if checkpoint else ()
        begun = tuple(run for run in interrupted if run in experiments)
        rest = [run for run in experiments if run not in done and run not in begun]
        for runs in ([begun] if begun else []) + _cut(rest, fitting):
            settings = [experiments[run].hparams for run in runs]
            if shared is None:
                padding = [settings[-1]] * (places - len(settings))
                shared = ManyRuns(simulation, settings + padding, axes=family.axes)
            yield shared.with_runs(simulation, settings), config.seed, tuple(runs)


def _cut(runs: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """The runs in as few chunks as fit, of about one size."""
    count = -(-len(runs) // most)
    return [tuple(map(int, part)) for part in np.array_split(runs, count)] if count else []


@dataclasses.dataclass
class _Chunk:
    """Runs that are computed together."""

    many: ManyRuns
    family: _Family
    seed: int
    runs: tuple[int, ...]
    directory: SweepDirectory
    progress: SweepProgress

    def __post_init__(self):
        by_run = dict(self.family.experiments)
        self.experiments = [by_run[run] for run in self.runs]
        self.config = self.experiments[0].config
        self.rows: list[Record] = []
        self.saved_at, self.saving_took = time.monotonic(), 0.0

    def run(self, resumed: Checkpoint | None, stop: Event) -> None:
        """Runs to the end and writes a part; or, once asked to stop, a checkpoint."""
        state = self.many.init(self.seed)
        done = 0 if resumed is None else resumed.round
        self.progress.start(len(self.runs), self.config.rounds, done)
        if resumed is None:
            start = Segment(0, {}, self.many.evaluate(state))
            self._keep(state, start)
        else:
            state = self.many.place(from_arrays(resumed.state, state, "the checkpoint"))
            self.rows = list(resumed.rows)

        def on_segment(state: SimulationState, segment: Segment) -> bool:
            self._keep(state, segment)
            if segment.round < self.config.rounds and (stop.is_set() or self._is_time()):
                self._save(state, segment.round)
            return not stop.is_set()

        while done < self.config.rounds and not (done and stop.is_set()):
            # A segment at a time: what a run returns of its evaluations would add up.
            length = min(self.config.eval_every, self.config.rounds - done)
            state, _ = self.many.run(state, length, on_segment=on_segment)
            done += length
        if done == self.config.rounds:
            self.directory.write_part(self.rows)

    def _keep(self, state: SimulationState, segment: Segment) -> None:
        last = segment.round == self.config.rounds
        charged = jax.tree.map(np.asarray, state.privacy)
        spent = [
            _spent(experiment, _entries(charged, index), replace=last)
            for index, experiment in enumerate(self.experiments)
        ]
        columns = {
            "train_loss": _train_loss(segment),
            **segment.evaluation.summary(),
            "epsilon": [zero_out for zero_out, _ in spent],
            "epsilon_replace": [replace for _, replace in spent],
            "delta": [experiment.delta for experiment in self.experiments],
        }
        new = records(self.runs, segment.round, columns)
        self.rows += new
        self.progress.update(segment.round, new)

    def _is_time(self) -> bool:
        """Whether a checkpoint is due; writing them takes at most a twentieth of the time."""
        wait = max(_BETWEEN_CHECKPOINTS, 20 * self.saving_took)
        return time.monotonic() - self.saved_at > wait

    def _save(self, state: SimulationState, round_: int) -> None:
        start = time.monotonic()
        state_arrays, places = to_arrays(state), self.many.capacity
        self.directory.write_checkpoint(
            Checkpoint(self.runs, round_, self.rows, state_arrays, places)
        )
        self.saved_at = time.monotonic()
        self.saving_took = self.saved_at - start


def _train_loss(segment: Segment) -> np.ndarray | None:
    """The mean of the local losses during the segment, (S,); None where no one took part."""
    weights = segment.metrics.get("participants", np.zeros(0))
    if not weights.sum():
        return None
    losses = np.where((weights > 0)[:, None], segment.metrics["loss"], 0.0)
    return weights @ losses / weights.sum()


def _entries(charged: ledger.Ledger, index: int) -> tuple[ledger.Entry, ...]:
    """What one of many runs was charged for."""
    own = jax.tree.map(lambda leaf: leaf[..., index], charged.charges)
    return tuple(entry for charges in own for entry in ledger.entries(charges))


def _spent(
    experiment: Experiment, charged: tuple[ledger.Entry, ...], *, replace: bool
) -> tuple[float | None, float | None]:
    """ε so far (joint DP), zero-out and, where asked for, replace."""
    if not charged:
        return 0.0, 0.0
    scheme = experiment.simulation.sampling.scheme
    event = experiment.simulation.mechanism.event
    [entry] = charged  # z and p are constant here.
    zero_out = _epsilon(*entry, experiment.delta, scheme, event, "zero_out")
    if not replace:
        return zero_out, None
    return zero_out, _epsilon(*entry, experiment.delta, scheme, event, "replace")


_epsilon = functools.cache(calibration.spent)
