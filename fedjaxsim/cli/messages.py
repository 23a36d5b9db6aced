"""One-line messages of a command, and its exit codes."""

import os
import re
import sys
import textwrap
import traceback

from fedjaxsim.checks import Spelled
from fedjaxsim.extras import MissingExtraError
from fedjaxsim.factories import flag
from fedjaxsim.runs.parts import SETTINGS, user_code_location
from fedjaxsim.store import StorageError

REFUSED = (ValueError, OSError, OverflowError, MemoryError, MissingExtraError)
"""Errors of bad input: values, unreadable files, numbers or sizes too large, missing extras."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
UNWRITABLE = 4
"""Exit code where a file cannot be written."""

_ALLOCATION = re.compile(
    r"[\d.,]+ ?([KMGTP]i?)?B(ytes)?\b( for an array with shape \([\d, ]*\))?", re.I
)
_SMALLER = (
    "smaller --chunk-size, --batch-size, models or data need less: fedjaxsim plan with the same "
    "settings shows where"
)
_MOST = 400
"""The most characters of an error."""
_TOO_LONG = re.compile(r"(\S{100})\S{200,}")
_FILTERING = "JAX_TRACEBACK_FILTERING"
"""JAX's variable; `off` shows every frame of a traceback, for JAX and for this program."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether numpy, Python or XLA failed to allocate."""
    exhausted = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    return exhausted or isinstance(error, MemoryError)


def is_expected(error: BaseException) -> bool:
    """Return whether an error needs no traceback: of files, memory, or a user's own code."""
    lacks_resources = isinstance(error, StorageError) or is_out_of_memory(error)
    return lacks_resources or user_code_location(error) is not None


def refuse(error: Exception) -> int:
    """Print an error in one line and return the exit code: of a failed write, or of bad input.

    The line names the place of an error in a user's own code; the traceback follows if JAX's
    variable asks for it.
    """
    line, kind, end = user_code_location(error), type(error).__name__, ""
    sentence = one_line(in_flags(error) if line is None else error)
    if is_out_of_memory(error):
        size = _ALLOCATION.search(sentence)
        sentence = f"out of memory{'' if size is None else f' at {size[0]}'}; {_SMALLER}"
    if kind == "TracerBoolConversionError":
        sentence = "`if` or `while` asks for a value that compiled code alone knows: use jnp.where"
    if line is not None:
        sentence = f"your code fails at {line}: {kind}{sentence and f': {sentence}'}"
    elif (
        error.__cause__ is not None
        and (line := user_code_location(error.__cause__))
        and line not in sentence
    ):
        end = f" (at {line})"
    shows_all = line is not None and os.environ.get(_FILTERING) == "off"
    if line is not None and not shows_all:
        end += f"; {_FILTERING}=off shows the whole traceback"
    sentence = textwrap.shorten(sentence, _MOST, placeholder=" …") or kind
    say(f"error: {sentence.removesuffix('.') if end else sentence}{end}")
    if shows_all:
        traceback.print_exception(error)
    return UNWRITABLE if isinstance(error, StorageError) else 2


def in_flags(message: object) -> str:
    """Return a message or an error's, with the names of settings as on the command line."""
    return message.spelled(spelled_as_flag) if isinstance(message, Spelled) else str(message)


def spelled_as_flag(name: str) -> str:
    """Return the flag, or the part as a flag names it, of a name in Python."""
    name, _, value = name.removesuffix("()").partition("=")
    spelled = flag(SETTINGS.get(name, name))
    word = value.strip('"')
    return f"--{spelled} {word}" if word else spelled


def say(text: str) -> None:
    """Print a line on stderr under the program's name."""
    print(f"fedjaxsim: {text}", file=sys.stderr)


def one_line(text: object) -> str:
    """Return a message without line breaks, and with the beginning of what is too long."""
    return " ".join(_TOO_LONG.sub(r"\1…", str(text)).split())
