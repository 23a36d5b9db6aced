"""A picture of who has what in a population."""

import numpy as np

from fedjaxsim.data.describe import label_counts, readable, rows_per_client
from fedjaxsim.data.population import Population
from fedjaxsim.extras import importing
from fedjaxsim.report.plots import COLOURS, STYLE, legend_above, picture

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = 30
"""So many clients stay in their order, under their names; more are sorted by what they have."""
_LABELS = 64
"""So many labels have a row of their own; of more, the rarest share the last one."""
_OTHERS = "others"


def population_figure(population: Population) -> Figure:
    """Rows of each client, above the shares that labels have in them.

    Few clients stand under their names; many are sorted by their most frequent label and then by
    its share, so that what they have in common shows. Of targets that are no labels, the range of
    each client is drawn, sorted by its median.

    Args:
        population: of m clients.
    """
    y = population.fields.get("y")
    sizes = rows_per_client(population)
    with mpl.rc_context(STYLE):
        title = f"What each of {len(sizes)} clients has"
        figure = picture(title, 9.6, 4.8 if y is not None else 2.4)
        panels = figure.subplots(
            1 if y is None else 2, 1, sharex=True, squeeze=False,
            height_ratios=[1] if y is None else [1, 2],
        )[:, 0]  # fmt: skip
        if y is None:
            order = np.arange(len(sizes))
        elif y.dtype.kind in "iu":
            order = _shares(panels[1], population)
        else:
            order = _ranges(panels[1], population)
        _sizes(panels[0], sizes[order])
        _clients(panels[-1], population, order)
    return figure


def _shares(axes: Axes, population: Population) -> np.ndarray:
    """Draws how much of each client's rows has each label; returns the order of clients, (m,)."""
    labels, counts = label_counts(population)
    names = _names(population, labels)
    if len(labels) > _LABELS:
        kept = np.sort(np.argsort(-counts.sum(axis=0), kind="stable")[: _LABELS - 1])
        rest = counts.sum(axis=1) - counts[:, kept].sum(axis=1)
        counts = np.column_stack([counts[:, kept], rest])
        names = [*(names[k] for k in kept), _OTHERS]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    order = np.arange(len(shares))
    if len(shares) > _NAMED:
        first = np.argmax(shares, axis=1)
        order = np.lexsort((-shares.max(axis=1), first))
    image = axes.imshow(
        shares[order].T, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0
    )
    axes.grid(visible=False)
    ticks = range(0, len(names), -(-len(names) // 16))
    if names[-1] == _OTHERS and ticks[-1] < len(names) - 1:
        ticks = [*ticks[:-1], len(names) - 1]
    axes.set_yticks(ticks, [names[k] for k in ticks])
    axes.set_ylabel("label")
    colours = axes.figure.colorbar(image, ax=axes, pad=0.01)
    colours.set_label("share of the client's labels")
    return order


def _names(population: Population, labels: np.ndarray) -> list[str]:
    """What the labels are called."""
    categories = population.categories.get("y")
    if categories is None:
        return [str(label) for label in labels]
    return [readable(categories[label]) for label in labels]


def _ranges(axes: Axes, population: Population) -> np.ndarray:
    """Draws the targets of each client; returns the order of clients, (m,)."""
    targets = [population.rows(k)["y"].ravel() for k in range(population.num_clients)]
    low, middle, high = np.array([np.percentile(one, (10, 50, 90)) for one in targets]).T
    order = np.argsort(middle, kind="stable") if len(targets) > _NAMED else np.arange(len(targets))
    x = np.arange(len(targets))
    axes.vlines(x, low[order], high[order], color=COLOURS[0], alpha=0.35, label="10–90 % of rows")
    axes.plot(x, middle[order], ".", ms=3, color=COLOURS[0], label="median")
    axes.set_ylabel("target")
    legend_above(axes)
    return order


def _sizes(axes: Axes, sizes: np.ndarray) -> None:
    """Draws the rows of each client, as steps where bars would be thinner than a line."""
    edges = np.arange(len(sizes) + 1) - 0.5
    axes.stairs(sizes, edges, fill=True, color=COLOURS[0], alpha=0.8)
    axes.set_ylabel("rows")
    axes.grid(visible=False, axis="x")
    axes.set_xlim(edges[0], edges[-1])


def _clients(axes: Axes, population: Population, order: np.ndarray) -> None:
    """Labels the axis of clients."""
    if len(order) > _NAMED:
        by = {"i": "their most frequent label", "f": "the median of their targets"}
        y = population.fields.get("y")
        what = "" if y is None else f", sorted by {by['f' if y.dtype.kind == 'f' else 'i']}"
        axes.set_xlabel(f"{len(order)} clients{what}")
        axes.set_xticks([])
        return
    names = [str(name) for name in population.names[order]]
    axes.set_xticks(range(len(names)), names)
    if sum(map(len, names)) > 80:
        axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel("client")
