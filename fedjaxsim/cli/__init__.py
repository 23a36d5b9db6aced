"""The command line: one file per command, a function whose arguments are its flags.

A command imports its work when it runs, so help and refused flags are instant.
"""

from collections.abc import Sequence

from fedjaxsim.signals import end_on_signal

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `program.main`, which is imported here: a signal meanwhile ends in one line, too."""
    with end_on_signal():
        from fedjaxsim.cli import program
    return program.main(arguments)
