"""The program: parses a command line, does the command, and reports errors in one line."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from fedjaxsim.cli.audit import Audit
from fedjaxsim.cli.bench import Bench
from fedjaxsim.cli.compare import Compare
from fedjaxsim.cli.composed import (
    OPTIONS,
    data_defaults,
    defaults_of,
    files_of,
    scan,
    show_help,
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
from fedjaxsim.cli.sweep import Sweep
from fedjaxsim.cli.tune import Tune
from fedjaxsim.commands.messages import INTERRUPTED, REFUSED, one_line, refuse, say
from fedjaxsim.runs.settings import DataSettings, Everything
from fedjaxsim.runs.settings_files import read_raw
from fedjaxsim.runs.user_code_lines import own_line

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
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    kind = _WITH_SETTINGS.get(name)
    if kind is None or (wants_help(rest) and show_help(name, kind, rest) is None):
        return _parse(arguments)
    if kind is Data:
        made, defaults = data_defaults(rest, _flags_of(Data))
        command = _parse(arguments, {name: with_settings(Data, made, defaults)})
        assert isinstance(command, Data)
        command.config.validate()
        return command
    if kind is Bench:
        return _parse_bench(rest, notes)
    made, defaults = defaults_of(rest, _flags_of(kind), notes)
    command = _parse(arguments, {name: with_settings(kind, made, defaults)})
    assert isinstance(command, Run | Tune | Plan | Audit)
    command.settings.validate()
    if isinstance(command, Run):
        command.require_devices()
        given = scan(rest).keys() | (set() if command.config is None else read_raw(command.config))
        given &= {field.name for field in dataclasses.fields(command.settings)}
        alone = command.from_ is not None
        command.finetuning.require_read(command.settings, given, alone=alone)
    return command


def _parse_bench(arguments: Sequence[str], notes: list[str] | None) -> Bench:
    """Parse the command line of bench, once for each file of settings."""
    files = files_of(arguments)
    if any(file.endswith(".json") for file in files):
        command = _parse(["bench", *arguments])
        assert isinstance(command, Bench)
        return command
    flags, commands = [word for word in arguments if word not in files], list[Bench]()
    for words in [[*flags, file] for file in files] or [flags]:
        made, defaults = defaults_of(words, _flags_of(Bench), notes)
        command = _parse(["bench", *words], {"bench": with_settings(Bench, made, defaults)})
        assert isinstance(command, Bench)
        command.settings.validate()
        if command.name in (other.name for other in commands):
            raise ValueError(f"two files of settings are called {command.name}")
        commands.append(command)
    runs = {command.name: command.settings for command in commands}
    return dataclasses.replace(commands[0], runs=runs)


_WITH_SETTINGS: dict[str, type] = {
    "run": Run, "tune": Tune, "plan": Plan, "audit": Audit, "bench": Bench, "data": Data
}  # fmt: skip


def _flags_of(kind: type) -> set[str]:
    """The field names of a command's flags beside its settings."""
    found = set()
    for field in dataclasses.fields(kind):
        inner = getattr(field.default, "__dataclass_fields__", None)
        found |= {field.name.rstrip("_")} if inner is None else set(inner)
    return found | {"help"}


def _parse(arguments: Sequence[str], made: Mapping[str, tuple[type, Any]] = {}) -> Command:
    """Parse a command line.

    Args:
      arguments: without the program's name.
      made: commands in place of the plain ones, with their defaults, by name.
    """
    commands = {
        "run": Run, "resume": Resume, "sweep": Sweep, "tune": Tune, "compare": Compare,
        "report": Report, "data": Data, "demo": Demo, "plan": Plan, "privacy": Privacy,
        "audit": Audit, "bench": Bench,
    }  # fmt: skip
    union: Any = None
    for name, kind in commands.items():
        found, default = made.get(name, (kind, None))
        if name in _WITH_SETTINGS and name not in made:
            settings = DataSettings if kind is Data else Everything
            found, default = with_settings(kind, settings, settings(), brief=True)
        how = {} if default is None else {"default": default}
        one = Annotated[found, tyro.conf.subcommand(name, **how)]
        union = one if union is None else union | one
    with flags_refused_in_one_line():
        return tyro.cli(
            union,
            prog="fedjaxsim",
            description="Private, personalized federated learning, simulated. See also --version.",
            args=arguments,
            registry=REGISTRY,
            config=OPTIONS,
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
            say(f"warning: {one_line(note)}")
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has left (`| head`). Python would complain again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except Exception as error:
        if own_line(error) is None:
            raise
        return refuse(error)
