"""`fedjaxsim compare`: finished runs side by side."""

import sys
from pathlib import Path

from fedjaxsim.cli.flags import Json, Work
from fedjaxsim.runs.output import FigureAxis


def compare(
    runs: tuple[Path, ...],
    *,
    metric: str | None = None,
    all_runs: bool = False,
    figure: FigureAxis,
    out: Path | None = None,
    json: Json = False,
) -> Work:
    """Compare finished runs, and settings over their seeds, in tables and in a figure.

    Args:
      runs: Directories of runs or sweeps, or of several runs, as `run --seeds` makes them.
      metric: Metric by which they are compared, such as f1; by default the one that judges them.
      all_runs: Take all runs of a sweep, not only those with the best learning rates, or with the
        best values of its `best_over`.
      out: Figure of the runs (.png, .pdf or .svg), their tables for LaTeX (.tex), their summaries
        (.csv), or a page of all (.html), with pictures, clients, guarantees and settings.
    """
    from fedjaxsim import store
    from fedjaxsim.cli.printing import print_comparison, print_json
    from fedjaxsim.report.progress import doing
    from fedjaxsim.runs.comparison import check_out
    from fedjaxsim.runs.comparison import compare as read

    axis = figure.axis
    if axis.over != "rounds" and (out is None or out.suffix in (".tex", ".csv")):
        raise ValueError(
            f"over {axis.over} is an axis of a figure: give --out FILE.png or FILE.html"
        )
    if out is not None:
        check_out(out)
    with doing("reading the runs", quiet=json):
        comparison, written = read(runs, metric, all_runs=all_runs), b""
        _ = comparison.means, comparison.sentences, comparison.drawn_twice
        if out is not None:
            written = comparison.content(out, axis)

    def work() -> None:
        if json:
            shown = [run.row | {"assumed": run.guarantee["assumed"]} for run in comparison.runs]
            print_json({"runs": shown, "systems": comparison.means})
            if comparison.drawn_twice:
                print(comparison.drawn_twice, file=sys.stderr)
        else:
            print_comparison(comparison)
        if out is not None:
            store.write(out, written)
            print(f"written to {out}", file=sys.stderr if json else sys.stdout)

    return work
