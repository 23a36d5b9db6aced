"""The command line: one file per command, with its flags.

What does the work is imported when a command runs, so that help and refused flags are instant.
"""

from fedjaxsim.cli.program import main, parse
from fedjaxsim.cli.run import Run

__all__ = ["Run", "main", "parse"]
