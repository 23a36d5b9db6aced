"""Commands as functions: their flags are read from signature and docstring, and from a line.

A command is a function that checks all input and returns the work. A positional argument of it
stands for words without dashes, a keyword-only one for a flag; one of `Options` for the flags of
its fields. `settings` stands for the settings of a run, which a TOML file
may hold, and `axes` for settings of several runs, where a list is an axis. Help imports no JAX.
"""

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.factories import (
    CommandLineText,
    Setting,
    flag,
    gathered,
    import_factory,
    settings_of,
)
from fedjaxsim.runs.parts import ROLES
from fedjaxsim.runs.settings import DATA, GROUPS, RUN, SettingsTable, table_of, unread_by
from fedjaxsim.runs.sweep_files import SweepOptions

Work = Callable[[], int | None]
"""The work of a command, which returns its exit code, or None for 0."""
HELP = ("--help", "-h")

# Flags of several commands; a docstring may say more.
Directory = Annotated[Path, "Directory of the run."]
Json = Annotated[bool, "Print JSON instead of text."]
Overwrite = Annotated[bool, "Replace earlier results in the directory."]
Quiet = Annotated[bool, "Print the result, warnings and errors only."]


class Command(NamedTuple):
    """A command: its words without dashes and its flags, each under its name.

    It `takes` the "settings" of a run, the "axes" of several, in which a list is an axis, or "".
    """

    name: str
    function: Callable[..., Work]
    positionals: dict[str, Setting]
    flags: dict[str, Setting]
    takes: str

    @classmethod
    def find(cls, name: str, path: str) -> "Command":
        """Read the command that "module:function" names."""
        function = import_factory(path)
        parameters = inspect.signature(function).parameters
        positionals, flags = dict[str, Setting](), dict[str, Setting]()
        for argument, setting in settings_of(function).items():
            of = parameters.get(argument)
            alone = of is None or of.kind is inspect.Parameter.KEYWORD_ONLY
            (flags if alone else positionals)[argument.strip("_")] = setting
        takes = next((name for name in ("settings", "axes") if name in parameters), "")
        if takes == "settings" and not positionals:
            text = "TOML file with the same settings; flags win over it."
            positionals["config"] = Setting("config", Path, None, text)
        return cls(name, function, positionals, flags, takes)

    @property
    def ignored(self) -> set[str]:
        """The settings of a run that it does not read."""
        return unread_by(self.name)

    @property
    def description(self) -> str:
        """Its docstring without the sections."""
        return (inspect.getdoc(self.function) or "").partition("\n\nArgs:")[0]

    def arguments(self, flags: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of the function in converted form, but for the settings of a run."""
        arguments, left = {}, list(words)
        for name, setting in self.positionals.items():
            if setting.item is not None:
                arguments[name], left = tuple(map(setting.item, left)), []
            elif left:
                arguments[name] = setting.convert(CommandLineText(left.pop(0)))
            elif setting.required:
                allowed = f" ({', '.join(setting.values)})" if setting.values else ""
                raise ValueError(f"fedjaxsim {self.name} needs {name.upper()}{allowed}")
        if left:
            raise ValueError(f"fedjaxsim {self.name} takes no {left[0]!r}: see --help")
        missing = [n for n, setting in self.flags.items() if setting.required and n not in flags]
        if missing:
            needed = ", ".join(f"--{flag(name)}" for name in missing)
            raise ValueError(f"fedjaxsim {self.name} needs {needed}")
        values = {n: s.convert(flags[n]) for n, s in self.flags.items() if n in flags}
        by_argument = {self.flags[name].argument: value for name, value in values.items()}
        return gathered(self.function, arguments | by_argument)


def split(
    words: Sequence[str], settings: Mapping[str, Setting]
) -> tuple[dict[str, Any], list[str]]:
    """Split a command line into a dict of flags with their values, and other words.

    A flag that is not known may have a value or none. Only a flag of a list may be repeated.
    """
    flags: dict[str, Any] = {}
    other_words: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith(("-", "–", "—")) or word[1:2].isdigit() or word[1:2] == ".":
            other_words.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if word.removeprefix("--") == word or not name:
            raise ValueError(f"{word} is no flag: a flag is like --rounds 100")
        name = name.replace("-", "_")
        negated = settings.get(name.removeprefix("no_"))
        follows = bool(left) and not left[0].startswith("--")
        read: Any = True
        if equals:
            read = CommandLineText(value)
        elif name in settings and settings[name].hint is bool:
            if left and left[0].lower() in ("true", "false", "yes", "no"):
                raise ValueError(f"{word} takes no value: leave out {left[0]!r}")
        elif name not in settings and negated is not None and negated.hint is bool:
            name, read = negated.name, False
        elif follows and (name in settings or not left[0].endswith(".toml")):
            read = CommandLineText(left.pop(0))
        elif name in settings:
            raise ValueError(f"--{flag(name)} needs a value")
        if name in flags and name in settings:
            if settings[name].item is None:
                raise ValueError(f"give --{flag(name)} once, got {flags[name]} and {read}")
            read = CommandLineText(f"{flags[name]},{read}")
        flags[name] = read
    return flags, other_words


# --- help -----------------------------------------------------------------------------------------


USUAL = {
    "learning_rate": "η, the local learning rate",
    "clip": "C, the bound on the L2 norm of a message",
    "noise_multiplier": "z, the noise on the sum of messages over C",
    "sampling_rate": "p, the probability with which a client takes part in a round",
    "lam": "λ, the pull to the shared model (pmtl, ditto, …)",
    "mu": "μ, the weight of the proximal term (fedprox)",
    "alpha": "concentration of --partition dirichlet",
}
"""Settings of parts that help shows without importing them."""
_LEFT = 26
"""Columns of flags."""
_METAVARS: dict[Any, str] = {
    int: "INT", float: "FLOAT", str: "NAME", Path: "PATH", int | Literal["all"]: "INT|all",
}  # fmt: skip
_OF_ALGORITHM = ("algorithm", "mechanism", "sampling")
"""The roles that help for an algorithm shows: it sends, so they are its own, too."""


def show_commands(commands: Sequence[Command]) -> None:
    """Show the commands of the program."""
    print("usage: fedjaxsim COMMAND [--flag VALUE ...]\n")
    print("Private, personalized federated learning, simulated. See also --version.\n")
    for command in commands:
        _row(command.name, command.description.partition("\n")[0])
    print("\nThe flags of a command: fedjaxsim COMMAND --help")


def show(command: Command, words: Sequence[str]) -> None:
    """Show a command's flags; of one with settings, the flags of the parts that `words` name."""
    if command.takes == "settings":
        flags, _ = split(words, {setting.name: setting for setting in (*DATA, *RUN)})
        roles = [role for role in ROLES if isinstance(flags.get(role), str)]
        if roles:
            _show_parts(command, table_of(flags), roles)
            return
    places = [
        name.upper() if setting.required else f"[{name.upper()}]"
        for name, setting in command.positionals.items()
    ]
    print(" ".join(["usage: fedjaxsim", command.name, *places, "[--flag VALUE ...]"]))
    print(f"\n{command.description}\n")
    for name, setting in command.positionals.items():
        _row(name.upper(), _meaning(setting))
    _section("flags of the command", command.flags.values())
    if command.takes == "axes":
        _section("options of the sweep", settings_of(SweepOptions).values())
        print("\nsettings of its runs (a list is an axis): fedjaxsim run --help")
    if command.takes != "settings":
        return
    groups = {name: group.keys for name, group in GROUPS.items()}
    privacy = ("target", "guarantee", "noise_schedule", "spending", "examples")
    sections = {
        "data": (*DATA, *groups["rows"]),
        "parts and rounds": RUN,
        "a client's round": (*groups["minibatches"], *groups["schedule"]),
        "privacy": [setting for name in privacy for setting in groups[name]],
    }
    for title, keys in sections.items():
        _section(title, (setting for setting in keys if setting.name not in command.ignored))
    if "algorithm" not in command.ignored:
        every = f"all of them: fedjaxsim {command.name} --algorithm NAME --help"
        print(f"\nflags of most parts; {every}")
        print("(and --model, --mechanism, --sampling, --data or --partition NAME)")
        for name, meaning in USUAL.items():
            _row(f"--{flag(name)} FLOAT", meaning)


def _show_parts(command: Command, table: SettingsTable, roles: Sequence[str]) -> None:
    """Show all flags of the parts in some roles."""
    named = " ".join(f"--{role} {table.parts[role].name}" for role in roles if role in table.parts)
    print(f"usage: fedjaxsim {command.name} {named} [--flag VALUE ...]")
    seen = {*command.ignored}
    for role in dict.fromkeys((*(_OF_ALGORITHM if "algorithm" in roles else ()), *roles)):
        if role not in table.parts:
            continue
        part = table.parts[role]
        names = [record.name for record in part.all_records] + list(part.settings)
        groups = [setting.name for g in GROUPS.values() if g.role == role for setting in g.keys]
        every = dict.fromkeys((*names, *groups))
        read = [name for name in every if name in table.keys and name not in seen]
        seen.update(read)
        summary = (inspect.getdoc(part.factory) or "").partition("\n")[0]
        title = textwrap.fill(f"{role} {part.name}: {summary}", _width(), subsequent_indent="  ")
        _section(title, (table.keys[name] for name in read))
        steps = SYSTEMS[part.name].fixed_steps if part.name in SYSTEMS else ""
        if steps:
            print(textwrap.fill(f"Without a local optimizer or schedule: {steps}.", _width()))


def _section(title: str, settings: Iterable[Setting]) -> None:
    shown = [setting for setting in settings if setting.has_flag]
    if shown:
        print(f"\n{title}")
    for setting in shown:
        _row(f"--{flag(setting.name)} {_metavar(setting)}".rstrip(), _meaning(setting))


def _metavar(setting: Setting) -> str:
    if setting.hint is bool:
        return ""
    if setting.item is not None:
        return f"{_METAVARS.get(setting.item, 'NAME')},..."
    return f"{{{','.join(setting.values)}}}" if setting.values else _METAVARS[setting.hint]


def _meaning(setting: Setting) -> str:
    if setting.required:
        return f"{setting.help} (required)".strip()
    default, shown = setting.default, setting.shown
    if not shown and default not in (None, ()) and default is not False:
        shown = ",".join(map(_text, default if isinstance(default, tuple) else (default,)))
    return f"{setting.help} (default: {shown})" if shown else setting.help


def _text(value: Any) -> str:
    """Format a default as one types it, as 1e9."""
    return f"{value:g}".replace("e+0", "e") if isinstance(value, float) else str(value)


def _width() -> int:
    return max(60, min(shutil.get_terminal_size().columns, 100))


def _row(left: str, right: str) -> None:
    """Print two columns; a long left one has a line for itself."""
    lines = textwrap.wrap(right, _width() - _LEFT, break_on_hyphens=False) or [""]
    head = f"  {left}"
    if len(head) >= _LEFT:
        print(head)
    else:
        print(f"{head:<{_LEFT}}{lines.pop(0)}")
    for line in lines:
        print(" " * _LEFT + line)
