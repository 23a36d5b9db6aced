"""Tables of inputs that must be refused, and of the words in which they are.

A whole command refuses in five layers: words are parsed, settings contradict each other, data are
read, a simulation is made, files are written. `tests/commands/test_run.py` has one command of each.
Everything else is such a table where its layer decides, and takes no command.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from fedjaxsim.cli.messages import in_flags
from fedjaxsim.cli.program import parse


def check_refusals(refuses: Callable[[Any], object], table: Mapping[Any, str]) -> None:
    """Check that a function refuses each input with words that the table's pattern matches."""
    for given, words in table.items():
        try:
            refuses(given)
        except (ValueError, OSError) as error:
            said = in_flags(error)
        else:
            said = "nothing was refused"
        assert re.search(words, said), f"{given}: {said}"


def parsed(command: str) -> object:
    """Parse a command line, which imports no JAX and reads no data."""
    return parse(command.split())
