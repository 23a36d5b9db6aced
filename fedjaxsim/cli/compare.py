"""`fedjaxsim compare`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare finished runs, and settings over their seeds, in tables and in a figure."""

    runs: Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR")]]
    """Directories of the runs."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Figure of the runs: .png, .pdf or .svg."""
    draw: Annotated[tuple[str, ...], tyro.conf.arg(metavar="COLUMN")] = ()
    """Columns of metrics.jsonl in the figure, such as epsilon; by default the metric that judges
    the runs."""
    json: bool = False
    """Print JSON instead of a table."""

    def prepare(self) -> Callable[[], int]:
        """Read the runs; return a function that compares them."""
        from fedjaxsim.commands.compare import prepare_compare

        return prepare_compare(self.runs, self.out, self.draw, json=self.json)
