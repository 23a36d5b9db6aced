"""The commands `fedjaxsim run` and `fedjaxsim resume`: from their flags to a run's last line."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import jax

from fedjaxsim.callbacks import Cadence, Logger
from fedjaxsim.engine import processes
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy.assumptions import NO_RELEASE
from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import (
    can_draw,
    epsilon_text,
    print_guarantee,
    print_table,
    stop_on_interrupt,
)
from fedjaxsim.runs.build import Experiment, prepare, versions
from fedjaxsim.runs.directory import CONFIG, FINETUNE, GUARANTEE, RunDirectory
from fedjaxsim.runs.execute import STOPPING, Executed, about, describe, execute, spent_in_all
from fedjaxsim.runs.fingerprints import digest, fingerprint_of
from fedjaxsim.runs.settings import flag
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.runs.stages import go_on, prepare_next, start_from
from fedjaxsim.runs.validation import labels_like_classes

if TYPE_CHECKING:
    from fedjaxsim.cli.resume import Resume
    from fedjaxsim.cli.run import Run

INTERRUPTED = 130
_REPEATED = {"sweep.toml": "sweep", "path.json": "tuning"}


class _Planned(NamedTuple):
    """A run that was checked, with its start; see `execute`."""

    experiment: Experiment
    directory: RunDirectory | None
    rounds: int
    log: str | None
    quiet: bool
    cadence: Cadence
    begin: SimulationState | None = None
    earlier: Sequence[Record] = ()

    @property
    def path(self) -> Path | None:
        return None if self.directory is None else self.directory.path

    def execute(self, stop: Event) -> Executed:
        experiment, directory, *_ = self
        options = {name: getattr(self, name) for name in self._fields[2:]}
        return execute(experiment, directory, stop, **options)


def prepare_run(command: "Run") -> Callable[[], int]:
    """Check all input of a run; return what runs it and gives the exit code.

    Raises:
      FileNotFoundError: if there are no data where the settings say.
      ValueError: naming what is wrong, what is allowed and what was got.
    """
    config, tuning = command.settings, command.finetuning
    cadence = Cadence.parse(command.checkpoint_every)
    if command.log is not None:
        Logger(command.log, directory=config.out)  # refuse one that cannot be opened
    begin, earlier, next_ = None, [], None
    if command.from_ is None:
        experiment = prepare(config)
        _agree(experiment, finetune=tuning.flags(), out=config.out is not None)
        if experiment.simulation.algorithm.warm_start.required:
            raise ValueError(
                f"algorithm {config.algorithm} goes on from what a run has published: say --from "
                "DIR, or --finetune with another algorithm"
            )
        if tuning.finetune is not None:
            next_ = prepare_next(experiment, tuning.settings_after(config))
    else:
        if config.out is not None and config.out.resolve() == command.from_.resolve():
            raise ValueError(f"out must be another directory than from, got {config.out} for both")
        if tuning.finetune is not None:
            config = tuning.settings_after(config)
        experiment = prepare(config)
        _agree(experiment, RunDirectory(command.from_), out=config.out is not None)
        begin, earlier = start_from(command.from_, experiment)
    directory, then = None, None
    if config.out is not None:
        directory = RunDirectory.create(config.out, overwrite=config.overwrite)
    if next_ is not None:
        inside, words = None, ["fedjaxsim", "run", *tuning.flags()]
        if config.out is not None:
            inside = RunDirectory.create(config.out / FINETUNE)
            words += ["--from", str(config.out), "--out", str(inside.path)]
        rounds = next_.config.rounds
        then = _Planned(next_, inside, rounds, command.log, config.quiet, cadence), words
    _agree_on_files(directory)
    planned = _Planned(
        experiment, directory, config.rounds, command.log, config.quiet, cadence, begin, earlier
    )
    doubt = labels_like_classes(config, experiment.simulation.population)

    def work() -> int:
        if doubt is not None:
            _warn(doubt)
        if begin is not None:
            spent = spent_in_all(experiment, begin)
            _warn_above(config.target_epsilon, spent, "this stage and those before it will spend")
        return _run(planned, explain=command.explain, then=then)

    return work


def prepare_resume(command: "Resume") -> Callable[[], int]:
    """Check that a run can resume; return what resumes it and gives the exit code.

    Raises:
      FileNotFoundError: if the directory holds no run, or there are no data where it says.
      ValueError: if the run is finished, or its files are damaged or do not belong together.
    """
    path, cadence = command.directory, Cadence.parse(command.checkpoint_every)
    for name, kind in _REPEATED.items():
        if (path / name).exists():
            raise ValueError(
                f"{path} holds a {kind}: the command that began it, repeated, goes on with it"
            )
    if command.log is not None:
        Logger(command.log, directory=path)  # refuse one that cannot be opened
    directory = RunDirectory(path)
    tables = directory.config()
    planned, earlier = tables.get("resolved", {}).get("rounds"), tables.get("stages", [])
    config = read_toml(path / CONFIG)
    experiment = prepare(config)
    _agree(experiment, directory, rounds=command.rounds)
    last = directory.checkpoints(about(experiment)).last()
    if earlier and last is None:
        raise ValueError(
            f"{path} was killed before it had a checkpoint: repeat the command that began it, with "
            "--overwrite"
        )
    done = 0 if last is None else last.round
    rounds = command.rounds or planned or config.rounds
    if command.rounds is not None and rounds < max(done, 1):
        raise ValueError(f"rounds must be at least the {done} that are done, got {command.rounds}")
    if directory.is_finished() and directory.summary().get("stopped_early"):
        raise ValueError(
            f"{path} has run out of patience after {done} rounds: a run with --from goes on from it"
        )
    if rounds == done and directory.is_finished():
        raise ValueError(f"{path} has done its {done} rounds: say --rounds N for N rounds in all")
    schedule = config.get("schedule", "constant")
    if rounds > config.rounds and schedule != "constant":
        raise ValueError(
            f"a run with schedule {schedule} cannot go on beyond its {config.rounds} "
            f"rounds, where its learning rate is 0, got rounds {rounds}"
        )
    if rounds > config.rounds and not config.spread.is_constant:
        raise ValueError(
            f"a run with budget {config.spread} cannot go on beyond its {config.rounds} rounds, "
            f"over which it was spread, got rounds {rounds}; run --from {shlex.quote(str(path))} "
            "begins another stage there, with noise of its own"
        )
    simulation = experiment.simulation
    simulation.setup.check_rounds(experiment.hparams, 0, rounds, config.eval_every)
    planned = _Planned(
        experiment, directory, rounds, command.log, command.quiet, cadence, None, earlier
    )

    def work() -> int:
        if last is not None and last.note["versions"] != versions():
            _warn(
                f"{last.folder} was written with {_words(last.note)}, so numbers may differ in "
                "their last digits from an undisturbed run"
            )
        return _run(planned, explain=command.explain)

    return work


def _agree(experiment: Experiment, start: RunDirectory | None = None, **flags: object) -> None:
    """Check that all processes are about to do the same run, from the same checkpoint."""
    if not processes.several():
        return
    last = None if start is None else start.checkpoints().last()
    parts = {
        **{flag(name): value for name, value in experiment.config.settings().items()},
        "versions": versions(),
        "number of devices": jax.local_device_count(),
        "checkpoint": last and last.round,
        **flags,
    }
    facts = {name: digest(value) for name, value in parts.items()}
    processes.agree({**facts, "clients' rows": fingerprint_of(experiment.simulation.population)})


def _agree_on_files(directory: RunDirectory | None) -> None:
    """Check that all processes see the same files, once the first has made them."""
    if directory is not None and processes.several():
        processes.agree({})
        last = directory.checkpoints().last()
        processes.agree({f"checkpoints in {directory.path}": str(last and last.round)})


def _words(note: dict[str, dict[str, str]]) -> str:
    """List the versions of a checkpoint that differ from those here."""
    here = versions()
    return ", ".join(f"{k} {v}" for k, v in note["versions"].items() if here.get(k) != v)


def _run(
    planned: _Planned, *, explain: bool, then: tuple[_Planned, Sequence[str]] | None = None
) -> int:
    """Do a run, and then the fine-tuning that a command may do alone; return the exit code."""
    if planned.path is not None and processes.is_first():
        can_draw()
    with stop_on_interrupt() as stop:
        done = planned.execute(stop)
        both = [(planned, done)]
        if then is not None and not done.summary["interrupted"]:
            next_, _ = then
            begin, earlier = go_on(
                done, planned.experiment, next_.experiment, planned.path, planned.earlier
            )
            next_ = next_._replace(begin=begin, earlier=earlier)
            both.append((next_, next_.execute(stop)))
    print_table([{"run": _name(each.experiment), **found.summary} for each, found in both])
    for each, found in both:
        _warn_of(each, found)
    last, done = both[-1]
    if last.earlier:
        stages = describe(last.earlier, last.experiment.config.algorithm, done.summary["rounds"])
        print(f"stages: {stages}; the guarantee is of all of them")
    place = None if last.path is None else last.path / GUARANTEE
    print_guarantee(done.report, place, explain=explain)
    if last.experiment.config.patience is not None and not explain:
        print(STOPPING)
    if NO_RELEASE in done.report.assumed and not explain:
        print(NO_RELEASE)
    if planned.path is not None:
        print(f"files in {planned.path}")
    if not done.summary["interrupted"]:
        return 0
    stopped = f"stopped by Ctrl-C after {done.summary['rounds']} rounds"
    if last.path is not None:
        stopped += f"; fedjaxsim resume {shlex.quote(str(last.path))} goes on"
    if then is not None and len(both) == 1 and planned.path is not None:
        stopped += f"; then {shlex.join(then[1])} fine-tunes"
    print(stopped, file=sys.stderr)
    return INTERRUPTED


def _name(experiment: Experiment) -> str:
    """Name a run in a table."""
    config = experiment.config
    penalty = config.get("penalty")
    return config.algorithm if penalty is None else f"{config.algorithm} {penalty}"


def _warn_of(planned: _Planned, done: Executed) -> None:
    """Warn of a run that diverges or spends more than was asked."""
    summary, asked = done.summary, planned.experiment.config.target_epsilon
    if summary["diverging"]:
        _warn(
            "the training loss grew to more than ten times its first value, so this run diverges: "
            "a smaller learning rate or λ may help, and for PMTL with a sampling rate p below 1 "
            "--server-learning-rate p (docs/algorithms.md says why)"
        )
    if summary["epsilon"] is not None:
        of = "stages" if planned.earlier else f"{summary['rounds']} rounds"
        _warn_above(asked, summary["epsilon"], f"all {of} together spend")


def _warn_above(asked: float, spent: float, who: str) -> None:
    if spent > asked:
        _warn(f"{who} ε {epsilon_text(spent)}, more than the {asked:g} asked")


def _warn(text: str) -> None:
    if processes.is_first():
        print(f"fedjaxsim: warning: {text}", file=sys.stderr)
