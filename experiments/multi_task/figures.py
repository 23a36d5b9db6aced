"""The pictures of these experiments, with one colour for each method."""

from collections.abc import Iterable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from methods import METHODS

from fedjaxsim.metrics import metric
from fedjaxsim.report.plots import STYLE, legend_above, line, picture, save

__all__ = ["against_epsilon", "convergence", "save"]


def against_epsilon(results: dict[str, Any]) -> Figure:
    """Test results against ε, one panel for each data set, without noise at the right end.

    Args:
      results: of `equal_privacy.compare`, by name.
    """
    across = min(3, len(results))
    down = -(-len(results) // across)
    with mpl.rc_context(STYLE):
        title = "Equal ε: mean ± standard deviation over seeds"
        figure = picture(title, max(2.9 * across, 4.4), 2.5 * down)
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for panel, result in zip(panels, results.values(), strict=False):
            _panel(panel, result)
        for panel in panels[len(results) :]:
            panel.set_axis_off()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2 * across)
    return figure


def _panel(panel: Any, result: Any) -> None:
    epsilons = [level["epsilon"] for level in result["levels"]]
    places = np.arange(len(epsilons))
    column = f"test_{result['metric']}"
    for name, rows in result["methods"].items():
        method = METHODS[name]
        cells = np.array([[test[column] for test in row["test"]] for row in rows], float)
        mean, deviation = cells.mean(1), cells.std(1, ddof=1)
        if method.sends:
            panel.errorbar(
                places, mean, deviation, color=method.colour, ls=method.dashes, label=method.title,
                marker="o", ms=3, lw=1.5, elinewidth=0.7,
            )  # fmt: skip
        else:
            style = {"color": method.colour, "ls": method.dashes, "lw": 1.5}
            panel.axhline(mean[0], label=method.title, **style)
    size = 9 if len(epsilons) < 6 else 7
    panel.set_xticks(places, ["∞" if e is None else f"{e:g}" for e in epsilons], fontsize=size)
    panel.set_xlabel("ε (zero-out, joint DP)")
    panel.set_ylabel(f"test {metric(result['metric']).title}")
    panel.set_title(result["title"])


def _band(panel: Any, x: Any, of_seeds: Iterable[Any], **style: Any) -> None:
    """Draw the mean over seeds, with a band of one standard deviation to both sides."""
    values = np.array(list(of_seeds), float)
    mean, deviation = values.mean(0), values.std(0, ddof=1)
    line(panel, x, mean, (mean - deviation, mean + deviation), **style)


def convergence(result: Any, sigma: float) -> Figure:
    """Weighted accuracy over the rounds, without noise and at one σ with both mechanisms.

    Args:
      result: of `dpfedmtl.py`.
      sigma: the noise.
    """
    done = result["every"] * (1 + np.arange(result["rounds"] // result["every"]))
    with mpl.rc_context(STYLE):
        title = "FEMNIST-206, 784–32–62, K = 3: mean ± standard deviation over seeds"
        figure = picture(title, 8.0, 3.8)
        panels = figure.subplots(1, 2, sharey=True)
        for panel, level in zip(panels, ("0.0", str(sigma)), strict=True):
            for name, of in result["methods"].items():
                if level not in of:
                    continue
                method = METHODS[name]
                sound = level != "0.0" and not name.endswith("as-published")
                label = method.title + (f", z = {sigma:g} on the sum" if sound else "")
                _band(
                    panel, done, (test["curve"] for test in of[level]["test"]),
                    color=method.colour, ls=method.dashes, label=label,
                )  # fmt: skip
            panel.set_xlabel("rounds")
            legend_above(panel, ncols=1)
        panels[0].set_ylabel("test accuracy, weighted by examples")
    return figure
