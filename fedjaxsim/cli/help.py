"""Help of the program and its commands, printed without importing JAX."""

import inspect
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fedjaxsim.cli.flags import Command, split
from fedjaxsim.factories import Setting, flag
from fedjaxsim.runs.parts import ROLES
from fedjaxsim.runs.settings import (
    DATA,
    GROUPS,
    IN_FILES_ONLY,
    RUN,
    Table,
    table_of,
)

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
        print(_row(command.name, command.summary))
    print("\nThe flags of a command: fedjaxsim COMMAND --help")


def show(command: Command, words: Sequence[str]) -> None:
    """Show the flags of a command; of one with settings, those of the parts that it names, if any.

    Args:
      command: the command.
      words: words after its name.
    """
    if command.takes_settings:
        flags, _ = split(words, {setting.name: setting for setting in (*DATA, *RUN)})
        roles = [role for role in ROLES if isinstance(flags.get(role), str)]
        if roles:
            _show_parts(command, table_of(flags), roles)
            return
    places = [
        name.upper() if each.required else f"[{name.upper()}]"
        for name, each in command.positionals.items()
    ]
    print(" ".join(["usage: fedjaxsim", command.name, *places, "[--flag VALUE ...]"]))
    print(f"\n{command.description}\n")
    for name, setting in command.positionals.items():
        print(_row(name.upper(), _meaning(setting)))
    _section("flags of the command", command.flags.values())
    if command.takes_settings:
        groups = {name: group.keys for name, group in GROUPS.items()}
        privacy = ("target", "guarantee", "noise_schedule", "spending", "examples")
        sections = {
            "data": (*DATA, *groups["rows"]),
            "parts and rounds": RUN,
            "a client's round": (*groups["minibatches"], *groups["schedule"]),
            "privacy": [each for name in privacy for each in groups[name]],
        }
        for title, keys in sections.items():
            _section(title, [each for each in keys if each.name not in command.without])
        if "algorithm" not in command.without:
            _show_usual(command.name)


def _show_parts(command: Command, table: Table, roles: Sequence[str]) -> None:
    """Show all flags of the parts in some roles."""
    named = " ".join(f"--{role} {table.parts[role].name}" for role in roles if role in table.parts)
    print(f"usage: fedjaxsim {command.name} {named} [--flag VALUE ...]")
    shown = dict.fromkeys((*(_OF_ALGORITHM if "algorithm" in roles else ()), *roles))
    seen: set[str] = set()
    for role in shown:
        if role not in table.parts:
            continue
        part = table.parts[role]
        names = [record.name for record in part.all_records] + list(part.settings)
        groups = [
            setting.name
            for group in GROUPS.values()
            if group.role == role
            for setting in group.keys
        ]
        every = dict.fromkeys((*names, *groups))
        left_out = seen | command.without
        read = [name for name in every if name in table.keys and name not in left_out]
        seen.update(read)
        summary = (inspect.getdoc(part.factory) or "").partition("\n")[0]
        title = textwrap.fill(f"{role} {part.name}: {summary}", _width(), subsequent_indent="  ")
        _section(title, [table.keys[name] for name in read])


def _show_usual(command: str) -> None:
    """Show the flags that most systems read, and where those of all parts are."""
    print(f"\nflags of most parts; all of them: fedjaxsim {command} --algorithm NAME --help")
    print("(and --model, --mechanism, --sampling, --data or --partition NAME)")
    for name, meaning in USUAL.items():
        print(_row(f"--{flag(name)} FLOAT", meaning))


def _section(title: str, settings: Any) -> None:
    for place, setting in enumerate(settings):
        if not place:
            print(f"\n{title}")
        if setting.name in IN_FILES_ONLY:
            continue
        metavar = _metavar(setting)
        print(_row(f"--{flag(setting.name)} {metavar}".rstrip(), _meaning(setting)))


def _metavar(setting: Setting) -> str:
    if setting.hint is bool:
        return ""
    if setting.item is not None:
        return f"{_METAVARS.get(setting.item, 'NAME')},..."
    return f"{{{','.join(setting.values)}}}" if setting.values else _METAVARS[setting.hint]


def _meaning(setting: Setting) -> str:
    default = setting.shown
    if not default and not (
        setting.default in (None, ()) or setting.default is False or setting.required
    ):
        default = _text(setting.default)
    required = "(required)" if setting.required else ""
    return f"{setting.help} {f'(default: {default})' if default else required}".strip()


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _width() -> int:
    return max(60, min(shutil.get_terminal_size().columns, 100))


def _row(left: str, right: str, indent: str = "  ") -> str:
    """Return two columns; a long left one has a line for itself."""
    lines = textwrap.wrap(right, _width() - _LEFT, break_on_hyphens=False) or [""]
    head = f"{indent}{left}"
    first = [f"{head:<{_LEFT}}{lines.pop(0)}"] if len(head) < _LEFT else [head]
    return "\n".join([*first, *(" " * _LEFT + line for line in lines)])
