"""Watching a sweep on the terminal."""

from collections.abc import Sequence
from typing import Self

from fedjaxsim.callbacks import Progress, describe_best
from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import Bar


class SweepProgress(Progress):
    """One bar for all chunks of runs; elsewhere, or when quiet, a plain line per evaluation.

    Args:
      runs: runs of the sweep.
      finished: runs of it that are done.
      quiet: no bar even on a terminal.
    """

    def __init__(self, runs: int, finished: int, *, quiet: bool = False):
        super().__init__("sweep", quiet=quiet)
        self._bar = Bar("sweep", runs, quiet=quiet)
        self._runs, self._finished = runs, finished

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is."""
        self._bar.__exit__()

    def open(self) -> None:
        """Go on with the bar of the chunk before."""

    def show(self, records: Sequence[Record], speed: float | None) -> None:
        """Show one evaluation of the chunk."""
        round_, chunk = records[0]["round"], len(records)
        first, last = self._finished + 1, self._finished + chunk
        words = f"runs {first}–{last} of {self._runs}, round {round_}/{self.run.rounds}"
        words += f"  {describe_best(records, speed)}"
        finished = self._finished + chunk * round_ / self.run.rounds
        self._bar.show(words, completed=finished, words=words)
        if round_ == self.run.rounds:
            self._finished += chunk
