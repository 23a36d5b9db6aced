"""The flags of a command: those of every run, and those of the parts that it names."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Suppress

from fedjaxsim.cli.read_numbers import REGISTRY
from fedjaxsim.cli.start import Machines, start_jax
from fedjaxsim.runs.parts import ROLES
from fedjaxsim.runs.settings import (
    config_type,
    data_type,
    fields_of,
    flag,
    require_read,
    unread,
)
from fedjaxsim.runs.settings_files import displaced, excluded, read_raw, typed
from fedjaxsim.runs.user_code import is_own

OPTIONS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
_ALONE = {"help", "overwrite", "quiet", "streamed", "explain", "cluster", "json"}
"""Flags without a value, which may stand before the name of a file."""
_HELP = ("--help", "-h")
_NO_PREFIX = tyro.conf.arg(name="")
"""For fields whose flags stand among those of the command."""


def scan(arguments: Sequence[str]) -> dict[str, Any]:
    """Read flags and their values as typed, before it is known which flags there are.

    Args:
      arguments: after the name of the command.
    """
    found: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name.startswith("no_") and not equals:
            found[name.removeprefix("no_")] = False
        elif equals:
            found[name] = value
        elif name in _ALONE or not words or words[0].startswith("--") or _is_file(words[0]):
            found[name] = True
        else:
            found[name] = words.pop(0)
    return found


def files_of(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line that are neither flags nor their values: its files."""
    words, found = list(arguments), []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            found.append(word)
            continue
        name = word[2:].replace("-", "_")
        alone = "=" in word or name in _ALONE or name.startswith("no_")
        if not alone and words and not words[0].startswith("--") and not _is_file(words[0]):
            words.pop(0)
    return found


def _is_file(word: str) -> bool:
    return word.endswith(".toml")


def wants_help(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for help."""
    return any(word in _HELP for word in arguments)


def show_help(command: str, kind: type, arguments: Sequence[str]) -> None:
    """Show the flags of the parts and groups that a command line names, if it names any.

    Args:
      command: its name.
      kind: of the command.
      arguments: after its name.

    Raises:
      SystemExit: once they are shown.
      ValueError: for an unknown part.
    """
    flags = scan([word for word in arguments if word not in _HELP])
    groups = [group for group in _groups(kind).values() if _names(group) & flags.keys()]
    roles = [role for role in ROLES if isinstance(flags.get(role), str)]
    if not roles and not groups:
        return
    made = config_type(flags)
    named = [made.parts[role] for role in roles if role in made.parts]
    settings = {
        name
        for part in named
        for name in (*part.settings, *(record.setting for record in part.records(flags)))
    }
    fields = [field for field in dataclasses.fields(made) if field.name in settings]
    fields += [field for group in groups for field in dataclasses.fields(group)]
    shown = dataclasses.make_dataclass(
        "Part",
        [(f.name, f.type, dataclasses.field(default=f.default)) for f in fields],
        bases=tuple(groups),
        frozen=True,
        kw_only=True,
    )
    texts = [inspect.getdoc(each) or "" for each in (*(part.factory for part in named), *groups)]
    tyro.cli(
        shown,
        prog=" ".join(["fedjaxsim", command, *(f"--{part.role} {part.name}" for part in named)]),
        description=" ".join(text.partition("\n")[0] for text in texts),
        args=["--help"],
        registry=REGISTRY,
        config=OPTIONS,
    )


def _groups(kind: type) -> dict[str, type]:
    """Return the groups of flags of a command beside its settings, by field."""
    return {
        field.name: type(field.default)
        for field in dataclasses.fields(kind)
        if dataclasses.is_dataclass(field.default)
    }


def _names(group: type) -> set[str]:
    return {field.name for field in dataclasses.fields(group)}


def defaults_of(
    arguments: Sequence[str], own_flags: set[str], notes: list[str] | None
) -> tuple[type, Any]:
    """Compose the settings of a run from its command line and the files that it names.

    Args:
      arguments: after the name of the command.
      own_flags: field names of the command's flags beside the settings.
      notes: where notes for the user go.

    Returns:
      The type of the settings, and the defaults of its flags.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a part or a setting that there is not, or that the run does not read.
    """
    flags = scan(arguments)
    path, earlier = next(map(Path, files_of(arguments)), None), flags.get("from")
    inherited = read_raw(Path(earlier) / "config.toml") if isinstance(earlier, str) else {}
    file = {} if path is None else read_raw(path)
    raw = displaced(inherited, file) | file
    raw = {name: value for name, value in raw.items() if name not in excluded(flags)}
    given = raw | flags
    for role in ("algorithm", "model", "mechanism", "sampling"):
        if isinstance(given.get(role), str) and is_own(given[role]):
            start_jax(_machines(flags))
    made = config_type(given)
    known = fields_of(given)
    readers = [name for name in flags if name not in known and name not in own_flags]
    require_read([name for name in readers if _is_setting(name, given)], given)
    origin = inherited if path is None else file
    left = [
        reason
        for name in raw
        if name not in known and name in origin
        for reason in _unread(name, given, path)
    ]
    if notes is not None and left and path is not None:
        notes.append(f"{path}: {'; '.join(left)}")
    values = typed(raw, given, path or Path(str(earlier)) / "config.toml")
    for field in dataclasses.fields(made):
        if field.default is dataclasses.MISSING:
            values.setdefault(field.name, tyro.MISSING)
    return made, made(**values)


def _unread(name: str, given: Mapping[str, Any], path: Path | None) -> list[str]:
    try:
        return unread([name], given)
    except ValueError as error:
        raise ValueError(str(error) if path is None else f"{path}: {error}") from error


def _is_setting(name: str, given: Mapping[str, Any]) -> bool:
    """Return whether some part of some run has a setting of that name."""
    try:
        unread([name], given)
    except ValueError:
        return False
    return True


def _machines(flags: Mapping[str, Any]) -> Machines:
    """The machines that flags name, before all of them are checked."""
    numbers = {
        name: int(flags[name])
        for name in ("processes", "process")
        if str(flags.get(name)).isdecimal()
    }
    texts = {name: str(flags[name]) for name in ("devices", "coordinator") if name in flags}
    given: dict[str, Any] = texts | numbers
    return Machines(**given, cluster=bool(flags.get("cluster")))


def with_settings(kind: type, settings: type, default: Any, *, brief: bool = False) -> Any:
    """Return a command whose settings are of a composed type, and its default.

    Args:
      kind: of the command; its field `settings` is replaced.
      settings: the composed type.
      default: of the settings.
      brief: whether help shows only the first flag of each of the command's groups.
    """
    fields: list[Any] = [("settings", Annotated[settings, _NO_PREFIX])]
    for name, group in _groups(kind).items() if brief else ():
        first = _first_of(group)
        fields.append((name, Annotated[first, _NO_PREFIX], dataclasses.field(default=first())))
    made = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True)
    others = (inspect.getdoc(settings) or "").partition("\n\n")[2] if brief else ""
    made.__doc__ = f"{inspect.getdoc(kind)}\n{others}"
    needed = {"what": tyro.MISSING} if kind.__name__ == "Data" else {}
    return made, made(settings=default, **needed)


def _first_of(group: type) -> Any:
    """Return flags of which help shows only the first."""
    hidden = [
        (field.name, Suppress[field.type], dataclasses.field(default=field.default))
        for field in dataclasses.fields(group)[1:]
    ]
    made = dataclasses.make_dataclass(group.__name__, hidden, bases=(group,), frozen=True)
    made.__doc__ = group.__doc__
    return made


def data_defaults(arguments: Sequence[str], own_flags: set[str]) -> tuple[type, Any]:
    """Compose the settings of data from a command line; as `defaults_of`."""
    flags = scan(arguments)
    made = data_type(flags)
    known = {field.name for field in dataclasses.fields(made)}
    given = {"data": flags.get("data"), "client": flags.get("client")}
    given |= {"partition": flags.get("partition")}
    others = [name for name in flags if name not in known and name not in own_flags]
    for name in (name for name in others if _is_setting(name, given)):
        reasons = unread([name], given)
        if reasons:
            raise ValueError(reasons[0])
        raise ValueError(f"{flag(name)} has no effect on data")
    missing = {
        field.name: tyro.MISSING
        for field in dataclasses.fields(made)
        if field.default is dataclasses.MISSING
    }
    return made, made(**missing)
