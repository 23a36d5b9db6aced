"""The command line: one file per command, with its flags.

A command imports its work from `fedjaxsim.commands` when it runs, so help and refused flags are
instant.
"""

from fedjaxsim.cli.program import main, parse
from fedjaxsim.cli.run import Run

__all__ = ["Run", "main", "parse"]
