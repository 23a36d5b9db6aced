"""One style of figures: colour-blind-safe, labelled, small.

Figures are made without pyplot, so that nothing global is touched and no display is needed.
"""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedjaxsim import store
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.extras import importing

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (2008), with grey for black and without its yellow, too faint on white;
# then colours of Tol's (2021). The first six have hues of their own.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#595959", "#E69F00", "#882255",
    "#56B4E9", "#999933", "#332288", "#CC79A7", "#44AA99", "#7F4F24",
)  # fmt: skip
DASHES = ("solid", "dashed", "dashdot", "dotted")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FORMATS = (".png", ".pdf", ".svg")
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


def line(axes: Axes, x: Any, y: Any, band: Sequence[Any] | None = None, **style: Any) -> None:
    """Draw a line, or a dot for a single point, before its band (low, high)."""
    if "markevery" in style:
        style["markevery"] = marked_points(len(x), style["markevery"])
    axes.plot(x, y, **{"marker": "o" if len(x) == 1 else None, **style})
    if band is not None:
        axes.fill_between(x, *band, color=style["color"], alpha=0.15, lw=0)


def marked_points(count: int, place: int) -> list[int]:
    """Return the points with a marker: about seven, the last one among them.

    Curves at other places have theirs at other points, so that coinciding curves show.
    """
    step = max(1, round(0.15 * count))
    first = place * step // len(MARKERS)
    return sorted({*range(first, count - step // 2, step), count - 1}) if count else []


def check_path(path: Path, formats: Sequence[str] = FORMATS, name: str = "path") -> None:
    """Check that `path` has an ending of `formats` and a folder; raise ValueError if not."""
    if path.suffix not in formats:
        *others, last = formats
        raise SettingError(Name(name), f" must end in {', '.join(others)} or {last}, got {path}")
    if not path.parent.is_dir():
        raise SettingError(Name(name), f" must be in a folder that exists, got {path}")


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


_USUAL = dict(zip(("pmtl", "fedavg", "ditto", "local", "fedprox", "ppsgd"), COLOURS, strict=False))


def colours_of(algorithms: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and dashes for each system; six systems always have the same colour.

    Colours differ as long as they suffice; more systems differ in their dashes.
    """
    present, order = set(algorithms), list(SYSTEMS)
    styles = {name: (colour, DASHES[0]) for name, colour in _USUAL.items() if name in present}
    place = {name: order.index(name) if name in order else len(order) for name in present}
    for name in sorted(present - styles.keys(), key=lambda system: (place[system], system)):
        used = [colour for colour, _ in styles.values()]
        colour = min(COLOURS, key=used.count)
        styles[name] = colour, DASHES[used.count(colour) % len(DASHES)]
    return styles
