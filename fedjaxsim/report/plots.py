"""Figures of runs and of guarantees, in one style: colour-blind-safe, labelled, small.

Figures are made without pyplot, so that nothing global is touched and no display is needed.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim import metrics, store
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.extras import importing
from fedjaxsim.report.seeds import SeedGroup, mean_records

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Records = Sequence[Mapping[str, Any]]
"""The evaluations of a run, in the order of rounds."""

# Okabe and Ito's palette (2008), without its yellow, which is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", "dashed", "dashdot", "dotted")
DPI = 150
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "figure.labelsize": "medium",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.columnspacing": 1.2,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.6,
}


def picture(title: str, width: float, height: float) -> Figure:
    """Make an empty figure with constrained layout; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=10, wrap=True)
    return figure


def line(
    axes: Axes,
    x: Any,
    y: Any,
    band: Sequence[Any] | None = None,
    *,
    band_label: str | None = None,
    **style: Any,
) -> None:
    """Draw a line, or a dot for a single point, before its band (low, high)."""
    axes.plot(x, y, **{"marker": "o" if len(x) == 1 else None, "ms": 4, **style})
    if band is not None:
        axes.fill_between(x, *band, color=style["color"], alpha=0.15, lw=0, label=band_label)


def legend_above(axes: Axes, *handles: Line2D, ncols: int = 2) -> None:
    """Add a legend above the axes, where it hides no data; by default of all labels."""
    given = {"handles": handles} if handles else {}
    axes.legend(ncols=ncols, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, **given)


def check_path(path: Path) -> None:
    """Check that `path` is a .png file in a folder that exists; raise ValueError if not."""
    if path.suffix != ".png":
        raise ValueError(f"a figure must be written to a .png file, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"the folder of a figure must exist, got {path}")


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG to a path that `check_path` accepts."""
    check_path(path)
    store.write(path, png(figure))


def png(figure: Figure) -> bytes:
    """Return a figure as the content of a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


# --- runs -----------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """One run or system in a figure.

    Attributes:
      label: name in the legend.
      records: evaluations; `METRIC_low` and `METRIC_high`, where present, bound a band.
      style: arguments of `Axes.plot`, `color` among them.
    """

    label: str
    records: Records
    style: dict[str, Any]


def colour_of(algorithm: str) -> int:
    """Return the index of a system's colour, the same in every figure."""
    names = list(SYSTEMS)
    return names.index(algorithm) if algorithm in names else len(names)


def of_systems(found: Sequence[SeedGroup]) -> list[Curve]:
    """Return a curve per system, the mean over its seeds, in the colour of its algorithm.

    Dashes distinguish systems of one colour. Each line is thinner than the one below, which stays
    visible.
    """
    metric = quality_key(next(iter(found[0].runs.values())).records)
    widths = np.linspace(3.2, 1.2, len(found)) if len(found) > 1 else [1.6]
    known: list[int] = []
    curves = []
    for system, width in zip(found, widths, strict=True):
        dashes, colour = divmod(colour_of(system.algorithm), len(COLOURS))
        style = {
            "color": COLOURS[colour],
            "ls": DASHES[(dashes + known.count(colour)) % len(DASHES)],
            "lw": width,
        }
        known.append(colour)
        curves.append(Curve(system.label, mean_records(system, metric), style))
    return curves


def quality_key(records: Records) -> str:
    """Return the metric by which a run is judged."""
    return metrics.judged_by(key for record in records for key in record) or "test_loss"


@mpl.rc_context(STYLE)
def run_figure(records: Records, title: str) -> Figure:
    """Draw loss, quality with its 10–90 percentile band over clients, and ε of one run."""
    quality = quality_key(records)
    figure = picture(title, 9.6, 3.2)
    loss, middle, privacy = figure.subplots(1, 3, sharex=True)
    for colour, key in zip(COLOURS, ("train_loss", "test_loss"), strict=False):
        line(loss, *_points(records, key), color=colour, label=key.replace("_", " "))
    loss.set_ylabel("loss (mean over clients)")
    looks = {"color": COLOURS[0], "label": "mean", "band_label": "10–90 % of clients"}
    _draw_with_band(middle, records, quality, ("_p10", "_p90"), **looks)
    middle.set_ylabel(metrics.label(quality))
    legend_above(loss)
    legend_above(middle)
    _draw_epsilon(privacy, [Curve("ε", records, {"color": COLOURS[0]})])
    figure.supxlabel("rounds")
    return figure


@mpl.rc_context(STYLE)
def comparison_figure(runs: Sequence[Curve], title: str) -> Figure:
    """Draw quality and ε of several runs over rounds, with one legend.

    The first panel omits runs without the quality metric of the first run.
    """
    quality = quality_key(runs[0].records)
    figure = picture(title, 9.6, 3.2)
    left, privacy = figure.subplots(1, 2, sharex=True)
    bands = [
        _draw_with_band(left, run.records, quality, ("_low", "_high"), label=run.label, **run.style)
        for run in runs
    ]
    mean = "mean over clients and seeds, 95 %" if any(bands) else "mean over clients"
    left.set_ylabel(f"{metrics.label(quality)}\n{mean}")
    _draw_epsilon(privacy, runs)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    figure.supxlabel("rounds")
    return figure


@mpl.rc_context(STYLE)
def clients_figure(runs: Sequence[tuple[Curve, np.ndarray]], metric: str) -> Figure:
    """Draw the empirical distribution of a metric over the clients (m,) of each curve."""
    figure = picture("", 6.4, 3.0)
    axes = figure.subplots()
    for run, values in runs:
        axes.ecdf(values, label=run.label, **run.style)
    axes.axhline(0.1, color="0.6", lw=0.8, zorder=1)
    axes.set(xlabel=metrics.label(metric), ylabel="share of clients at or below")
    if len(runs) > 1:
        figure.legend(loc="outside right center")
    return figure


@mpl.rc_context(STYLE)
def errors_figure(type_one: np.ndarray, curves: Mapping[str, np.ndarray], title: str) -> Figure:
    """Draw the smallest type II errors (k,) of `curves` against the type I errors (k,).

    The diagonal is perfect privacy.
    """
    figure = picture(title, 4.6, 4.4)
    axes = figure.subplots()
    axes.plot([0, 1], [1, 0], color="0.45", lw=1, ls="dotted", label="perfect privacy")
    for index, (label, type_two) in enumerate(curves.items()):
        style: Any = {"color": COLOURS[index], "ls": DASHES[index], "label": label}
        # In front of the axis, where a curve without guarantee runs.
        axes.plot(type_one, type_two, clip_on=False, zorder=3 + index, **style)
    axes.set(xlabel="type I error (false alarm)", ylabel="type II error (miss)")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.legend(loc="upper right")
    return figure


def _points(records: Records, *keys: str) -> np.ndarray:
    """Return rounds and values of evaluations that have all keys, (1 + keys, evaluations)."""
    columns = ("round", *keys)
    rows: list[Any] = [[record.get(key) for key in columns] for record in records]
    return np.reshape([row for row in rows if None not in row], (-1, len(columns))).T


def _draw_with_band(
    axes: Axes, records: Records, key: str, ends: Sequence[str], **style: Any
) -> bool:
    """Draw a metric over rounds; return whether the columns of its band are there too."""
    rounds, values = _points(records, key)
    _, *band = _points(records, *(f"{key}{end}" for end in ends))
    known = len(rounds) > 0 and len(band[0]) == len(rounds)
    line(axes, rounds, values, band if known else None, **style)
    return known


def _draw_epsilon(axes: Axes, runs: Sequence[Curve]) -> None:
    """Draw ε over rounds; runs that spend the same share one line, which names them."""
    axes.set_ylabel("ε spent (nats)\nzero-out, joint DP")
    alike: dict[bytes, list[Curve]] = {}
    without = []
    for run in runs:
        # ε is 0 before the first round, also where it is infinite from then on.
        if run.records[-1]["epsilon"] is None:
            without.append(run.label)
        else:
            alike.setdefault(_points(run.records, "epsilon").tobytes(), []).append(run)
    for first, *others in alike.values():
        names = " = ".join(run.label for run in (first, *others))
        looks = {"color": "0.3", "lw": 1.6, "label": names} if others else first.style
        line(axes, *_points(first.records, "epsilon"), **looks)
    # Room below 0, for the line of a run that spends nothing.
    axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
    if not alike:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "ε = ∞", transform=axes.transAxes, ha="center", va="center")
    elif without:
        axes.plot([], [], ls="", label=f"ε = ∞: {', '.join(without)}")
    if axes.get_legend_handles_labels()[0]:
        legend_above(axes, ncols=1)
