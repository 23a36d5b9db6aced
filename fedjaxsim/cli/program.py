"""The program: parses a command line, does the command, and reports errors in one line."""

import dataclasses
import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

import tyro

from fedjaxsim.cli.audit import Audit
from fedjaxsim.cli.bench import Bench
from fedjaxsim.cli.compare import Compare
from fedjaxsim.cli.composed import (
    OPTIONS,
    data_defaults,
    defaults_of,
    flags_of,
    require_no_settings,
    show_help,
    split,
    wants_help,
    with_settings,
)
from fedjaxsim.cli.data import Data
from fedjaxsim.cli.demo import Demo
from fedjaxsim.cli.flag_errors import flags_refused_in_one_line
from fedjaxsim.cli.plan import Plan
from fedjaxsim.cli.privacy import Privacy
from fedjaxsim.cli.read_numbers import REGISTRY
from fedjaxsim.cli.report import Report
from fedjaxsim.cli.resume import Resume
from fedjaxsim.cli.run import Run
from fedjaxsim.cli.shared_flags import WithSettings
from fedjaxsim.cli.sweep import Sweep
from fedjaxsim.cli.tune import Tune
from fedjaxsim.commands.messages import (
    INTERRUPTED,
    REFUSED,
    is_out_of_memory,
    one_line,
    outputs_that_may_end,
    refuse,
    say,
)
from fedjaxsim.runs.settings import DataSettings, Everything
from fedjaxsim.runs.user_code import own_line
from fedjaxsim.signals import end_on_signal
from fedjaxsim.store import StorageError, release

Command = (
    Run | Resume | Sweep | Tune | Compare | Report | Data | Demo | Plan | Privacy | Audit | Bench
)
COMMANDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Command)}
_LASTING = ("run", "resume", "sweep", "tune", "demo", "bench")
"""Commands whose result is in files: they go on without a reader of their output."""
_WITH_SETTINGS = {name: kind for name, kind in COMMANDS.items() if issubclass(kind, WithSettings)}


def parse(arguments: Sequence[str], notes: list[str] | None = None) -> Command:
    """Parse a command line, with the settings of the TOML file it names.

    A flag without effect is refused. A file may serve several systems, so a setting without effect
    there gives a note.

    Args:
      arguments: words after the program's name.
      notes: list to which notes for the user are added.

    Raises:
      FileNotFoundError: if the file is missing.
      ValueError: if a flag, the file, or the settings together are wrong.
      SystemExit: after help was shown.
    """
    for word in arguments:
        if word.partition("=")[0] == "--":
            raise ValueError(f"{word} names no flag: a flag is like --rounds 100")
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    kind = _WITH_SETTINGS.get(name)
    if name == "resume":
        require_no_settings(rest, flags_of(Resume))
    if kind is None or (wants_help(rest) and show_help(name, kind, rest) is None):
        return _parse(arguments)
    if kind is Bench:
        return _parse_bench(rest, notes)
    return _parse_settings(name, rest, notes)


def _parse_settings(name: str, arguments: Sequence[str], notes: list[str] | None) -> Any:
    """Parse the command line of a command with settings, and check them."""
    kind = _WITH_SETTINGS[name]
    if kind is Data:
        made, defaults = data_defaults(arguments, flags_of(Data))
    else:
        made, defaults = defaults_of(arguments, flags_of(kind), notes)
    command: Any = _parse([name, *arguments], {name: with_settings(kind, made, defaults)})
    command.check(split(arguments)[0])
    return command


def _parse_bench(arguments: Sequence[str], notes: list[str] | None) -> Bench:
    """Parse the command line of bench, once for each file of settings."""
    files = split(arguments)[1]
    if any(file.endswith(".json") for file in files):
        command = _parse(["bench", *arguments])
        assert isinstance(command, Bench)
        return command
    flags, commands = [word for word in arguments if word not in files], dict[str, Bench]()
    for words in [[*flags, file] for file in files] or [flags]:
        command = _parse_settings("bench", words, notes)
        if command.name in commands:
            raise ValueError(f"two files of settings are called {command.name}")
        commands[command.name] = command
    runs = {name: command.settings for name, command in commands.items()}
    return dataclasses.replace(next(iter(commands.values())), runs=runs)


def _parse(arguments: Sequence[str], made: Mapping[str, tuple[type, Any]] = {}) -> Command:
    """Parse a command line.

    Args:
      arguments: words after the program's name.
      made: composed commands with their defaults, by name, in place of the plain ones.
    """
    named = [name for name in COMMANDS if [name] == list(arguments[:1])]
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {}
    for name in named or COMMANDS:
        kind, options = COMMANDS[name], {}
        if name in made:
            kind, options["default"] = made[name]
        elif name in _WITH_SETTINGS:
            settings = DataSettings if kind is Data else Everything
            kind, options["default"] = with_settings(kind, settings, settings(), brief=True)
        kinds[name] = kind, options
    common: dict[str, Any] = {"registry": REGISTRY, "config": OPTIONS}
    with flags_refused_in_one_line():
        if named:  # so that only flags of this command are suggested
            [(kind, options)] = kinds.values()
            prog = f"fedjaxsim {named[0]}"
            return tyro.cli(kind, prog=prog, args=arguments[1:], **options, **common)
        members: list[Any] = [
            Annotated[kind, tyro.conf.subcommand(name, **options)]
            for name, (kind, options) in kinds.items()
        ]
        return tyro.cli(
            functools.reduce(operator.or_, members),
            prog="fedjaxsim",
            description="Private, personalized federated learning, simulated. See also --version.",
            args=arguments,
            **common,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; an error of the user is one line on stderr.

    Args:
      arguments: words after the program's name; by default the process's.

    Returns:
      The exit code: 0; 1 if its output could not be written; 2 for bad input, an error in a user's
      own code, or too little memory; 3 if another process of the run was lost; 4 if a file cannot
      be written; 128 + n after signal n.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    keeps_on = bool(arguments) and arguments[0] in _LASTING
    lost = []
    try:
        with outputs_that_may_end(None if keeps_on else BrokenPipeError) as lost:
            return _main(arguments) or int(bool(lost))
    except SystemExit as shown:  # help
        raise SystemExit(shown.code or int(bool(lost))) from None


def _main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--version"]:
        import importlib.metadata

        print(f"fedjaxsim {importlib.metadata.version('fedjaxsim')}")
        return 0
    try:
        try:
            notes: list[str] = []
            with end_on_signal():
                work = parse(arguments, notes).prepare()
        except BrokenPipeError:  # of help
            raise
        except REFUSED as error:
            return refuse(error)
        for note in notes:
            say(f"warning: {one_line(note)}")
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output has left (`| head`)
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except Exception as error:
        expected = isinstance(error, StorageError) or is_out_of_memory(error)
        if own_line(error) is None and not expected:
            raise
        return refuse(error)
    finally:
        release()
