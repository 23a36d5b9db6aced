"""Commands as functions: their flags are read from signature and docstring, and from a line.

A command is a function that checks all input and returns the work, `() -> exit code`. A positional
argument of it stands for words without dashes, a keyword-only one for a flag; an argument that is a
dataclass stands for the flags of its fields, `settings` for the settings of a run.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjaxsim.factories import Setting, Word, flag, resolve, settings_of
from fedjaxsim.runs.settings import unknown

Work = Callable[[], int]
HELP = ("--help", "-h")


UNEVALUATED = (
    "budget_epsilon", "eval_clients", "eval_every", "evaluate_privately", "evaluation_largest",
    "patience",
)  # fmt: skip
"""Settings that commands without evaluations on the way do not read."""


def without(*names: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Mark settings of a run that a command does not read: it has no such flags."""

    def mark(function: Callable[..., Work]) -> Callable[..., Work]:
        vars(function)["without"] = frozenset(names)
        return function

    return mark


class Command(NamedTuple):
    """A command with its flags.

    Attributes:
      name: its words on the command line.
      function: `(…) -> work`.
      positionals: arguments without dashes, by parameter.
      flags: all flags by name.
      groups: classes of arguments that stand for several flags, by parameter.
    """

    name: str
    function: Callable[..., Work]
    positionals: dict[str, Setting]
    flags: dict[str, Setting]
    groups: dict[str, type]

    @classmethod
    def find(cls, name: str, path: str) -> "Command":
        """Read the command that "module:function" names."""
        function = resolve(path)
        parameters = inspect.signature(function).parameters
        positionals, flags = dict[str, Setting](), dict[str, Setting]()
        for argument, setting in settings_of(function).items():
            alone = parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY
            (flags if alone else positionals)[argument.strip("_")] = setting
        hints = typing.get_type_hints(function)
        groups = {
            argument: hints[argument]
            for argument in parameters
            if dataclasses.is_dataclass(hints[argument]) and argument != "settings"
        }
        for group in groups.values():
            flags |= settings_of(group)
        return cls(name, function, positionals, flags, groups)

    @property
    def takes_settings(self) -> bool:
        """Return whether it takes the settings of a run."""
        return "settings" in inspect.signature(self.function).parameters

    @property
    def without(self) -> frozenset[str]:
        """The settings of a run that it does not read."""
        return getattr(self.function, "without", frozenset())

    @property
    def summary(self) -> str:
        """The first line of its description."""
        return self.description.partition("\n")[0]

    @property
    def description(self) -> str:
        """Its docstring without the sections."""
        return (inspect.getdoc(self.function) or "").partition("\n\nArgs:")[0]

    def arguments(self, flags: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of the function in converted form, but for the settings of a run."""
        given, left = {}, list(words)
        for name, setting in self.positionals.items():
            if setting.item is not None:
                given[name], left = tuple(map(setting.item, left)), []
            elif left:
                given[name] = setting.convert(Word(left.pop(0)))
            elif setting.required:
                allowed = f" ({', '.join(setting.values)})" if setting.values else ""
                raise ValueError(f"fedjaxsim {self.name} needs {name.upper()}{allowed}")
        if left:
            raise ValueError(f"fedjaxsim {self.name} takes no {left[0]!r}: see --help")
        missing = [n for n, each in self.flags.items() if each.required and n not in flags]
        if missing:
            needed = ", ".join(f"--{flag(name)}" for name in missing)
            raise ValueError(f"fedjaxsim {self.name} needs {needed}")
        values = {n: s.convert(flags[n]) for n, s in self.flags.items() if n in flags}
        for argument, group in self.groups.items():
            fields = {n: values.pop(n) for n in settings_of(group) if n in values}
            given[argument] = group(**fields)
        return given | {self.flags[name].argument: value for name, value in values.items()}


def split(words: Sequence[str], known: Mapping[str, Setting]) -> tuple[dict[str, Any], list[str]]:
    """Split a command line into flags with their values, by name, and other words.

    A flag that is not known may have a value or none. A flag of a list may be repeated.
    """
    flags: dict[str, Any] = {}
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or _is_number(word):
            others.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if word.removeprefix("--") == word or not name:
            raise ValueError(f"{word} is no flag: a flag is like --rounds 100")
        name = name.replace("-", "_")
        negated = known.get(name.removeprefix("no_"))
        again = name in known and known[name].item is not None and name in flags
        before = f"{flags[name]}," if again else ""
        follows = bool(left) and not left[0].startswith("--")
        if equals:
            flags[name] = Word(before + value)
        elif name in known and known[name].hint is bool:
            flags[name] = True
        elif name not in known and negated is not None and negated.hint is bool:
            flags[negated.name] = False
        elif follows and (name in known or not left[0].endswith(".toml")):
            flags[name] = Word(before + left.pop(0))
        elif name in known:
            raise ValueError(f"--{flag(name)} needs a value")
        else:
            flags[name] = True
    return flags, others


def _is_number(word: str) -> bool:
    return word[1:2].isdigit() or word[1:2] == "."


def require_known(command: Command, flags: Mapping[str, Any]) -> None:
    """Check that a command has all these flags; raise a ValueError that suggests the nearest."""
    for name in flags:
        if name not in command.flags:
            said = unknown(name, command.flags, "flag")
            raise ValueError(f"{said}; see fedjaxsim {command.name} --help")
