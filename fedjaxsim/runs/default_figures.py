"""The default figures of a sweep, chosen by its keys."""

from collections.abc import Sequence

from fedjaxsim.extras import importing
from fedjaxsim.report.figures import envelope_figure, trade_off_figure
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import NOISE, algorithm_title, data_name, key_label
from fedjaxsim.report.progress import number
from fedjaxsim.report.results import Run, envelope, grouped, last
from fedjaxsim.runs.sweep_runs import SweepRuns

with importing("plots"):
    from matplotlib.figure import Figure

_MOST_LINES = 12
_FIRST_LINES = ("algorithm", "personalization", "lam")


def default_figures(sweep: SweepRuns, runs: Sequence[Run], metric: str) -> dict[str, Figure]:
    """Draw the figures that suit the keys of a sweep.

    Panels are levels of noise. Lines are the other keys, algorithms and levels of personalization
    first, as long as they are at most twelve; the best is taken over the rest.

    Returns:
      By file name: `envelopes.png`; `trade_off.png` where runs differ in ε.
    """
    keys = [key for key in sweep.columns if key != "seed"]
    values = {key: {run.settings[key] for run in runs} for key in keys}
    varied = [key for key in keys if len(values[key]) > 1]
    noise = [key for key in varied if key in NOISE and key not in sweep.best_over]
    rest = [key for key in varied if key not in noise]
    lines = _line_keys(sweep, runs, rest)

    def best(kept: Sequence[str]) -> list[Record]:
        return envelope(runs, keys, [key for key in keys if key not in kept], metric)

    def title(kept: Sequence[str]) -> str:
        is_choice = any(row["runs"] > row["seeds"] for row in best(kept))
        over = ", ".join(key_label(key) for key in varied if is_choice and key not in kept)
        seeds = len({run.seed for run in runs})
        several = f"mean of {seeds} seeds" if seeds > 1 else ""
        parts = [_subject(sweep), _delta(runs), over and f"best over {over}", several]
        return "; ".join(filter(None, parts))

    shown = [*noise, *lines]
    figures = {
        "envelopes.png": envelope_figure(
            _in_every_panel(best(shown), noise), panels=noise, lines=lines, title=title(shown),
        )
    }  # fmt: skip
    family = [key for key in lines if key not in NOISE]
    if noise and len({row["epsilon"] for row in last(best(noise), noise)}) > 1:
        shown = [*noise, *family]
        figures["trade_off.png"] = trade_off_figure(
            last(best(shown), shown), noise=noise, family=family, title=title(shown),
        )  # fmt: skip
    return figures


def _in_every_panel(rows: Sequence[Record], panels: Sequence[str]) -> list[Record]:
    """Copy what sets no panel and releases nothing to all panels: it fits every ε."""
    places = [place for place, _ in grouped(rows, panels) if any(v is not None for v in place)]
    fitting = [
        row for row in rows
        if places and row["epsilon"] == 0 and all(row[key] is None for key in panels)
    ]  # fmt: skip
    copies = [row | dict(zip(panels, place, strict=True)) for place in places for row in fitting]
    return [*(row for row in rows if row not in fitting), *copies]


def _line_keys(sweep: SweepRuns, runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Return the first keys with at most `_MOST_LINES` combinations, at least one of them."""
    order = (*_FIRST_LINES, *keys)
    kept = sorted((key for key in keys if key not in sweep.best_over), key=order.index)
    kept = kept or list(keys[:1])
    while len(kept) > 1 and _combinations(runs, kept) > _MOST_LINES:
        kept.pop()
    return kept


def _combinations(runs: Sequence[Run], keys: Sequence[str]) -> int:
    return len(list(grouped([run.settings for run in runs], keys)))


def _delta(runs: Sequence[Run]) -> str:
    """Return the δ of all runs, if they spend a finite ε and agree."""
    deltas = {run.rows[-1]["delta"] for run in runs}
    spent = any(run.rows[-1]["epsilon"] for run in runs)
    return f"δ = {number(deltas.pop())}" if len(deltas) == 1 and spent else ""


def _subject(sweep: SweepRuns) -> str:
    """Name the algorithms and data of a sweep, without files or folders."""
    titles = dict.fromkeys(algorithm_title(run.algorithm) for run in sweep.runs)
    data = dict.fromkeys(data_name(run.data) for run in sweep.runs)
    return f"{', '.join(titles)} on {', '.join(data)}"
