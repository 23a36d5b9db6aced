"""The program: reads a command line, does the command, and reports errors in one line."""

import contextlib
import errno
import gc
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjaxsim import __version__
from fedjaxsim.cli.devices import Devices
from fedjaxsim.cli.flags import HELP, Command, Work, show, show_commands, split
from fedjaxsim.cli.messages import (
    INTERRUPTED,
    REFUSED,
    UNWRITABLE,
    in_flags,
    is_expected,
    one_line,
    refuse,
    say,
)
from fedjaxsim.factories import CommandLineText, Setting, flag, is_user_code, settings_of
from fedjaxsim.runs.parts import ROLES
from fedjaxsim.runs.settings import (
    Layer,
    layered_config,
    readers,
    static_keys,
    table_of,
    unknown,
    unread,
)
from fedjaxsim.runs.settings_files import CONFIG, OUTPUT, read_raw
from fedjaxsim.runs.sweep_files import SweepFile, SweepOptions, read_file
from fedjaxsim.signals import end_on_signal
from fedjaxsim.store import unlock_folders

_FILES = {
    "run": ("run", "resume", "export"), "sweep": ("sweep", "demo"), "tune": ("tune",),
    "predict": ("predict", "evaluate", "coefficients"),
    "compare": ("compare",), "ls": ("ls",),
    "data": ("data",), "plan": ("plan",), "privacy": ("privacy",),
    "audit": ("audit",), "bench": ("bench",),
}  # fmt: skip
COMMANDS = {name: f"fedjaxsim.cli.{file}:{name}" for file, of in _FILES.items() for name in of}
"""The functions of commands, as "module:function"; see `flags`."""
_MANY = 4
"""As many commands are not listed in a message."""


class Call(NamedTuple):
    """A command with its arguments, converted."""

    command: Command
    arguments: dict[str, Any]

    @property
    def settings(self) -> Any:
        """The settings of its run."""
        return self.arguments["settings"]

    def prepare(self) -> Work:
        """Check all input; return the work of the command."""
        return self.command.function(**self.arguments)


def parse(arguments: Sequence[str]) -> Call:
    """Parse a command line, with the settings of the TOML file that it names.

    A flag without effect is refused. A file may serve several systems, so a setting without effect
    there is noted.
    """
    command, words = _command(arguments), arguments[1:]
    flags, other_words = split(words, command.flags | (static_keys() if command.takes else {}))
    path = Path(other_words[0]) if other_words and "config" in command.positionals else None
    file, parts, keys = SweepFile(), dict[str, list[str]](), dict[str, Setting]()
    if command.takes:
        if path is not None:
            file = read_file(path) if command.takes == "axes" else SweepFile(read_raw(path))
        parts = {role: _names(flags.get(role)) or file.parts(role) for role in ROLES}
        parts = {role: names for role, names in parts.items() if names}
        _start_for_user_code(parts, flags)
        keys = file.settings_of_runs(flags | parts)
        keys |= settings_of(SweepOptions) if command.takes == "axes" else {}
        flags, other_words = split(words, keys | command.flags)  # now with those of the parts
    own_flags = {name: value for name, value in flags.items() if name in command.flags}
    asked = {name: value for name, value in flags.items() if name not in own_flags}
    for name in asked.keys() - keys.keys():
        first = {role: names[0] for role, names in parts.items()}
        _refuse(name, command, keys, {**file.base, **first})
    of_runs: dict[str, Any] = {}
    if command.takes == "axes":
        of_runs = {"axes": {name: _axis(keys[name], value) for name, value in asked.items()}}
    elif command.takes == "settings":
        earlier = Layer({}, unread="left out")
        if "from" in own_flags:
            written = Path(own_flags["from"]) / CONFIG
            earlier = earlier._replace(values=read_raw(written), path=written)
        ignored = dict.fromkeys((*command.ignored, *OUTPUT), f"has no effect on {command.name}")
        config = layered_config(asked, Layer(file.base, path, "noted"), earlier, ignored)
        of_runs = {"settings": config}
    values = command.arguments(own_flags, other_words) | of_runs
    if command.takes == "settings":
        values.pop("config", None)  # is in its settings
    return Call(command, values)


def _names(parts: Any) -> list[str]:
    """Return the names in a flag of parts; none without its value."""
    return parts.split(",") if isinstance(parts, str) else []


def _axis(setting: Setting, value: Any) -> Any:
    """Convert a value, or the list of values of an axis."""
    if setting.item is None and isinstance(value, str) and "," in value:
        return [setting.convert(CommandLineText(word.strip())) for word in value.split(",")]
    return setting.convert(value)


def _refuse(
    name: str, command: Command, keys: Mapping[str, Setting], settings: Mapping[str, Any]
) -> None:
    """Refuse a flag that a command lacks, unless its runs do: `layered_config` says why."""
    is_setting = name in static_keys() or name in readers()
    commands = [
        other for other, path in COMMANDS.items() if name in Command.find(other, path).flags
    ]
    if command.takes == "settings" and (is_setting or name in OUTPUT or name in command.ignored):
        return
    if commands and not is_setting:
        others = " and ".join(commands) if len(commands) < _MANY else "other commands"
        raise ValueError(f"--{flag(name)} is a flag of {others}, not of {command.name}")
    if command.takes == "axes":
        [why] = unread([name], table_of(settings), [*keys, *command.flags])
        raise ValueError(f"no run reads what is set: {why}")
    if command.takes == "settings":
        raise ValueError(unknown(name, [*static_keys(), *readers(), *command.flags]))
    if is_setting:
        of_run = f"{flag(name)} is a setting of the run, which {command.name}"
        if command.name == "resume":
            raise ValueError(f"{of_run} keeps: run --from DIR goes on with another")
        raise ValueError(f"{of_run} does not change")
    reason = unknown(name, command.flags, "flag")
    raise ValueError(f"{reason}; see fedjaxsim {command.name} --help")


def _command(arguments: Sequence[str]) -> Command:
    """Find the command that a line begins with."""
    if not arguments:
        raise ValueError("give a command: fedjaxsim --help lists them")
    name = arguments[0]
    if name not in COMMANDS:
        raise ValueError(f"{unknown(name, COMMANDS, 'command')}; see fedjaxsim --help")
    return Command.find(name, COMMANDS[name])


def _start_for_user_code(parts: Mapping[str, Sequence[str]], flags: Mapping[str, Any]) -> None:
    """Start JAX if parts are the user's, whose code may use it."""
    open_to_users = [names for role, names in parts.items() if ROLES[role].takes_user_code]
    if not any(map(is_user_code, itertools.chain(*open_to_users))):
        return
    names = settings_of(Devices)
    quiet = "true" in {str(flags.get(name)).lower() for name in ("quiet", "json")}
    devices = Devices(**{n: e.convert(flags[n]) for n, e in names.items() if n in flags})
    devices.start(quiet=quiet)


@contextlib.contextmanager
def _as_found() -> Iterator[None]:
    """Print what the library logs and warns of, and leave the process's globals as they were."""
    handler = _Lines(logging.WARNING)
    logger, stdout, shown = logging.getLogger("fedjaxsim"), sys.stdout, warnings.showwarning
    collected = gc.get_threshold()
    logger.addHandler(handler)
    warnings.showwarning = _each_once(shown)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        sys.stdout, warnings.showwarning = stdout, shown
        gc.set_threshold(*collected)


def _each_once(usual: Callable[..., None]) -> Callable[..., None]:
    """Return a `warnings.showwarning` that prints the package's warnings once, in one line each.

    JAX's warnings of broken files in our cache are among them; they are written anew.
    """
    shown = set[str]()

    def show(message, category, filename, *place):
        cache: Any = sys.modules.get("fedjaxsim.engine.compilation_cache")
        ours = issubclass(category, UserWarning) and "fedjaxsim" in filename
        if not (ours or (cache and cache.remove_broken(str(message)))):
            usual(message, category, filename, *place)
            return
        text = one_line(in_flags(message))
        if text not in shown:  # a plan is checked before and at its start
            shown.add(text)
            say(f"warning: {text}")

    return show


class _Lines(logging.Handler):
    """Print each record in one line."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {one_line(record.getMessage())}")


@_as_found()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program on words, by default the process's; an error of the user is one line.

    Returns:
      The exit code: 0; 1 if its output has no reader; 2 for bad input, an error in a user's
      own code, or too little memory; 3 if another process of the run was lost; 4 if a file, or
      the output, cannot be written; 128 + n after signal n.
    """
    try:
        try:
            with end_on_signal():
                work = _prepare(sys.argv[1:] if arguments is None else arguments)
        except REFUSED as error:
            if _is_cut(error):  # help or the version
                raise
            return refuse(error)
        code = work()
        print(end="", flush=True)
        return code or 0
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except Exception as error:
        if _is_cut(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it
            if isinstance(error, BrokenPipeError):
                return 1
            say(f"error: the output is cut: {os.strerror(errno.ENOSPC)}")
            return UNWRITABLE
        if not is_expected(error):
            raise
        return refuse(error)
    finally:
        unlock_folders()


def _is_cut(error: Exception) -> bool:
    """Return whether the output has no reader, or no space."""
    return isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC)


def _prepare(arguments: Sequence[str]) -> Work:
    """Show help or the version, or check all input of a command; return what is left to do."""
    first, words = arguments[:1], [word for word in arguments[1:] if word not in HELP]
    if first == ["--version"]:
        print(f"fedjaxsim {__version__}")
    elif {*first} & {*HELP}:
        show_commands([Command.find(name, path) for name, path in COMMANDS.items()])
    elif len(words) < len(arguments[1:]):
        show(_command(arguments), words)
    else:
        call = parse(arguments)
        work = call.prepare()
        for note in getattr(call.arguments.get("settings"), "notes", ()):
            say(f"warning: {one_line(note)}")
        return work
    return lambda: None
