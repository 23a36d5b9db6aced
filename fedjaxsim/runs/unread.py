"""Settings that no part of a run reads: the reason in words, and the parts that do read them."""

import difflib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.runs.fields import groups_of
from fedjaxsim.runs.parts import ROLES, Part, flag, part_of

_SHOWN = 6
"""Names that fit into a message."""


def reasons_unread(
    names: Iterable[str],
    known: Collection[str],
    parts: Mapping[str, Part],
    given: Mapping[str, Any],
    others: Iterable[str] = (),
) -> Iterator[str]:
    """Yield the reasons for which settings have no effect on a run.

    Args:
      names: names of the settings.
      known: names of the settings that the run reads.
      parts: parts of the run, by role.
      given: settings of the run.
      others: further names that an unknown one may be meant for.

    Raises:
      ValueError: for a name that no part of any run has, with the nearest one.
    """
    for name in names:
        if name in known:
            continue
        readers = _readers()
        if name not in readers:
            raise ValueError(_unknown(name, [*known, *readers, *others]))
        # A role that the run lacks says the most, else the one with most parts that read it.
        role, choices = max(
            readers[name].items(), key=lambda item: (item[0] not in parts, len(item[1]))
        )
        if role not in parts:
            without = f"without {role} {' or '.join(choices)}"
            where = "on data with clients of their own" if role == "partition" else without
            yield f"{flag(name)} has no effect {where}"
            continue
        key, chosen = role, parts[role].name
        if chosen == "no-release":
            sender = parts["algorithm"].name
            silent = sender in SYSTEMS and not SYSTEMS[sender].sends
            nothing = f"algorithm {sender} sends" if silent else f"{role} {chosen} releases"
            yield f"{flag(name)} has no effect, as {nothing} nothing: leave it out"
            continue
        if chosen in choices:
            key, chosen, choices = _condition(parts[role], name, given)
        yield f"{flag(name)} has no effect with {key} {chosen}, only with {_listed(choices)}"


def _listed(choices: list[str]) -> str:
    more = len(choices) - _SHOWN
    return " or ".join(choices if more < 2 else [*choices[:_SHOWN], f"{more} others"])


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(flag(name), list(dict.fromkeys(map(flag, known))), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown setting {flag(name)!r}{hint}"


def _condition(part: Part, name: str, given: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """Return the setting of a part, its value, and the values with which the part reads `name`."""
    from fedjaxsim.hyperparameters import declared_by

    for setting in part.settings.values():
        values = [
            value
            for value in setting.values
            if name in {r.setting for r in declared_by(part.factory, **{setting.name: value})}
        ]
        if values and len(values) < len(setting.values):
            chosen = given.get(setting.name, setting.default)
            return flag(setting.name), str(chosen), list(map(str, values))
    return part.role, part.name, [part.name]


@functools.cache
def _readers() -> dict[str, dict[str, list[str]]]:
    """Return the parts of the package that read each setting, by role."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in (part_of(role, name) for role, known in ROLES.items() for name in known.known):
        records = part.all_records
        groups = groups_of(part, {record.name for record in records}, part.event_kind({}))
        grouped = [name for group in groups for name in group.__dataclass_fields__]
        for name in dict.fromkeys([*part.settings, *(r.setting for r in records), *grouped]):
            found.setdefault(name, {}).setdefault(part.role, []).append(part.name)
    return found
