"""What is wrong with a command, or with a user's own code that it calls, in one line."""

import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator

from fedjaxsim.extras import MissingExtraError
from fedjaxsim.runs.user_code_lines import own_line

REFUSED = (ValueError, OSError, OverflowError, MemoryError, MissingExtraError)
"""Errors of bad input: values, files that cannot be read, numbers or sizes too large, and a
library that is not installed."""

_WHOLE = "JAX_TRACEBACK_FILTERING"
"""JAX's variable: `off` shows all frames of a traceback, there and here."""
_RULE = re.compile(r"\s*[-─]{3,}\s*")
_PARSING = re.compile(r"^Error parsing --(\S+): must")
"""How the parser begins what a rule says about a flag."""
_HELP = 8
"""Columns by which the parser indents the help of an option that it names."""


def refuse(error: Exception) -> int:
    """Says what is wrong, and gives the exit code of bad input.

    Of an error in a user's own code the line says where; all of the traceback follows if JAX's
    variable for that is `off`.
    """
    said, line, kind = one_line(error), own_line(error), type(error).__name__
    if line is not None:
        said = f"your code fails at {line}: {kind}{said and f': {said}'}"
    elif error.__cause__ is not None and (line := own_line(error.__cause__)) and line not in said:
        said += f" (at {line})"
    whole = os.environ.get(_WHOLE) == "off"
    if line is not None and not whole:
        said = f"{said.removesuffix('.')}; {_WHOLE}=off shows the whole traceback"
    print(f"fedjaxsim: error: {said or kind}", file=sys.stderr)
    if line is not None and whole:
        traceback.print_exception(error)
    return 2


@contextlib.contextmanager
def flags_refused_in_one_line() -> Iterator[None]:
    """Turns what tyro shows about flags that it refuses into an error with one line.

    Raises:
      ValueError: instead of `SystemExit` with a code other than 0.
    """
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
    except SystemExit as end:
        if end.code not in (0, None):
            raise ValueError(summary(text.getvalue())) from None
        raise
    sys.stderr.write(text.getvalue())


def summary(box: str) -> str:
    """One line that says what the parser's box says, without the help of the options it names.

    Args:
      box: a title and sections between rules: what is wrong, which options come close, where help
        is.
    """
    sections: list[list[str]] = [[]]
    for line in box.splitlines()[1:]:
        bare = line.strip("│╭╮╰╯").rstrip()
        if _RULE.fullmatch(bare):
            sections.append([])
        elif bare.strip():
            sections[-1].append(bare)
    sections = [section for section in sections if section]
    if not sections:
        return one_line(box)
    left = min(len(line) - len(line.lstrip()) for section in sections for line in section)
    first, *others = ([line[left:] for line in section] for section in sections)
    said = one_line(" ".join(line for line in first if not line.startswith(" " * _HELP)))
    said = _PARSING.sub(r"\1 must", said.removesuffix("."))
    for heading, *lines in others:
        if heading.startswith("Perhaps"):
            options = [line.split()[0] for line in lines if line.strip().startswith("--")]
            said += f"; perhaps you meant {' or '.join(dict.fromkeys(options))}"
        elif heading.startswith("For full"):
            said += f"; see {one_line(' '.join([heading, *lines])).split(maxsplit=4)[4]}"
    return said


def one_line(text: object) -> str:
    """A message without line breaks."""
    return " ".join(str(text).split())
