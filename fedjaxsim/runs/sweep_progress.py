"""Watching a sweep on the terminal."""

from collections.abc import Sequence

import numpy as np

from fedjaxsim.metrics import in_tables
from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import Bar, number


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
        for key, metric in in_tables():
            values = [row[key] for row in rows if key in row and np.isfinite(row[key])]
            if values and metric.larger_is_better:
                words.append(f"best {metric.title} {number(max(values))}")
            elif values:
                words.append(f"least {metric.title} {number(min(values))}")
        if rounds_per_second is not None:
            words.append(f"{number(self._chunk * rounds_per_second)} run-rounds/s")
        self.show("  ".join(words), completed=finished, words="  ".join(words))
        if round_ == self._rounds:
            self._finished += self._chunk
