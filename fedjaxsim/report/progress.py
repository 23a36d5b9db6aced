"""Watching a run on the terminal."""

import functools
import logging
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import rich.box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedjaxsim.extras import missing
from fedjaxsim.metrics import METRICS, SAMPLED, in_tables

if TYPE_CHECKING:
    from fedjaxsim.privacy.guarantee import Report

COMPILING = "compiling …"
SLOW = 1.0
"""Seconds from which on a step is slow."""
_LOG = logging.getLogger("fedjaxsim")


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


def epsilon_text(value: float | None) -> str:
    """Format ε, rounded up; None, no guarantee, is ∞."""
    return "∞" if value is None else f"{math.ceil(value * 1000) / 1000:.3f}"


def in_words(record: Mapping[str, Any], rounds_per_second: float | None) -> str:
    """Describe an evaluation, as in `loss 0.52  accuracy 0.81  ε ≤ 1.9  40 rounds/s`."""
    shown = [("train_loss", METRICS["loss"]), *in_tables()]
    parts = [f"{metric.title} {number(record[key])}" for key, metric in shown if key in record]
    spent = record["epsilon"]
    if record.get(SAMPLED):
        parts.append(f"of {record[SAMPLED]:,} sampled clients")
    parts.append(f"ε {'' if spent is None else '≤ '}{epsilon_text(spent)}")
    if record.get("nonfinite"):
        parts.append(f"{record['nonfinite']} messages not finite")
    if rounds_per_second is not None:
        parts.append(f"{number(rounds_per_second)} rounds/s")
    return "  ".join(parts)


def print_guarantee(report: "Report", file: Path | None, *, explain: bool) -> None:
    """Print the guarantee of a run in one line that names the file of the rest, or all of it."""
    print(report if explain else f"privacy: {report.short()}; in full: {file or '--explain'}")


def can_draw() -> bool:
    """Return whether pictures can be drawn; if not, print a warning."""
    why = missing("plots")
    if why is not None:
        print(f"fedjaxsim: warning: no pictures will be drawn: {why}", file=sys.stderr)
    return why is None


def print_rows(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    *,
    left: int = 1,
    padding: Any = (0, 1, 0, 0),
) -> None:
    """Print a table, at full width where there is no terminal.

    The first `left` columns are flush left.
    """
    looks: dict[str, Any] = {"title_justify": "left", "box": rich.box.SIMPLE_HEAD}
    table = Table(title=title, show_edge=False, padding=padding, **looks)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    Console(width=None if console.is_terminal else 200).print(table)


@contextmanager
def doing(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Say on a terminal what a block does while it does it; elsewhere in a line if it is slow."""
    console, said = Console(stderr=True, quiet=quiet), f"{text} …"
    if console.is_terminal:
        with console.status(said):
            yield
        return
    line = functools.partial(console.print, soft_wrap=True, highlight=False, markup=False)
    timer = threading.Timer(SLOW, line, [said])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class Bar:
    """A bar on a terminal; elsewhere lines; if quiet, nothing.

    Both announce compilation. Lines go to the logger "fedjaxsim" if it has a handler and its
    level is INFO.
    """

    def __init__(self, title: str, total: int, *, quiet: bool = False):
        self._title, self._said_compiling, self._quiet = title, False, quiet
        console = Console(stderr=True)
        self._bar: Any = None
        self._task: Any = None
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=12),
                TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[words]}"),
                console=console,
            )
            self._task = self._bar.add_task(title, total=total, words="starting")

    def __enter__(self) -> Self:
        """Start the bar."""
        import jax  # tables of finished runs need none

        jax.monitoring.register_event_duration_secs_listener(self._listen)
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is."""
        import jax

        jax.monitoring.unregister_event_duration_listener(self._listen)
        if self._bar is not None:
            self._bar.stop()

    def show(self, otherwise: str | None = None, **changes: Any) -> None:
        """Change `completed` or `words`; without a bar, log or print the line `otherwise`."""
        self._said_compiling = False
        if self._bar is not None:
            self._bar.update(self._task, **changes)
        elif otherwise is not None and _LOG.hasHandlers() and _LOG.isEnabledFor(logging.INFO):
            _LOG.info(otherwise)
        elif otherwise is not None and not self._quiet:
            print(otherwise, flush=True)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Announce a compilation when its first part is traced."""
        del duration_secs, kwargs
        if event.startswith("/jax/core/compile/") and not self._said_compiling:
            self.show(f"{self._title}  {COMPILING}", words=COMPILING)
            self._said_compiling = True
