"""The command line: one file per command, with its flags.

A command imports its work from `fedjaxsim.commands` when it runs, so help and refused flags are
instant.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedjaxsim.signals import end_on_signal

if TYPE_CHECKING:
    from fedjaxsim.cli.program import parse
    from fedjaxsim.cli.run import Run

__all__ = ["Run", "main", "parse"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `program.main`, which is imported here: a signal meanwhile ends in one line, too."""
    with end_on_signal():
        from fedjaxsim.cli import program
    return program.main(arguments)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedjaxsim.cli.program import parse
    from fedjaxsim.cli.run import Run

    return {"parse": parse, "Run": Run}[name]
