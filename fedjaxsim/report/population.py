"""A figure of the rows and labels of each client of a population."""

import numpy as np

from fedjaxsim.data.describe import label_counts, readable
from fedjaxsim.data.population import Population
from fedjaxsim.extras import importing
from fedjaxsim.report.plots import COLOURS, STYLE, legend_above, picture

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = 30
"""Most clients with names."""
_LABELS = 64
"""Most rows of labels; the rarest labels share the last one."""
_OTHERS = "others"


@mpl.rc_context(STYLE)
def population_figure(population: Population) -> Figure:
    """Draw the rows of each client, above the shares of labels or the range of targets.

    Few clients are named; many are sorted by their most frequent label, or by their median target.
    """
    y, sizes = population.fields.get("y"), population.counts.sum(axis=1)
    height, ratios = (2.4, [1]) if y is None else (4.8, [1, 2])
    figure = picture(f"Data of {len(sizes)} clients", 9.6, height)
    panels = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    order, by = np.arange(len(sizes)), ""
    if y is not None and y.dtype.kind in "iu":
        order, by = _draw_shares(panels[1], population), ", sorted by their most frequent label"
    elif y is not None:
        order, by = _draw_ranges(panels[1], population), ", sorted by the median of their targets"
    edges = np.arange(len(sizes) + 1) - 0.5
    # Steps, since bars of many clients would be thinner than a line.
    panels[0].stairs(sizes[order], edges, fill=True, color=COLOURS[0], alpha=0.8)
    panels[0].set(ylabel="rows", xlim=(edges[0], edges[-1]))
    panels[0].grid(visible=False, axis="x")
    if len(order) > _NAMED:
        panels[-1].set(xlabel=f"{len(order)} clients{by}", xticks=[])
    else:
        names = [str(name) for name in population.names[order]]
        panels[-1].set_xticks(range(len(names)), names)
        panels[-1].tick_params(axis="x", rotation=90 if sum(map(len, names)) > 80 else 0)
        panels[-1].set_xlabel("client")
    return figure


def _draw_shares(axes: Axes, population: Population) -> np.ndarray:
    """Draw the share of each label in the rows of clients; return the order of clients, (m,)."""
    labels, counts = label_counts(population)
    categories = population.categories.get("y")
    names = [str(k) if categories is None else readable(categories[k]) for k in labels]
    if len(labels) > _LABELS:
        kept = np.sort(np.argsort(-counts.sum(axis=0), kind="stable")[: _LABELS - 1])
        rest = counts.sum(axis=1) - counts[:, kept].sum(axis=1)
        counts = np.column_stack([counts[:, kept], rest])
        names = [*(names[k] for k in kept), _OTHERS]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    order = np.arange(len(shares))
    if len(shares) > _NAMED:
        order = np.lexsort((-shares.max(axis=1), np.argmax(shares, axis=1)))
    image = axes.imshow(shares[order].T, "Blues", aspect="auto", interpolation="nearest", vmin=0)
    axes.grid(visible=False)
    ticks = list(range(0, len(names), -(-len(names) // 16)))
    if names[-1] == _OTHERS:
        ticks[-1] = len(names) - 1
    axes.set_yticks(ticks, [names[k] for k in ticks])
    axes.set_ylabel("label")
    axes.figure.colorbar(image, ax=axes, pad=0.01, label="share of the client's labels")
    return order


def _draw_ranges(axes: Axes, population: Population) -> np.ndarray:
    """Draw the targets of each client; return the order of clients, (m,)."""
    targets = [population.rows(k)["y"].ravel() for k in range(population.num_clients)]
    low, middle, high = np.array([np.percentile(one, (10, 50, 90)) for one in targets]).T
    x = np.arange(len(targets))
    order = np.argsort(middle, kind="stable") if len(targets) > _NAMED else x
    axes.vlines(x, low[order], high[order], color=COLOURS[0], alpha=0.35, label="10–90 % of rows")
    axes.plot(x, middle[order], ".", ms=3, color=COLOURS[0], label="median")
    axes.set_ylabel("target")
    legend_above(axes)
    return order
