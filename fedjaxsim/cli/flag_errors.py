"""Errors of the parser in one line."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator

from fedjaxsim.commands.messages import one_line

_RULE = re.compile(r"\s*[-─]{3,}\s*")
_PARSING = re.compile(r"^Error parsing --(\S+): must")
"""The parser's prefix to an error of a rule."""
_PLACES = re.compile(
    r" or misplaced(?= options)| \(applied to [^)]*\)"
    r"| Arguments are applied to the directly preceding subcommand, so ordering can matter"
)
"""Remarks of the parser on the places of flags among commands."""
_HELP = 8
"""Columns by which the parser indents the help of an option that it names."""


@contextlib.contextmanager
def flags_refused_in_one_line() -> Iterator[None]:
    """Turn tyro's boxes about bad flags into an error of one line.

    Raises:
      ValueError: instead of `SystemExit` with a code other than 0.
    """
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
    except SystemExit as end:
        if end.code not in (0, None):
            raise ValueError(_summary(text.getvalue())) from None
        raise
    sys.stderr.write(text.getvalue())


def _summary(box: str) -> str:
    """Return the text of a box in one line, without the help of the options it names.

    Args:
      box: a title and sections between rules: the error, similar options, where to find help.
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
    said = _PARSING.sub(r"\1 must", _PLACES.sub("", said).removesuffix("."))
    for heading, *lines in others:
        if heading.startswith("Perhaps"):
            options = [line.split()[0] for line in lines if line.strip().startswith("--")]
            # An option of another command may have the very name.
            options = [option for option in dict.fromkeys(options) if option not in said.split()]
            said += f"; perhaps you meant {' or '.join(options)}" if options else ""
        elif heading.startswith("For full"):
            said += f"; see {one_line(' '.join([heading, *lines])).split(maxsplit=4)[4]}"
    return said
