"""Watching a sweep on the terminal."""

from collections.abc import Sequence

import numpy as np

from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import Bar, number

_SHOWN = (
    ("test_excess_risk", "least excess risk", np.nanmin),
    ("test_accuracy", "best accuracy", np.nanmax),
    ("test_nmse", "least nMSE", np.nanmin),
)


class SweepProgress(Bar):
    """A bar on a terminal; elsewhere, or when quiet, one plain line per evaluation.

    Args:
      runs: of the sweep.
      finished: how many of them are done already.
      quiet: no bar even on a terminal.
    """

    def __init__(self, runs: int, finished: int, *, quiet: bool = False):
        super().__init__("sweep", runs, quiet=quiet)
        self._runs, self._finished = runs, finished
        self._chunk, self._rounds = 0, 1

    def start(self, runs: int, rounds: int) -> None:
        """A chunk of runs begins, or goes on."""
        self._chunk, self._rounds = runs, rounds

    def update(self, rows: Sequence[Record], rounds_per_second: float | None) -> None:
        """Shows one evaluation of the chunk.

        Args:
          rows: one record per run.
          rounds_per_second: of the chunk, None while unknown.
        """
        round_ = rows[0]["round"]
        finished = self._finished + self._chunk * round_ / self._rounds
        first, last = self._finished + 1, self._finished + self._chunk
        words = [f"runs {first}–{last} of {self._runs}, round {round_}/{self._rounds}"]
        for key, label, best in _SHOWN:
            values = [row[key] for row in rows if key in row and np.isfinite(row[key])]
            if values:
                words.append(f"{label} {number(float(best(values)))}")
        if rounds_per_second is not None:
            words.append(f"{number(self._chunk * rounds_per_second)} run-rounds/s")
        if not self.show(completed=finished, words="  ".join(words)):
            print("  ".join(words), flush=True)
        if round_ == self._rounds:
            self._finished += self._chunk
