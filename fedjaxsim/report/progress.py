"""Watching a run on the terminal."""

import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedjaxsim.metrics import METRICS, SAMPLED, MetricRecords, table_metrics
from fedjaxsim.privacy.entries import epsilon_text

COMPILING = "compiling …"
SLOW = 1.0
"""Seconds from which on a step is slow."""


def number(value: float | None) -> str:
    """Format a number with four significant digits; None is a dash."""
    return "–" if value is None else f"{value:.4g}"


def decimals(value: float | None, places: int = 3) -> str:
    """Format a number with `places` decimals, or four digits if it is 1000 or more."""
    large = value is not None and not abs(value) < 1000
    return number(value) if value is None or large else f"{value:.{places}f}"


def bytes_text(count: float | None) -> str:
    """Format a number of bytes, in powers of 1000."""
    if count is None:
        return "–"
    power = min(5, int(math.log10(count) // 3)) if count >= 1 else 0
    return f"{number(count / 1000**power)} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def in_words(
    record: Mapping[str, Any],
    rounds_per_second: float | None,
    metrics: MetricRecords = METRICS,
    *,
    quick_bound: bool = False,
) -> str:
    """Describe an evaluation, as in `loss 0.52  accuracy 0.81  ε ≤ 1.9  40 rounds/s`.

    With `quick_bound`, ε is said to be one.
    """
    shown = [(key, metric.title) for key, metric in table_metrics(metrics)]
    shown = [("train_loss", "loss"), *shown]
    parts = [f"{title} {number(record[key])}" for key, title in shown if key in record]
    spent = record["epsilon"]
    if record.get(SAMPLED):
        parts.append(f"of {record[SAMPLED]:,} sampled clients")
    parts.append(f"ε {'' if spent is None else '≤ '}{epsilon_text(spent)}")
    if spent is not None and record.get("epsilon_spent") is not None:
        parts[-1] += f" (budget; {epsilon_text(record['epsilon_spent'])} spent)"
    elif quick_bound:
        parts[-1] += " (quick bound; tight at the end)"
    if record.get("nonfinite"):
        parts.append(f"{record['nonfinite']} messages not finite")
    if rounds_per_second is not None:
        parts.append(f"{number(rounds_per_second)} rounds/s")
    return "  ".join(parts)


@contextmanager
def doing(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Say on a terminal what a block does while it does it; elsewhere in a line if it is slow.

    Yields a function that says how far it is, elsewhere at most every half minute.
    """
    if quiet:
        yield lambda _: None
        return
    console, message = Console(stderr=True), f"{text} …"
    if console.is_terminal:
        with console.status(message) as status:
            yield lambda how_far: status.update(f"{text}: {how_far} …")
        return
    line = functools.partial(console.print, soft_wrap=True, highlight=False, markup=False)
    timer = threading.Timer(SLOW, line, [message])
    timer.daemon = True
    timer.start()
    last = time.monotonic()

    def update(how_far: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 30 * SLOW:
            last = time.monotonic()
            line(f"{text}: {how_far} …")

    try:
        yield update
    finally:
        timer.cancel()
        timer.join()


class Bar:
    """A bar on a terminal, on stderr; elsewhere a line for each step; if quiet, nothing.

    With `only_last`, lines are at least half a minute apart, except for the last one.
    """

    def __init__(self, title: str, total: int, *, quiet: bool = False, only_last: bool = False):
        console = Console(stderr=True)
        self._lines = not (console.is_terminal or quiet)
        self._pause, self._said = 30 * SLOW if only_last else 0.0, time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[words]}"),
            console=console,
        )
        self._title, self._total, self._draws = title, total, console.is_terminal and not quiet
        self._task = self._bar.add_task(title, total=total, words=COMPILING)

    def __enter__(self) -> Self:
        """Start the bar."""
        if self._draws:
            self._bar.start()
        elif self._lines and not self._pause:
            print(f"{self._title}  {COMPILING}", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is."""
        if self._draws:
            self._bar.stop()

    def show(self, completed: int, words: str) -> None:
        """Show how much of the total is done, and words about it."""
        self._bar.update(self._task, completed=completed, words=words)
        due = completed == self._total or time.monotonic() - self._said >= self._pause
        if self._lines and words and due:
            self._said = time.monotonic()
            print(f"{self._title}  {completed}/{self._total}  {words}", file=sys.stderr, flush=True)
