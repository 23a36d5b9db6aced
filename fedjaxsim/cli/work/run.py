"""The commands `fedjaxsim run` and `fedjaxsim resume`: from their flags to a run's last line."""

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fedjaxsim.engine.state import SimulationState
from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import (
    epsilon_text,
    print_guarantee,
    print_table,
    stop_on_interrupt,
)
from fedjaxsim.runs.build import Experiment, prepare, versions
from fedjaxsim.runs.directory import CONFIG, GUARANTEE, RunDirectory
from fedjaxsim.runs.execute import about, describe, execute
from fedjaxsim.runs.feasible import labels_like_classes
from fedjaxsim.runs.loop import Cadence
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.runs.stages import start_from

if TYPE_CHECKING:
    from fedjaxsim.cli.resume import Resume
    from fedjaxsim.cli.run import Run

INTERRUPTED = 130
_REPEATED = {"sweep.toml": "sweep", "path.json": "tuning"}


def prepare_run(command: "Run") -> Callable[[], int]:
    """Checks all input of a run; what is returned runs it and gives the exit code.

    Raises:
      FileNotFoundError: if there are no data where the settings say.
      ValueError: naming what is wrong, what is allowed and what was got.
    """
    config = command.settings
    cadence = Cadence.parse(command.checkpoint_every)
    experiment = prepare(config)
    begin, earlier = None, []
    if command.from_ is not None:
        if config.out is not None and config.out.resolve() == command.from_.resolve():
            raise ValueError(f"out must be another directory than from, got {config.out} for both")
        begin, earlier = start_from(command.from_, experiment)
    directory = None
    if config.out is not None:
        directory = RunDirectory.create(config.out, overwrite=config.overwrite)
    doubt = labels_like_classes(config, experiment.simulation.population)

    def work() -> int:
        if doubt is not None:
            _warn(doubt)
        return _run(
            experiment, directory, config.rounds, cadence, begin, earlier,
            quiet=config.quiet, explain=command.explain,
        )  # fmt: skip

    return work


def prepare_resume(command: "Resume") -> Callable[[], int]:
    """Checks whether a run can go on; what is returned does it and gives the exit code.

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
    directory = RunDirectory(path)
    tables = directory.config()
    planned, earlier = tables.get("resolved", {}).get("rounds"), tables.get("stages", [])
    config = RunConfig(**read_toml(path / CONFIG))
    experiment = prepare(config)
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
    if rounds == done and directory.is_finished():
        raise ValueError(f"{path} has done its {done} rounds: say --rounds N for N rounds in all")
    if rounds > config.rounds and config.schedule != "constant":
        raise ValueError(
            f"a run with schedule {config.schedule} cannot go on beyond its {config.rounds} "
            f"rounds, where its learning rate is 0, got rounds {rounds}"
        )
    simulation = experiment.simulation
    simulation.check_rounds(experiment.hparams, 0, rounds, config.eval_every)

    def work() -> int:
        if last is not None and last.note["versions"] != versions():
            _warn(
                f"{last.folder} was written with {_words(last.note)}, so numbers may differ in "
                "their last digits from an undisturbed run"
            )
        return _run(
            experiment, directory, rounds, cadence, None, earlier,
            quiet=command.quiet, explain=command.explain,
        )  # fmt: skip

    return work


def _words(note: dict[str, dict[str, str]]) -> str:
    """The versions that are not those here."""
    here = versions()
    return ", ".join(f"{k} {v}" for k, v in note["versions"].items() if here.get(k) != v)


def _run(
    experiment: Experiment,
    directory: RunDirectory | None,
    rounds: int,
    cadence: Cadence,
    begin: SimulationState | None,
    earlier: Sequence[Record],
    *,
    quiet: bool,
    explain: bool,
) -> int:
    """Runs, prints what came of it, and gives the exit code."""
    with stop_on_interrupt() as stop:
        summary, report = execute(
            experiment, directory, stop, quiet=quiet, cadence=cadence, rounds=rounds,
            begin=begin, earlier=earlier,
        )  # fmt: skip
    print_table([{"run": experiment.config.algorithm, **summary}])
    if summary["diverging"]:
        _warn(
            "the training loss grew to more than ten times its first value, so this run diverges; "
            "for PMTL with a sampling rate p below 1, a smaller --lam or --server-learning-rate p "
            "helps (docs/algorithms.md says why)"
        )
    algorithm, asked = experiment.config.algorithm, experiment.config.target_epsilon
    if summary["epsilon"] is not None and summary["epsilon"] > asked:
        of = "stages" if earlier else f"{summary['rounds']} rounds"
        spent = epsilon_text(summary["epsilon"])
        _warn(f"all {of} together spend ε {spent}, more than the {asked:g} asked")
    if earlier:
        stages = describe(earlier, algorithm, summary["rounds"])
        print(f"stages: {stages}; the guarantee is of all of them")
    place = None if directory is None else directory.path / GUARANTEE
    print_guarantee(report, place, explain=explain)
    if directory is not None:
        print(f"files in {directory.path}")
    if not summary["interrupted"]:
        return 0
    stopped = f"stopped by Ctrl-C after {summary['rounds']} rounds"
    if directory is not None:
        stopped += f"; fedjaxsim resume {shlex.quote(str(directory.path))} goes on"
    print(stopped, file=sys.stderr)
    return INTERRUPTED


def _warn(text: str) -> None:
    print(f"fedjaxsim: warning: {text}", file=sys.stderr)
