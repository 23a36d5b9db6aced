"""Figures of runs and of guarantees, in one style: colour-blind-safe, labelled, small.

Figures are made without pyplot, so that nothing global is touched and no display is needed.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.extras import importing
from fedjaxsim.report.files import write_atomically
from fedjaxsim.report.seeds import System, mean_records

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
    """Check that a figure can be written to `path`.

    Raises:
      ValueError: if the path does not end in .png, or its folder does not exist.
    """
    if path.suffix != ".png":
        raise ValueError(f"a figure must be written to a .png file, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"the folder of a figure must exist, got {path}")


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically.

    Raises:
      ValueError: as `check_path`.
    """
    check_path(path)
    write_atomically(path, png(figure))


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
      colour: index into `COLOURS`.
      dashes: index into `DASHES`.
    """

    label: str
    records: Records
    colour: int
    dashes: int = 0


def colour_of(algorithm: str) -> int:
    """Return the index of a system's colour and, beyond the palette, dashes in all figures."""
    names = list(SYSTEMS)
    return names.index(algorithm) if algorithm in names else len(names)


def curve_of(label: str, records: Records, algorithm: str) -> Curve:
    """Return the curve of a run of a system, in its colour."""
    dashes, colour = divmod(colour_of(algorithm), len(COLOURS))
    return Curve(label, records, colour, dashes)


def of_systems(found: Sequence[System]) -> list[Curve]:
    """Return a curve per system, the mean over its seeds, in the colour of its algorithm."""
    metric = quality_key(next(iter(found[0].runs.values())).records)
    curves: list[Curve] = []
    for system in found:
        curve = curve_of(system.label, mean_records(system, metric), system.algorithm)
        alike = sum(other.colour == curve.colour for other in curves)
        curves.append(curve._replace(dashes=(curve.dashes + alike) % len(DASHES)))
    return curves


def quality_key(records: Records) -> str:
    """Return the metric by which a run is judged."""
    return metrics.judged_by(key for record in records for key in record) or "test_loss"


@mpl.rc_context(STYLE)
def run_figure(records: Records, title: str) -> Figure:
    """Draw loss, quality with its 10–90 percentile band over clients, and ε of one run.

    Args:
      records: evaluations of the run, at least one.
      title: title of the figure.
    """
    quality = quality_key(records)
    figure, (loss, middle, privacy) = _panels(title, 3)
    for colour, key in zip(COLOURS, ("train_loss", "test_loss"), strict=False):
        line(loss, *_points(records, key), color=colour, label=key.replace("_", " "))
    loss.set_ylabel("loss (mean over clients)")
    looks = {"color": COLOURS[0], "label": "mean", "band_label": "10–90 % of clients"}
    _draw_with_band(middle, records, quality, ("_p10", "_p90"), **looks)
    middle.set_ylabel(metrics.label(quality))
    for panel in (loss, middle):
        legend_above(panel)
    _draw_epsilon(privacy, [Curve("ε", records, 0)])
    return figure


@mpl.rc_context(STYLE)
def comparison_figure(runs: Sequence[Curve], title: str) -> Figure:
    """Draw quality and ε of several runs over rounds, with one legend.

    Args:
      runs: at least one. The first panel omits runs without the quality metric of the first run.
      title: title of the figure.
    """
    quality = quality_key(runs[0].records)
    figure, (left, privacy) = _panels(title, 2)
    bands = [
        _draw_with_band(left, run.records, quality, ("_low", "_high"), label=run.label, **style)
        for run, style in zip(runs, _styles(runs), strict=True)
    ]
    mean = "mean over clients and seeds, 95 %" if any(bands) else "mean over clients"
    left.set_ylabel(f"{metrics.label(quality)}\n{mean}")
    _draw_epsilon(privacy, runs)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    return figure


@mpl.rc_context(STYLE)
def clients_figure(runs: Sequence[tuple[Curve, np.ndarray]], metric: str) -> Figure:
    """Draw the empirical distribution of a metric over clients.

    Args:
      runs: at least one curve, with the values of its clients.
      metric: column of the values.
    """
    figure = picture("", 6.4, 3.0)
    axes = figure.subplots()
    styles = _styles([run for run, _ in runs])
    for (run, values), style in zip(runs, styles, strict=True):
        axes.ecdf(values, label=run.label, **style)
    axes.axhline(0.1, color="0.6", lw=0.8, zorder=1)
    axes.set(xlabel=metrics.label(metric), ylabel="share of clients at or below")
    if len(runs) > 1:
        figure.legend(loc="outside right center")
    return figure


@mpl.rc_context(STYLE)
def errors_figure(type_one: np.ndarray, curves: Mapping[str, np.ndarray], title: str) -> Figure:
    """Draw the errors that a guarantee leaves to any test, below the line of perfect privacy.

    Args:
      type_one: (k,) type I errors α in [0, 1].
      curves: smallest type II errors (k,), by name.
      title: title of the figure.
    """
    figure = picture(title, 4.6, 4.4)
    axes = figure.subplots()
    axes.plot([0, 1], [1, 0], color="0.45", lw=1, ls="dotted", label="perfect privacy")
    for index, (label, type_two) in enumerate(curves.items()):
        style: Any = {"color": COLOURS[index], "ls": DASHES[index], "label": label}
        # Above the axis: without a guarantee the curve lies on it.
        axes.plot(type_one, type_two, clip_on=False, zorder=3 + index, **style)
    axes.set(xlabel="type I error (false alarm)", ylabel="type II error (miss)")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    # A certified curve lies below the diagonal, so the upper right corner is free.
    axes.legend(loc="upper right")
    return figure


def _panels(title: str, count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = picture(title, 9.6, 3.2)
    panels = figure.subplots(1, count, sharex=True)
    for panel in panels:
        panel.set_xlabel("rounds")
    return figure, panels


def _points(records: Records, *keys: str) -> np.ndarray:
    """Return rounds and values of evaluations that have all keys, (1 + keys, evaluations)."""
    columns = ("round", *keys)
    rows: list[Any] = [[record.get(key) for key in columns] for record in records]
    return np.reshape([row for row in rows if None not in row], (-1, len(columns))).T


def _styles(runs: Sequence[Curve]) -> list[dict[str, Any]]:
    """Return ever thinner lines, so that a curve shows below one that covers it."""
    widths = np.linspace(3.2, 1.2, len(runs)) if len(runs) > 1 else [1.6]
    return [
        {"color": COLOURS[run.colour], "linestyle": DASHES[run.dashes], "linewidth": width}
        for run, width in zip(runs, widths, strict=True)
    ]


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
    alike: dict[Any, list[tuple[Curve, dict[str, Any]]]] = {}
    without = []
    for run, style in zip(runs, _styles(runs), strict=True):
        # ε is 0 before the first round, also where it is infinite from then on.
        if run.records[-1]["epsilon"] is None:
            without.append(run.label)
        else:
            points = _points(run.records, "epsilon")
            alike.setdefault(points.tobytes(), []).append((run, style))
    for group in alike.values():
        (run, style), shared = group[0], len(group) > 1
        looks = {"color": "0.3", "linewidth": 1.6} if shared else style
        label = " = ".join(run.label for run, _ in group) if shared else None
        line(axes, *_points(run.records, "epsilon"), label=label, **looks)
    # Room below 0, for the line of a run that spends nothing.
    axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
    if not alike:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "ε = ∞", transform=axes.transAxes, ha="center", va="center")
    elif without:
        axes.plot([], [], ls="", label=f"ε = ∞: {', '.join(without)}")
    if axes.get_legend_handles_labels()[0]:
        legend_above(axes, ncols=1)
