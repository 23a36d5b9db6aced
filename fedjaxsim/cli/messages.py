"""One-line messages of a command, its exit codes, and outputs that can no longer be written."""

import contextlib
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from fedjaxsim.extras import MissingExtraError
from fedjaxsim.factories import flag
from fedjaxsim.runs.parts import ROLES, SETTINGS, own_line, part_of
from fedjaxsim.runs.settings import static_keys
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
_OF_CODE = re.compile(
    r"(?<![\w/.'\"=-])(?P<name>[a-z][a-z0-9]*(?:_[a-z0-9]+)+|[a-z]+(?=\(\)))(?P<call>\(\))?"
    r"(?![\w/'\"=(-]|[:.]\w)"
)
"""Names with underscores and calls, neither quoted nor in paths."""

_OF_PLANS = ("sampling_rate", "noise_multiplier")
"""Settings of parts that `fedjaxsim privacy` describes without loading them."""
_FILTERING = "JAX_TRACEBACK_FILTERING"
"""JAX's variable; `off` shows every frame of a traceback, for JAX and for this program."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether numpy, Python or XLA failed to allocate."""
    exhausted = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    return exhausted or isinstance(error, MemoryError)


def is_expected(error: BaseException) -> bool:
    """Return whether an error needs no traceback: of files, memory, or a user's own code."""
    known = isinstance(error, StorageError) or is_out_of_memory(error)
    return known or own_line(error) is not None


def refuse(error: Exception) -> int:
    """Print an error in one line and return the exit code: of a failed write, or of bad input.

    The line names the place of an error in a user's own code; the traceback follows if JAX's
    variable asks for it.
    """
    said, line, kind, end = one_line(error), own_line(error), type(error).__name__, ""
    if line is None:
        said = in_flags(said)
    if is_out_of_memory(error):
        found = _ALLOCATION.search(said)
        said = f"out of memory{'' if found is None else f' at {found[0]}'}; {_SMALLER}"
    if line is not None:
        said = f"your code fails at {line}: {kind}{said and f': {said}'}"
    elif error.__cause__ is not None and (line := own_line(error.__cause__)) and line not in said:
        end = f" (at {line})"
    whole = line is not None and os.environ.get(_FILTERING) == "off"
    if line is not None and not whole:
        end += f"; {_FILTERING}=off shows the whole traceback"
    said = textwrap.shorten(said, _MOST, placeholder=" …") or kind
    say(f"error: {said.removesuffix('.') if end else said}{end}")
    if whole:
        traceback.print_exception(error)
    return UNWRITABLE if isinstance(error, StorageError) else 2


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
    names = {name: name for name in static_keys()} | SETTINGS
    names |= {name: name for name in _OF_PLANS}
    functions: dict[str, str] = {}
    for role, known in ROLES.items():
        for name, path in known.known.items():
            module, _, factory = path.partition(":")
            functions[factory] = f"{role} {name}"
            if module in sys.modules:  # no other part has raised an error
                part = part_of(role, name)
                names |= {each: each for each in part.settings if each not in names}
                names |= {record.name: record.name for record in part.all_records}
    return {name: flag(spelling) for name, spelling in names.items()}, functions


def say(text: str) -> None:
    """Print a line on stderr under the program's name."""
    print(f"fedjaxsim: {text}", file=sys.stderr)


def one_line(text: object) -> str:
    """Return a message without line breaks, and with the beginning of what is too long."""
    return " ".join(_TOO_LONG.sub(r"\1…", str(text)).split())


class _Output:
    """A stream that drops everything after a failed write, which it reports once."""

    def __init__(self, stream: TextIO, report: Callable[[OSError], None]):
        self._stream, self._report, self._lost = stream, report, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._lost:
            return
        try:
            action()
        except OSError as error:
            self._lost = True
            # What the stream still buffers goes there at the exit of Python, which would complain.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._report(error)


@contextlib.contextmanager
def outputs_that_may_end(raised: type[OSError] | None) -> Iterator[list[OSError]]:
    """Go on without standard output or error when they are closed, full or without a reader.

    Yields the error of standard output, once there is one; it is raised if it is a `raised`.
    """
    for number in range(3):  # a file opened later must not take the number of a closed stream
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    lost: list[OSError] = []

    def report(error: OSError) -> None:
        lost.append(error)
        if raised is not None and isinstance(error, raised):
            raise error
        say(f"warning: standard output is lost ({error.strerror}); the command goes on without it")

    streams = sys.stdout, sys.stderr
    out, err = (open(os.devnull, "w") if each is None else each for each in streams)  # noqa: SIM115
    guarded: list[Any] = [_Output(out, report), _Output(err, lambda _: None)]
    sys.stdout, sys.stderr = guarded
    try:
        yield lost
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = streams
