"""Help of the program and its commands, printed without importing JAX."""

import ast
import functools
import importlib.util
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjaxsim.cli.flags import Command, split
from fedjaxsim.factories import Setting, flag
from fedjaxsim.runs.parts import ROLES, SETTINGS
from fedjaxsim.runs.settings import (
    DATA,
    GROUPS,
    IN_FILES_ONLY,
    RESULTS,
    RUN,
    Table,
    table_of,
)

_LEFT = 26
"""Columns of flags."""
_METAVARS = {int: "INT", float: "FLOAT", str: "NAME", Path: "PATH"}
_OF_ALGORITHM = ("algorithm", "mechanism", "sampling")
"""The roles that help for an algorithm shows: it sends, so they are its own, too."""


def show_commands(group: str, commands: Sequence[Command]) -> None:
    """Show the commands of the program, or of a group of them."""
    print(f"usage: fedjaxsim {group and group + ' '}COMMAND [--flag VALUE ...]\n")
    print("Private, personalized federated learning, simulated. See also --version.\n")
    for command in commands:
        print(_row(command.name, command.summary))
    print("\nThe flags of a command: fedjaxsim COMMAND --help")


def show(command: Command, words: Sequence[str]) -> None:
    """Show the flags of a command; of one with settings, those of the parts that it names, if any.

    Args:
      command: the command.
      words: words after its name.

    Raises:
      ValueError: for an unknown part.
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
        only_data = command.name == "data"
        _section("data", (*DATA, *groups["rows"]))
        if not only_data:
            _section("parts and rounds", RUN)
            _section("a client's round", (*groups["minibatches"], *groups["schedule"]))
            privacy = ("target", "guarantee", "budget", "spending", "examples")
            _section("privacy", [each for name in privacy for each in groups[name]])
            _section("results", RESULTS)
        _show_all_parts(command.name, ("data", "partition") if only_data else tuple(ROLES))


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
        read = [name for name in every if name in table.keys and name not in seen]
        seen.update(read)
        summary = (inspect.getdoc(part.factory) or "").partition("\n")[0]
        title = textwrap.fill(f"{role} {part.name}: {summary}", _width(), subsequent_indent="  ")
        _section(title, [table.keys[name] for name in read])


def _show_all_parts(command: str, roles: Sequence[str]) -> None:
    """Show the names of the flags of all parts."""
    print(f"\nflags of parts (what they mean: fedjaxsim {command} --algorithm NAME --help)")
    for role in roles:
        declared = {name: declared_flags(role, name) for name in ROLES[role].known}
        common = [
            name
            for name in next(iter(declared.values()))
            if 2 * sum(name in flags for flags in declared.values()) > len(declared)
        ]
        if common:
            print(_row(f"most {role}s", _flags(common), "  "))
        for name, flags in declared.items():
            if own := [each for each in flags if each not in common]:
                print(_row(f"{role} {name}", _flags(own)))


def _flags(names: Sequence[str]) -> str:
    return " ".join(f"--{flag(name)}" for name in names)


def _section(title: str, settings: Any) -> None:
    print(f"\n{title}")
    for setting in settings:
        if setting.name in IN_FILES_ONLY:
            continue
        metavar = _metavar(setting)
        print(_row(f"--{flag(setting.name)} {metavar}".rstrip(), _meaning(setting)))


def _metavar(setting: Setting) -> str:
    if setting.hint is bool:
        return ""
    if setting.item is not None:
        one = _METAVARS[setting.item]
        return f"{one},..."
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


# --- what the parts declare, read from their source -----------------------------------------------


def declared_flags(role: str, name: str) -> list[str]:
    """Return the settings and hyperparameters of a part, read from its source without importing it.

    The decorator of its factory names the records of its hyperparameters, and its arguments are its
    settings.
    """
    path, _, function = ROLES[role].known[name].partition(":")
    found, module = _find(path, function)
    if isinstance(found, ast.Call):  # a function that another one makes
        made, module = _find(module, ast.unparse(found.func))
        assert made is not None
        inner = [each for each in ast.walk(made) if isinstance(each, ast.FunctionDef)]
        found = inner[-1]
    assert isinstance(found, ast.FunctionDef)
    flags = [record for each in found.decorator_list for record in _records(each, module)]
    every = [*found.args.args, *found.args.kwonlyargs]
    for argument in every:
        hint = ast.unparse(argument.annotation) if argument.annotation is not None else ""
        if argument.arg not in ROLES[role].supplied and "ArrayLike" not in hint:
            flags.append(SETTINGS.get(argument.arg, argument.arg))
    return list(dict.fromkeys(flags))


@functools.cache
def _names_in(module: str) -> Mapping[str, ast.AST]:
    """Return the functions, constants and imports of a module, by name."""
    spec = _spec(module)
    found: dict[str, ast.AST] = {}
    for node in ast.parse(Path(spec).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
    return found


def _spec(module: str) -> str:
    """Return the file of a module of the package, without importing it."""
    root = Path(importlib.util.find_spec("fedjaxsim").origin).parent  # type: ignore
    path = root.joinpath(*module.split(".")[1:])
    return str(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def _find(module: str, name: str) -> tuple[ast.AST | None, str]:
    """Return the definition of a name that a module has or imports, and where it is defined."""
    node = _names_in(module).get(name)
    if isinstance(node, ast.ImportFrom):
        origin = node.module or ""
        if not origin.startswith("fedjaxsim"):
            return None, module
        real = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        if Path(_spec(f"{origin}.{real}")).exists():  # a module, whose attributes are asked for
            return None, f"{origin}.{real}"
        return _find(origin, real)
    return node, module


def _records(node: ast.AST, module: str) -> Iterator[str]:
    """Yield the settings of all `Hyperparameter` records that code names."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Hyperparameter"):
        words = {each.arg: each.value for each in node.keywords}
        yield ast.literal_eval(words.get("flag", node.args[0]))
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        _, origin = _find(module, node.value.id)
        if origin != module:
            yield from _records(ast.Name(node.attr), origin)
        return
    if isinstance(node, ast.Name):
        found, origin = _find(module, node.id)
        if found is not None and node.id not in ("reads", "Hyperparameter"):
            yield from _records(found, origin)
        return
    for child in ast.iter_child_nodes(node):
        yield from _records(child, module)
