"""One-line messages of a command, and its exit codes."""

import os
import sys
import traceback

from fedjaxsim.extras import MissingExtraError
from fedjaxsim.runs.user_code import own_line
from fedjaxsim.store import StorageError

REFUSED = (ValueError, OSError, OverflowError, MemoryError, MissingExtraError)
"""Errors of bad input: values, unreadable files, numbers or sizes too large, missing extras."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
UNWRITABLE = 4
"""Exit code where a file cannot be written."""

_FILTERING = "JAX_TRACEBACK_FILTERING"
"""JAX's variable; `off` shows every frame of a traceback, for JAX and for this program."""


def refuse(error: Exception) -> int:
    """Print an error in one line and return the exit code: of a failed write, or of bad input.

    The line names the place of an error in a user's own code; the traceback follows if JAX's
    variable asks for it.
    """
    said, line, kind = one_line(error), own_line(error), type(error).__name__
    if line is not None:
        said = f"your code fails at {line}: {kind}{said and f': {said}'}"
    elif error.__cause__ is not None and (line := own_line(error.__cause__)) and line not in said:
        said += f" (at {line})"
    whole = os.environ.get(_FILTERING) == "off"
    if line is not None and not whole:
        said = f"{said.removesuffix('.')}; {_FILTERING}=off shows the whole traceback"
    say(f"error: {said or kind}")
    if line is not None and whole:
        traceback.print_exception(error)
    return UNWRITABLE if isinstance(error, StorageError) else 2


def say(text: str) -> None:
    """Print a line on stderr under the program's name."""
    print(f"fedjaxsim: {text}", file=sys.stderr)


def one_line(text: object) -> str:
    """Return a message without line breaks."""
    return " ".join(str(text).split())
