"""Messages of the library in the words of the command line."""

import re
import sys

from fedjaxsim.runs.parts import ROLES, SETTINGS, flag, part_of
from fedjaxsim.runs.settings import Everything

_OF_CODE = re.compile(
    r"(?<![\w/.'\"=-])(?P<name>[a-z][a-z0-9]*(?:_[a-z0-9]+)+|[a-z]+(?=\(\)))(?P<call>\(\))?"
    r"(?![\w/'\"=(-]|[:.]\w)"
)
"""Names with underscores and calls, neither quoted nor in paths."""

_OF_PLANS = ("sampling_rate", "noise_multiplier", "max_participations")
"""Settings of parts that `fedjaxsim privacy` describes without loading them."""


def in_flags(text: str) -> str:
    """Replace the names of arguments, records and parts in a message by flags and their values."""
    if not _OF_CODE.search(text):
        return text
    names, functions = _spellings()

    def spelled(found: re.Match[str]) -> str:
        name = found["name"]
        return functions.get(name, found[0]) if found["call"] else names.get(name, name)

    return _OF_CODE.sub(spelled, text)


def _spellings() -> tuple[dict[str, str], dict[str, str]]:
    """Return the flags of arguments and records, and the flags of parts by their factories."""
    names = {name: name for name in Everything.__dataclass_fields__} | SETTINGS
    names |= {name: name for name in _OF_PLANS}
    functions: dict[str, str] = {}
    for role, known in ROLES.items():
        for name, path in known.known.items():
            module, _, factory = path.partition(":")
            functions[factory] = f"{role} {name}"
            if module in sys.modules:  # no other part has raised an error
                part = part_of(role, name)
                names |= {each: each for each in part.settings if each not in names}
                names |= {record.name: record.setting for record in part.all_records}
    return {name: flag(spelling) for name, spelling in names.items()}, functions
