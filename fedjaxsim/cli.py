"""The command line: `fedjaxsim run`, `sweep`, `tune`, `compare`, `demo`, `privacy` and so on."""

import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim import plots, privacy_cli
from fedjaxsim.bench.command import Bench, prepare_bench
from fedjaxsim.config import RunConfig, combine, read_toml
from fedjaxsim.demo import prepare_demo
from fedjaxsim.experiment import execute, prepare
from fedjaxsim.privacy_cli import Audit, Privacy
from fedjaxsim.progress import print_table, stop_on_interrupt
from fedjaxsim.rundir import RunDirectory
from fedjaxsim.sharding import use_all_cores
from fedjaxsim.sweep.command import Sweep, prepare_sweep
from fedjaxsim.tune.command import Tune, prepare_tune

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Run one federated simulation."""

    settings: OmitArgPrefixes[RunConfig]
    config: Positional[Annotated[Path | None, tyro.conf.arg(metavar="[CONFIG.toml]")]] = None
    """A TOML file with the same settings; flags win over it."""


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare finished runs in a table and, with --out, in one figure."""

    runs: Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR")]]
    """The directories of the runs."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Where to draw the runs together."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclasses.dataclass(frozen=True)
class Demo:
    """Compare PMTL, FedAvg, FedProx and Local on digits over 100 clients, private and not."""

    out: Path
    """Directory for the runs, the table and the curves."""
    seed: int = 0
    """Seed of all runs."""
    overwrite: bool = False
    """Replace the runs that the directory already holds."""
    quiet: bool = False
    """No progress bars: one plain line per evaluation."""


Command = Run | Sweep | Tune | Compare | Demo | Privacy | Audit | Bench


def parse(arguments: Sequence[str]) -> Command:
    """Parses a command line, with the settings of the TOML file it names.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if the file, or the settings together, are not as they must be.
      SystemExit: where tyro has shown help (code 0) or refused a flag (code 2).
    """
    command = _parse(arguments, RunConfig())
    if isinstance(command, Run | Tune | Audit):
        if command.config is not None:
            settings = read_toml(command.config)
            command = _parse(arguments, combine(settings, command.settings))
            assert isinstance(command, Run | Tune | Audit)
        command.settings.validate()
    return command


def _parse(arguments: Sequence[str], defaults: RunConfig) -> Command:
    run: Any = Annotated[Run, tyro.conf.subcommand("run", default=Run(defaults))]
    sweep: Any = Annotated[Sweep, tyro.conf.subcommand("sweep")]
    tune: Any = Annotated[Tune, tyro.conf.subcommand("tune", default=Tune(defaults))]
    compare: Any = Annotated[Compare, tyro.conf.subcommand("compare")]
    demo: Any = Annotated[Demo, tyro.conf.subcommand("demo")]
    privacy: Any = Annotated[Privacy, tyro.conf.subcommand("privacy")]
    audit: Any = Annotated[Audit, tyro.conf.subcommand("audit", default=Audit(defaults))]
    bench: Any = Annotated[Bench, tyro.conf.subcommand("bench")]
    return tyro.cli(
        run | sweep | tune | compare | demo | privacy | audit | bench,
        prog="fedjaxsim",
        description="Private, personalized federated learning, simulated. See also --version.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
    )


def _prepare(command: Command) -> Callable[[], int]:
    """Checks all input of a command; what is returned does the work and gives the exit code.

    Raises:
      FileNotFoundError, ValueError: for bad input, as nothing in the work itself is. Privacy
        commands find out only by computing whether a target can be met, so they compute here.
    """
    match command:
        case Run():
            return _prepare_run(command.settings)
        case Sweep():
            return prepare_sweep(command)
        case Tune():
            return prepare_tune(command)
        case Compare():
            return _prepare_comparison(command)
        case Demo():
            return prepare_demo(
                command.out, command.seed, overwrite=command.overwrite, quiet=command.quiet
            )
        case Privacy():
            return privacy_cli.prepare(command.question)
        case Audit():
            return privacy_cli.prepare_audit(command)
        case Bench():
            return prepare_bench(command)


def _prepare_run(config: RunConfig) -> Callable[[], int]:
    experiment = prepare(config)
    directory = None
    if config.out is not None:
        directory = RunDirectory.create(config.out, overwrite=config.overwrite)

    def work() -> int:
        with stop_on_interrupt() as stop:
            summary, report = execute(experiment, directory, stop, quiet=config.quiet)
        print_table([{"run": config.algorithm, **summary}])
        if summary["diverging"]:
            print(
                "fedjaxsim: warning: the training loss grew to more than ten times its lowest "
                "value, so this run diverges; for PMTL with a sampling rate p below 1, a smaller "
                "--lam or --server-learning-rate p helps (docs/algorithms.md says why)",
                file=sys.stderr,
            )
        print(report)
        if directory is not None:
            print(f"files in {directory.path}")
        if not summary["interrupted"]:
            return 0
        print(f"stopped by Ctrl-C after {summary['rounds']} rounds", file=sys.stderr)
        return INTERRUPTED

    return work


def _prepare_comparison(command: Compare) -> Callable[[], int]:
    if not command.runs:
        raise ValueError("compare needs at least one run directory, got none")
    if command.out is not None:
        plots.check_path(command.out)
    distinct = len({path.name for path in command.runs}) == len(command.runs)
    rows, records = [], {}
    for path in command.runs:
        directory = RunDirectory(path)
        name = path.name if distinct else str(path)
        rows.append({"run": name, **directory.summary()})
        records[name] = directory.metrics()

    def work() -> int:
        if command.json:
            print(json.dumps(rows, indent=2, allow_nan=False, ensure_ascii=False))
        else:
            print_table(rows)
        if command.out is not None:
            figure = plots.comparison_figure(plots.curves(records), "Comparison of runs")
            plots.save(figure, command.out)
        return 0

    return work


def main(arguments: Sequence[str] | None = None) -> int:
    """The program. Bad input is one line on stderr and exit code 2.

    Args:
      arguments: without the program's name; by default those of the process.

    Returns:
      The exit code: 0; 1 if the reader of its output left; 2 for bad input; 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    use_all_cores()
    if list(arguments) == ["--version"]:
        print(f"fedjaxsim {importlib.metadata.version('fedjaxsim')}")
        return 0
    try:
        try:
            work = _prepare(parse(arguments))
        except (ValueError, FileNotFoundError) as error:
            print(f"fedjaxsim: error: {error}", file=sys.stderr)
            return 2
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has left (`| head`). Python would complain again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("fedjaxsim: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
