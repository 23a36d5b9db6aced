"""Figures of runs and of guarantees, in one style: colour-blind-safe, labelled, small.

Figures are made without pyplot, so that nothing global is touched and no display is needed.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjaxsim import metrics, store
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.extras import importing

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Records = Sequence[Mapping[str, Any]]
"""The evaluations of a run, in the order of rounds."""

# Okabe and Ito's palette (2008), without black and its yellow, too faint on white; then colours of
# Tol's (2021). The first six have hues of their own.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#882255",
    "#56B4E9", "#999933", "#332288", "#CC6677", "#44AA99", "#7F4F24",
)  # fmt: skip
DASHES = ("solid", "dashed", "dashdot", "dotted")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FORMATS = (".png", ".pdf", ".svg")
DPI = 150
EPSILON = "bound on ε spent (nats)\nzero-out, joint DP"
"""Label of an axis of ε."""
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
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "pdf.fonttype": 42,  # TrueType: journals refuse the default, Type 3
    "svg.hashsalt": "fedjaxsim",
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
    if "markevery" in style:
        style["markevery"] = marked_points(len(x), style["markevery"])
    axes.plot(x, y, **{"marker": "o" if len(x) == 1 else None, **style})
    if band is not None:
        axes.fill_between(x, *band, color=style["color"], alpha=0.15, lw=0, label=band_label)


def legend_above(axes: Axes, *handles: Line2D, ncols: int = 2) -> None:
    """Add a legend above the axes, where it hides no data; by default of all labels."""
    given = {"handles": handles} if handles else {}
    axes.legend(ncols=ncols, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, **given)


def marked(place: int) -> dict[str, Any]:
    """Return a marker for the curve at `place`, for `line`."""
    return {"marker": MARKERS[place % len(MARKERS)], "markevery": place % len(MARKERS)}


def marked_points(count: int, place: int) -> list[int]:
    """Return the points with a marker: about seven, the last one among them.

    Curves at other places have theirs at other points, so that coinciding curves show.
    """
    step = max(1, round(0.15 * count))
    first = place * step // len(MARKERS)
    return sorted({*range(first, count - step // 2, step), count - 1}) if count else []


def check_path(path: Path) -> None:
    """Check that `path` has an ending of `FORMATS` and a folder; raise ValueError if not."""
    if path.suffix not in FORMATS:
        raise ValueError(f"a figure must be a {', '.join(FORMATS)} file, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"the folder of a figure must exist, got {path}")


def save(figure: Figure, path: Path) -> None:
    """Write a figure, in the format of its ending, to a path that `check_path` accepts."""
    check_path(path)
    store.write(path, content(figure, path.suffix[1:]))


@mpl.rc_context(STYLE)
def content(figure: Figure, kind: str = "png") -> bytes:
    """Return a figure as the content of a file of a `kind`, without the time in it."""
    stream = io.BytesIO()
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    figure.savefig(stream, format=kind, dpi=DPI, metadata=undated.get(kind))
    return stream.getvalue()


# --- runs -----------------------------------------------------------------------------------------


_USUAL = dict(zip(("pmtl", "fedavg", "ditto", "local", "fedprox", "ppsgd"), COLOURS, strict=False))


def colours_of(algorithms: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and dashes for each system; six systems always have the same colour.

    Colours differ as long as they suffice; more systems differ in their dashes.
    """
    present, order = set(algorithms), list(SYSTEMS)
    found = {name: (colour, DASHES[0]) for name, colour in _USUAL.items() if name in present}
    place = {name: order.index(name) if name in order else len(order) for name in present}
    for name in sorted(present - found.keys(), key=lambda each: (place[each], each)):
        used = [colour for colour, _ in found.values()]
        colour = min(COLOURS, key=used.count)
        found[name] = colour, DASHES[used.count(colour) % len(DASHES)]
    return found


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
        line(loss, *points(records, key), color=colour, label=key.replace("_", " "))
    loss.set_ylabel("loss (mean over clients)")
    over = "pooled over clients" if metrics.of_column(quality).pooled else "mean"
    looks = {"color": COLOURS[0], "label": over, "band_label": "10–90 % of clients"}
    draw_with_band(middle, records, quality, ("_p10", "_p90"), **looks)
    middle.set_ylabel(metrics.label(quality))
    legend_above(loss)
    legend_above(middle)
    privacy.set_ylabel(EPSILON)
    if records[-1]["epsilon"] is None:  # it is 0 before the first round even then
        privacy.set_yticks([])
        privacy.text(0.5, 0.5, "ε = ∞", transform=privacy.transAxes, ha="center", va="center")
    else:
        rounds, spent = points(records, "epsilon")
        line(privacy, rounds, bounds_so_far(spent), color=COLOURS[0])
        privacy.set_ylim(bottom=0)
    sampled = max(row.get(metrics.SAMPLED) or 0 for row in records)
    whose = f" (metrics of {sampled:,} sampled clients, at the end of all)" if sampled else ""
    figure.supxlabel(f"rounds{whose}")
    return figure


def bounds_so_far(epsilons: Sequence[float | None] | np.ndarray) -> list[float]:
    """Return upper bounds on ε over rounds that never fall; None is no bound.

    What bounds the ε of a later round bounds that of an earlier one, so the tight value at the end
    lowers the bounds of the loop before it.
    """
    known = [math.nan if each is None else float(each) for each in epsilons]
    return np.fmin.accumulate(known[::-1])[::-1].tolist()


def points(records: Records, *keys: str) -> np.ndarray:
    """Return rounds and values of evaluations that have all keys, (1 + keys, evaluations)."""
    columns = ("round", *keys)
    rows: list[Any] = [[record.get(key) for key in columns] for record in records]
    return np.reshape([row for row in rows if None not in row], (-1, len(columns))).T


def draw_with_band(
    axes: Axes, records: Records, key: str, ends: Sequence[str], **style: Any
) -> bool:
    """Draw a metric over rounds; return whether the columns of its band are there too."""
    rounds, values = points(records, key)
    _, *band = points(records, *(f"{key}{end}" for end in ends))
    known = len(rounds) > 0 and len(band[0]) == len(rounds)
    line(axes, rounds, values, band if known else None, **style)
    return known
