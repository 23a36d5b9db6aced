"""`fedjaxsim compare`."""

from collections.abc import Callable
from pathlib import Path


def compare(
    runs: tuple[Path, ...],
    *,
    out: Path | None = None,
    draw: tuple[str, ...] = (),
    json: bool = False,
) -> Callable[[], int]:
    """Compare finished runs, and settings over their seeds, in tables and in a figure.

    Args:
      runs: Directories of the runs.
      out: Figure of the runs: .png, .pdf or .svg.
      draw: Columns of metrics.jsonl in the figure, such as epsilon; by default the metric that
        judges the runs.
      json: Print JSON instead of a table.
    """
    from fedjaxsim.commands.compare import prepare_compare

    return prepare_compare(runs, out, draw, json=json)
