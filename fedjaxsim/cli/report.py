"""`fedjaxsim report`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class Report:
    """Write one HTML file about a run, a sweep, a tuning, or several runs side by side."""

    directories: Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR")]]
    """Directory of a run, sweep or tuning, or directories of several runs."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE.html", help_behavior_hint="(default: report.html in DIR)"),
    ] = None
    """File to write; needed for several runs."""

    def prepare(self) -> Callable[[], int]:
        """Read everything; return a function that writes the file."""
        from fedjaxsim.commands.report import prepare_report

        return prepare_report(self.directories, self.out)
