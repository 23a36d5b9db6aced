"""Curves of runs and of guarantees, in one style: colour-blind-safe, labelled, small.

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
    """An empty figure of so many inches, whose parts make room for one another."""
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
    """A line, or a dot where there is one point only, before its band from low to high."""
    axes.plot(x, y, **{"marker": "o" if len(x) == 1 else None, "ms": 4, **style})
    if band is not None:
        low, high = band
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, lw=0, label=band_label)


def legend_above(axes: Axes, *handles: Line2D, ncols: int = 2) -> None:
    """A legend outside the axes, where it hides no data; by default of what has a label."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    if handles:
        place["handles"] = handles
    axes.legend(ncols=ncols, **place)


def check_path(path: Path) -> None:
    """Checks where a figure is to be written.

    Raises:
      ValueError: if the path does not end in .png, or its folder does not exist.
    """
    if path.suffix != ".png":
        raise ValueError(f"a figure must be written to a .png file, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"the folder of a figure must exist, got {path}")


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG, atomically.

    Raises:
      ValueError: as `check_path`.
    """
    check_path(path)
    write_atomically(path, png(figure))


def png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


# --- runs -----------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """One run in a comparison.

    Attributes:
      label: its name in the legend.
      records: its evaluations.
      colour: an index into `COLOURS`; runs of one kind share it.
      dashes: an index into solid, dashed, dash-dotted, dotted.
    """

    label: str
    records: Records
    colour: int
    dashes: int = 0


def colour_of(algorithm: str) -> int:
    """The index of a system's colour and, beyond the palette, dashes: the same in every figure."""
    names = list(SYSTEMS)
    return names.index(algorithm) if algorithm in names else len(names)


def curve_of(label: str, records: Records, algorithm: str) -> Curve:
    """The curve of a run of a system, in its colour."""
    dashes, colour = divmod(colour_of(algorithm), len(COLOURS))
    return Curve(label, records, colour, dashes)


def of_systems(found: Sequence[System]) -> list[Curve]:
    """One curve per system, a mean where it has several seeds, in the colour of its algorithm."""
    metric = quality_key(next(iter(found[0].runs.values())).records)
    curves: list[Curve] = []
    for system in found:
        records = next(iter(system.runs.values())).records
        if len(system.runs) > 1:
            records = mean_records(system, metric)
        curve = curve_of(system.label, records, system.algorithm)
        alike = sum(other.colour == curve.colour for other in curves)
        curves.append(curve._replace(dashes=(curve.dashes + alike) % len(DASHES)))
    return curves


def quality_key(records: Records) -> str:
    """The metric by which a run is judged."""
    return metrics.judged_by(key for record in records for key in record) or "test_loss"


def run_figure(records: Records, title: str) -> Figure:
    """Loss, quality with its 10–90 percentile band over clients, and ε of one run.

    Args:
      records: the evaluations of the run, at least one.
      title: what is shown.
    """
    quality = quality_key(records)
    with mpl.rc_context(STYLE):
        figure, (loss, middle, privacy) = _panels(title, 3)
        for colour, key in zip(COLOURS, ("train_loss", "test_loss"), strict=False):
            line(loss, *_points(records, key), color=colour, label=key.replace("_", " "))
        loss.set_ylabel("loss (mean over clients)")
        rounds, mean = _points(records, quality)
        _, *band = _points(records, f"{quality}_p10", f"{quality}_p90")
        shown = band if len(band[0]) == len(rounds) else None
        looks: dict[str, Any] = {"color": COLOURS[0], "label": "mean"}
        line(middle, rounds, mean, shown, band_label="10–90 % of clients", **looks)
        middle.set_ylabel(metrics.label(quality))
        for panel in (loss, middle):
            legend_above(panel)
        _epsilon_axis(privacy, [Curve("ε", records, 0)])
    return figure


def comparison_figure(runs: Sequence[Curve], title: str) -> Figure:
    """Quality and ε of several runs over rounds, with one legend beside them.

    Args:
      runs: at least one; those with another quality metric than the first are left out of the
        first panel, since the two numbers share no axis.
      title: what is shown.
    """
    quality = quality_key(runs[0].records)
    with mpl.rc_context(STYLE):
        figure, (left, privacy) = _panels(title, 2)
        for run, style in zip(runs, _styles(runs), strict=True):
            line(left, *_points(run.records, quality), label=run.label, **style)
            rounds, *band = _points(run.records, f"{quality}_low", f"{quality}_high")
            if len(rounds):
                left.fill_between(rounds, *band, color=style["color"], alpha=0.15, lw=0)
        seeds = any(f"{quality}_low" in record for run in runs for record in run.records)
        of = "mean over clients and seeds, 95 %" if seeds else "mean over clients"
        left.set_ylabel(f"{metrics.label(quality)}\n{of}")
        _epsilon_axis(privacy, runs)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center")
    return figure


def panels_figure(panels: Mapping[str, Sequence[Curve]], title: str) -> Figure:
    """Quality of runs over rounds in panels of one scale, with one legend beside them.

    Args:
      panels: runs by the title of their panel, with labels that are the same in all; a panel may be
        empty, but not all of them. Where records have METRIC_low and METRIC_high, the standard
        error over seeds, it is a band.
      title: what is shown.
    """
    quality = quality_key(next(run for runs in panels.values() for run in runs).records)
    with mpl.rc_context(STYLE):
        figure, axes = _panels(title, len(panels), sharey=True)
        handles = {}
        for panel, (name, runs) in zip(axes, panels.items(), strict=True):
            panel.set_title(name)
            for run, style in zip(runs, _styles(runs), strict=True):
                looks = style | {"label": run.label, "linewidth": 1.8}
                line(panel, *_points(run.records, quality), **looks)
                rounds, *band = _points(run.records, f"{quality}_low", f"{quality}_high")
                if len(rounds):
                    panel.fill_between(rounds, *band, color=style["color"], alpha=0.15, lw=0)
            drawn, labels = panel.get_legend_handles_labels()
            handles |= dict(zip(labels, drawn, strict=True))
        seeds = any(
            f"{quality}_low" in record
            for runs in panels.values() for run in runs for record in run.records
        )  # fmt: skip
        of = "mean over seeds ± standard error" if seeds else "mean over clients"
        axes[0].set_ylabel(f"{metrics.label(quality)}\n{of}")
        figure.legend(handles.values(), handles.keys(), loc="outside right center")
    return figure


def clients_figure(runs: Sequence[tuple[Curve, np.ndarray]], metric: str) -> Figure:
    """How a metric is distributed over clients: the share of them at or below each value.

    Args:
      runs: how each is named and drawn, and the values of its clients, at least one.
      metric: the column that they are of.
    """
    with mpl.rc_context(STYLE):
        figure = picture("", 6.4, 3.0)
        axes = figure.subplots()
        styles = _styles([run for run, _ in runs])
        for (run, values), style in zip(runs, styles, strict=True):
            axes.ecdf(values, label=run.label, **style)
        axes.axhline(0.1, color="0.6", lw=0.8, zorder=1)
        axes.set_xlabel(metrics.label(metric))
        axes.set_ylabel("share of clients at or below")
        if len(runs) > 1:
            figure.legend(loc="outside right center")
    return figure


def errors_figure(type_one: np.ndarray, curves: Mapping[str, np.ndarray], title: str) -> Figure:
    """The errors that a guarantee leaves to any test, below the diagonal of perfect privacy.

    Args:
      type_one: (k,) type I errors α in [0, 1].
      curves: by name, (k,) smallest type II errors.
      title: what is shown.
    """
    with mpl.rc_context(STYLE):
        figure = picture(title, 4.6, 4.4)
        axes = figure.subplots()
        axes.plot([0, 1], [1, 0], color="0.45", lw=1, ls="dotted", label="perfect privacy")
        for index, (label, type_two) in enumerate(curves.items()):
            style: Any = {"color": COLOURS[index], "ls": DASHES[index], "label": label}
            # Above the axis: without a guarantee the curve lies on it.
            axes.plot(type_one, type_two, clip_on=False, zorder=3 + index, **style)
        axes.set_xlabel("type I error (false alarm)")
        axes.set_ylabel("type II error (miss)")
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        # A certified curve lies below the diagonal, so the upper right corner is free.
        axes.legend(loc="upper right")
    return figure


def _panels(title: str, count: int, *, sharey: bool = False) -> tuple[Figure, Sequence[Axes]]:
    figure = picture(title, 9.6, 3.2)
    panels = figure.subplots(1, count, sharex=True, sharey=sharey)
    for panel in panels:
        panel.set_xlabel("rounds")
    return figure, panels


def _points(records: Records, *keys: str) -> np.ndarray:
    """Rounds and values where all of these are known, (1 + keys, evaluations)."""
    columns = ("round", *keys)
    rows: list[Any] = [[record.get(key) for key in columns] for record in records]
    return np.reshape([row for row in rows if None not in row], (-1, len(columns))).T


def _styles(runs: Sequence[Curve]) -> list[dict[str, Any]]:
    """How each run is drawn: ever thinner, so that a curve shows below one that covers it."""
    widths = np.linspace(3.2, 1.2, len(runs)) if len(runs) > 1 else [1.6]
    return [
        {"color": COLOURS[run.colour], "linestyle": DASHES[run.dashes], "linewidth": width}
        for run, width in zip(runs, widths, strict=True)
    ]


def _epsilon_axis(axes: Axes, runs: Sequence[Curve]) -> None:
    axes.set_ylabel("ε spent (nats)\nzero-out, joint DP")
    alike: dict[Any, list[tuple[Curve, dict[str, Any]]]] = {}
    without = []
    for run, style in zip(runs, _styles(runs), strict=True):
        # Nothing is spent before the first round, also where ε is infinite from then on.
        if run.records[-1]["epsilon"] is None:
            without.append(run.label)
        else:
            points = _points(run.records, "epsilon")
            alike.setdefault(points.tobytes(), []).append((run, style))
    for group in alike.values():
        (run, style), shared = group[0], len(group) > 1
        # What several have spent alike is one line, and says whose.
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
