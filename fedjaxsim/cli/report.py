"""`fedjaxsim report`."""

from collections.abc import Callable
from pathlib import Path


def report(directories: tuple[Path, ...], *, out: Path | None = None) -> Callable[[], int]:
    """Write one HTML file about a run, a sweep, a tuning, or several runs side by side.

    Args:
      directories: Directory of a run, sweep or tuning, or directories of several runs.
      out: File to write, FILE.html; needed for several runs, by default report.html in DIR.
    """
    from fedjaxsim.commands.report import prepare_report

    return prepare_report(directories, out)
