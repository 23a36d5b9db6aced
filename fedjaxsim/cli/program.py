"""The program: finds the command, checks its input, does it, and says in one line what is wrong."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from fedjaxsim.cli.audit import Audit
from fedjaxsim.cli.bench import Bench
from fedjaxsim.cli.compare import Compare
from fedjaxsim.cli.data import Data
from fedjaxsim.cli.demo import Demo
from fedjaxsim.cli.plan import Plan
from fedjaxsim.cli.privacy import Privacy
from fedjaxsim.cli.read_numbers import REGISTRY
from fedjaxsim.cli.refusals import REFUSED, flags_refused_in_one_line, one_line, refuse
from fedjaxsim.cli.report import Report
from fedjaxsim.cli.resume import Resume
from fedjaxsim.cli.run import Run
from fedjaxsim.cli.start import INTERRUPTED
from fedjaxsim.cli.sweep import Sweep
from fedjaxsim.cli.tune import Tune
from fedjaxsim.runs.own_lines import own_line
from fedjaxsim.runs.reads import different, given_flags, require_read, unread
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import combine, displaced, read_toml

Command = (
    Run | Resume | Sweep | Tune | Compare | Report | Data | Demo | Plan | Privacy | Audit | Bench
)


def parse(arguments: Sequence[str], notes: list[str] | None = None) -> Command:
    """Parses a command line, with the settings of the TOML file it names.

    A flag that has no effect is refused. A file may serve several systems, so what has none there
    is worth a note only.

    Args:
      arguments: without the program's name.
      notes: where notes for the user go.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if a flag, the file, or the settings together are not as they must be.
      SystemExit: where help was asked for and shown.
    """
    command = _parse(arguments, RunConfig())
    if isinstance(command, Run | Tune | Plan | Audit):
        inherited: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        if isinstance(command, Run) and command.from_ is not None:
            inherited = read_toml(command.from_ / "config.toml")
        if inherited or command.config is not None:
            settings = {} if command.config is None else read_toml(command.config)
            both = displaced(inherited, settings) | settings
            command = _parse(arguments, combine(both, command.settings))
            assert isinstance(command, Run | Tune | Plan | Audit)
        command.settings.validate()
        given = given_flags(arguments)
        require_read(command.settings, sorted(given))
        if isinstance(command, Run):
            command.require_devices()
            alone = command.from_ is not None
            command.finetuning.require_read(command.settings, {*given, *settings}, alone=alone)
        left = unread(command.settings, sorted(different(command.settings) - given - {*inherited}))
        if notes is not None and left:
            notes.append(f"{command.config}: {'; '.join(left)}")
    elif isinstance(command, Data):
        command.config.validate()
        require_read(command.config, sorted(given_flags(arguments)))
    return command


def _parse(arguments: Sequence[str], defaults: RunConfig) -> Command:
    run: Any = Annotated[Run, tyro.conf.subcommand("run", default=Run(defaults))]
    resume: Any = Annotated[Resume, tyro.conf.subcommand("resume")]
    sweep: Any = Annotated[Sweep, tyro.conf.subcommand("sweep")]
    tune: Any = Annotated[Tune, tyro.conf.subcommand("tune", default=Tune(defaults))]
    compare: Any = Annotated[Compare, tyro.conf.subcommand("compare")]
    report: Any = Annotated[Report, tyro.conf.subcommand("report")]
    data: Any = Annotated[Data, tyro.conf.subcommand("data")]
    demo: Any = Annotated[Demo, tyro.conf.subcommand("demo")]
    plan: Any = Annotated[Plan, tyro.conf.subcommand("plan", default=Plan(defaults))]
    privacy: Any = Annotated[Privacy, tyro.conf.subcommand("privacy")]
    audit: Any = Annotated[Audit, tyro.conf.subcommand("audit", default=Audit(defaults))]
    bench: Any = Annotated[Bench, tyro.conf.subcommand("bench")]
    with flags_refused_in_one_line():
        return tyro.cli(
            run
            | resume
            | sweep
            | tune
            | compare
            | report
            | data
            | demo
            | plan
            | privacy
            | audit
            | bench,
            prog="fedjaxsim",
            description="Private, personalized federated learning, simulated. See also --version.",
            args=arguments,
            registry=REGISTRY,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The program. Bad input, or own code that fails, is one line on stderr and exit code 2.

    Args:
      arguments: without the program's name; by default those of the process.

    Returns:
      The exit code: 0; 1 if the reader of its output left; 2 for bad input, or an error in a user's
      own code; 3 if another process of the run was lost; 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        import importlib.metadata

        print(f"fedjaxsim {importlib.metadata.version('fedjaxsim')}")
        return 0
    try:
        try:
            notes: list[str] = []
            work = parse(arguments, notes).prepare()
        except BrokenPipeError:  # of help
            raise
        except REFUSED as error:
            return refuse(error)
        for note in notes:
            print(f"fedjaxsim: warning: {one_line(note)}", file=sys.stderr)
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
    except Exception as error:
        if own_line(error) is None:
            raise
        return refuse(error)
