"""Flags of a command, composed of those of every run and those of the parts that it names."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Suppress

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.cli.read_numbers import REGISTRY
from fedjaxsim.cli.shared_flags import Machines
from fedjaxsim.runs.fields import ExampleSettings
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
_ALONE = {"help", "overwrite", "quiet", "streamed", "trust_own_code", "explain", "cluster", "json"}
"""Flags without a value, after which a file may follow."""
_HELP = ("--help", "-h")
_OF_RELEASES = ("sampling", "schedule", "passes")
"""Settings that a stage without a release, such as fine-tuning, does not inherit."""
_NO_PREFIX = tyro.conf.arg(name="")
"""Mark of fields whose flags get no prefix."""


def split(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split a command line into flags with their texts and files, before its flags are known.

    Args:
      arguments: words after the name of the command.
    """
    flags: dict[str, Any] = {}
    files: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            files.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            flags[name] = value
        elif name.startswith("no_"):
            flags[name.removeprefix("no_")] = False
        elif name in _ALONE or not words or words[0].startswith("--") or _is_file(words[0]):
            flags[name] = True
        else:
            flags[name] = words.pop(0)
    return flags, files


def _is_file(word: str) -> bool:
    return word.endswith(".toml")


def wants_help(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for help."""
    return any(word in _HELP for word in arguments)


def show_help(command: str, kind: type, arguments: Sequence[str]) -> None:
    """Show the flags of the parts and groups that a command line names, if it names any.

    Args:
      command: name of the command.
      kind: type of the command.
      arguments: words after its name.

    Raises:
      SystemExit: after they are shown.
      ValueError: for an unknown part.
    """
    flags, _ = split([word for word in arguments if word not in _HELP])
    groups = [group for group in _groups(kind).values() if _names(group) & flags.keys()]
    roles = [role for role in ROLES if isinstance(flags.get(role), str)]
    if not roles and not groups:
        return
    made = config_type(flags)
    named = [made.parts[role] for role in roles if role in made.parts]
    # An algorithm sends, so its flags are those of its mechanism and its sampling, too.
    sending = ("mechanism", "sampling") if "algorithm" in roles else ()
    read = [*named, *(made.parts[role] for role in sending if role not in roles)]
    settings = {
        name
        for part in read
        for name in (*part.settings, *(record.setting for record in part.records(flags)))
    }
    texts = [inspect.getdoc(each) or "" for each in (*(part.factory for part in named), *groups)]
    if "algorithm" in roles and issubclass(made, ExampleSettings):
        groups.append(ExampleSettings)
    fields = [field for field in dataclasses.fields(made) if field.name in settings]
    fields += [field for group in groups for field in dataclasses.fields(group)]
    shown = dataclasses.make_dataclass(
        "Part",
        [(f.name, f.type, dataclasses.field(default=f.default)) for f in fields],
        bases=tuple(groups),
        frozen=True,
        kw_only=True,
    )
    tyro.cli(
        shown,
        prog=" ".join(["fedjaxsim", command, *(f"--{part.role} {part.name}" for part in named)]),
        description=" ".join(text.partition("\n")[0] for text in texts),
        args=["--help"],
        registry=REGISTRY,
        config=OPTIONS,
    )


def _groups(kind: type) -> dict[str, type]:
    """Return the types of a command's groups of flags beside its settings, by field."""
    return {
        field.name: type(field.default)
        for field in dataclasses.fields(kind)
        if dataclasses.is_dataclass(field.default)
    }


def _names(group: type) -> set[str]:
    return {field.name for field in dataclasses.fields(group)}


def flags_of(kind: type) -> set[str]:
    """Return the field names of a command's flags beside its settings."""
    fields = {field.name.rstrip("_") for field in dataclasses.fields(kind)}
    groups = _groups(kind)
    return fields.difference(groups).union({"help"}, *map(_names, groups.values()))


def defaults_of(
    arguments: Sequence[str], own_flags: set[str], notes: list[str] | None
) -> tuple[type, Any]:
    """Compose the settings of a run from its command line and the files that it names.

    Args:
      arguments: words after the name of the command.
      own_flags: field names of the command's flags beside the settings.
      notes: list to which notes for the user are added.

    Returns:
      The type of the settings, and the defaults of its flags.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: for an unknown part or setting, or a flag that the run does not read.
    """
    flags, files = split(arguments)
    path, earlier = next(map(Path, files), None), flags.get("from")
    inherited = read_raw(Path(earlier) / "config.toml") if isinstance(earlier, str) else {}
    file = {} if path is None else read_raw(path)
    system = SYSTEMS.get(str((inherited | file | flags).get("algorithm")))
    if system is not None and not system.sends:
        inherited = {name: inherited[name] for name in inherited if name not in _OF_RELEASES}
    raw = displaced(inherited, file) | file
    raw = {name: value for name, value in raw.items() if name not in excluded(flags)}
    given = raw | flags
    for role in ("algorithm", "model", "mechanism", "sampling"):
        if isinstance(given.get(role), str) and is_own(given[role]):
            _machines(flags).start()
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
    return made, made(**_required(made) | values)


def _unread(name: str, given: Mapping[str, Any], path: Path | None) -> list[str]:
    try:
        return unread([name], given)
    except ValueError as error:
        raise ValueError(str(error) if path is None else f"{path}: {error}") from error


def _is_setting(name: str, given: Mapping[str, Any]) -> bool:
    """Return whether a part of any run has a setting `name`."""
    try:
        unread([name], given)
    except ValueError:
        return False
    return True


def require_no_settings(arguments: Sequence[str], own_flags: set[str]) -> None:
    """Check that flags of `resume` are its own; raise a ValueError for the setting of a run."""
    for name in split(arguments)[0]:
        if name not in own_flags and _is_setting(name, {}):
            raise ValueError(
                f"{flag(name)} is a setting of the run, which resume keeps: run --from DIR goes on "
                "with another"
            )


def _machines(flags: Mapping[str, Any]) -> Machines:
    """Return the machines that flags name, before all flags are checked."""
    numbers = {
        name: int(flags[name])
        for name in ("processes", "process")
        if str(flags.get(name)).isdecimal()
    }
    texts = {name: str(flags[name]) for name in ("devices", "coordinator") if name in flags}
    given: dict[str, Any] = texts | numbers
    return Machines(**given, cluster=bool(flags.get("cluster")))


def with_settings(kind: type, settings: type, default: Any, *, brief: bool = False) -> Any:
    """Return the type of a command with composed settings, and its default.

    Args:
      kind: type of the command; its field `settings` is replaced.
      settings: type of the composed settings.
      default: default of the settings.
      brief: whether help shows only the first flag of each group.
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
    """Return a group of flags with only the first shown in help."""
    hidden = [
        (field.name, Suppress[field.type], dataclasses.field(default=field.default))
        for field in dataclasses.fields(group)[1:]
    ]
    made = dataclasses.make_dataclass(group.__name__, hidden, bases=(group,), frozen=True)
    made.__doc__ = group.__doc__
    return made


def data_defaults(arguments: Sequence[str], own_flags: set[str]) -> tuple[type, Any]:
    """Compose the settings of data from a command line, and their defaults."""
    flags, _ = split(arguments)
    made = data_type(flags)
    known = {field.name for field in dataclasses.fields(made)}
    given = {"data": flags.get("data"), "client": flags.get("client")}
    given |= {"partition": flags.get("partition")}
    for name in flags:
        if name not in known and name not in own_flags and _is_setting(name, given):
            reasons = unread([name], given)
            raise ValueError(reasons[0] if reasons else f"{flag(name)} has no effect on data")
    return made, made(**_required(made))


def _required(made: type) -> dict[str, Any]:
    """Return the fields without default, as ones that flags must give."""
    fields = dataclasses.fields(made)
    return {each.name: tyro.MISSING for each in fields if each.default is dataclasses.MISSING}
