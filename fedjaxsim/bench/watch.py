"""Watching measurements on the terminal."""

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedjaxsim.progress import number


class BenchProgress:
    """A bar on a terminal; elsewhere one plain line per process.

    Args:
      processes: how many there will be.
    """

    def __init__(self, processes: int):
        self._processes, self._done = processes, 0
        console = Console(stderr=True)
        self._bar = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=12),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[words]}"),
                console=console,
            )
            self._task = self._bar.add_task("bench", total=processes, words="starting")

    def __enter__(self) -> Self:
        """Starts the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()

    def start(self, workload: str) -> None:
        """A process begins."""
        if self._bar is not None:
            self._bar.update(self._task, words=workload)

    def skip(self) -> None:
        """A process is left out, or has failed."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def update(self, workload: str, numbers: Mapping[str, Any]) -> None:
        """Shows what a process gave."""
        self._done += 1
        words = f"{workload}  {number(numbers['rounds_per_second'])} rounds/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            self._bar.console.print(words)
        else:
            print(f"{self._done}/{self._processes}  {words}", flush=True)
