"""The default figures of a sweep, chosen by its keys."""

import itertools
from collections.abc import Sequence

from fedjaxsim.extras import importing
from fedjaxsim.report.envelopes import default_metric, envelope, last
from fedjaxsim.report.figures import envelope_figure, heat_figure, trade_off_figure
from fedjaxsim.report.labels import NOISE, algorithm_title, data_name, key_label
from fedjaxsim.report.progress import number
from fedjaxsim.runs.sweep_runs import SweepRuns

with importing("plots"):
    from matplotlib.figure import Figure
with importing("tables"):
    import pandas as pd
    import pyarrow as pa

_MOST_PANELS = 10
_MOST_MAPS = 20
_MOST_LINES = 12
_FIRST_LINES = ("algorithm", "personalization", "lam")


def default_figures(sweep: SweepRuns, results: pa.Table) -> dict[str, Figure]:
    """Draw the figures that suit the keys of a sweep.

    Panels are levels of noise or, without any, of a key that is no hyperparameter. Lines are the
    other keys, algorithms and levels of personalization first, as long as they are at most twelve;
    the best is taken over the rest.

    Returns:
      By file name: `envelopes.png`; `trade_off.png` where runs differ in ε; `heat.png` where two
      numbers are swept besides it, or one with it, in at most twenty panels: one for each
      algorithm and level of noise.
    """
    metric = default_metric(results, sweep.columns)
    counts = {key: len(results[key].unique()) for key in sweep.columns if key != "seed"}
    varied = [key for key in counts if counts[key] > 1]
    noise = [key for key in varied if key in NOISE and key not in sweep.best_over]
    rest = [key for key in varied if key not in noise]
    # Without noise: the first key that all runs set, that needs a program of its own and over which
    # no best is taken.
    static = (
        key for key in rest
        if key not in (*sweep.hyperparameters, "algorithm", *sweep.best_over)
        and counts[key] <= _MOST_PANELS and not results[key].null_count
    )  # fmt: skip
    panels = noise or list(itertools.islice(static, 1))
    lines = _line_keys(sweep, results, [key for key in rest if key not in panels])

    def best(keys: Sequence[str]) -> pd.DataFrame:
        return envelope(results, sweep.columns, [key for key in counts if key not in keys], metric)

    def title(keys: Sequence[str]) -> str:
        over = ", ".join(key_label(key) for key in varied if key not in keys)
        seeds = len(results["seed"].unique()) if "seed" in sweep.columns else 1
        several = f"mean of {seeds} seeds" if seeds > 1 else ""
        parts = [_subject(sweep), _delta(results), over and f"best over {over}", several]
        return "; ".join(filter(None, parts))

    keys = [*panels, *lines]
    over_lines = best(panels) if lines else None
    figures = {
        "envelopes.png": envelope_figure(
            best(keys), panels=panels, lines=lines, title=title(keys), best=over_lines
        )
    }
    family = [key for key in lines if key not in NOISE]
    if noise and len(last(best(noise))["epsilon"].unique()) > 1:
        keys = [*noise, *family]
        figures["trade_off.png"] = trade_off_figure(
            last(best(keys)), noise=noise, family=family, title=title(keys)
        )
    numbers = [key for key in rest if not pa.types.is_string(results[key].type)]
    numbers.sort(key=lambda key: key not in sweep.best_over)
    one_each = len(noise) == len(numbers) == 1
    apart = [key for key in ("algorithm",) if key in varied and key not in sweep.best_over]
    for x, y in itertools.combinations([*noise, *numbers] if one_each else numbers, 2):
        small = [key for key in (*apart, *panels) if key not in (x, y)]
        if len(results.select([x, y]).drop_null()):  # some run sets both
            if _combinations(results, small) <= _MOST_MAPS:
                keys = [*small, x, y]
                figures["heat.png"] = heat_figure(
                    last(best(keys)), x=x, y=y, panels=small, title=title(keys)
                )
            break
    return figures


def _line_keys(sweep: SweepRuns, results: pa.Table, keys: Sequence[str]) -> list[str]:
    """Return the first keys with at most `_MOST_LINES` combinations, at least one of them."""
    order = (*_FIRST_LINES, *keys)
    kept = sorted((key for key in keys if key not in sweep.best_over), key=order.index)
    kept = kept or list(keys[:1])
    while len(kept) > 1 and _combinations(results, kept) > _MOST_LINES:
        kept.pop()
    return kept


def _combinations(results: pa.Table, keys: Sequence[str]) -> int:
    return len(results.group_by(list(keys), use_threads=False).aggregate([])) if keys else 1


def _delta(results: pa.Table) -> str:
    """Return the δ of all runs, if they spend a finite ε and agree."""
    spent, deltas = results["epsilon"].drop_null(), results["delta"].unique().to_pylist()
    agree = len(deltas) == 1 and any(each.as_py() > 0 for each in spent.unique())
    return f"δ = {number(deltas[0])}" if agree else ""


def _subject(sweep: SweepRuns) -> str:
    """Name the algorithms and data of a sweep, without files or folders."""
    titles = dict.fromkeys(algorithm_title(run.algorithm) for run in sweep.runs)
    data = dict.fromkeys(data_name(run.data) for run in sweep.runs)
    return f"{', '.join(titles)} on {', '.join(data)}"
