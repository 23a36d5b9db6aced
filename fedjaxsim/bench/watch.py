"""Watching measurements on the terminal."""

from collections.abc import Mapping
from typing import Any

from fedjaxsim.report.progress import COUNT, Bar, number


class BenchProgress(Bar):
    """A bar on a terminal; elsewhere one plain line per process.

    Args:
      processes: how many there will be.
    """

    def __init__(self, processes: int):
        super().__init__("bench", processes, before=(COUNT,))
        self._processes, self._done = processes, 0

    def start(self, workload: str) -> None:
        """A process begins."""
        self.show(words=workload)

    def skip(self) -> None:
        """A process is left out, or has failed."""
        self._done += 1
        self.show(completed=self._done)

    def update(self, workload: str, numbers: Mapping[str, Any]) -> None:
        """Shows what a process gave."""
        self._done += 1
        words = f"{workload}  {number(numbers['rounds_per_second'])} rounds/s"
        self.show(completed=self._done)
        if self._bar is not None:
            self._bar.console.print(words)
        else:
            print(f"{self._done}/{self._processes}  {words}", flush=True)
