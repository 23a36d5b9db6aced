"""The pictures of these experiments, with one colour for each method."""

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from methods import METHODS

from fedjaxsim.metrics import metric
from fedjaxsim.report.plots import STYLE, legend_above, line, picture, save

__all__ = ["against_epsilon", "convergence", "loss_and_epsilon", "over_rounds", "save"]


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


def over_rounds(result: Any, messages: Sequence[str]) -> Figure:
    """Accuracy and ε over the rounds at every noise, one column for each clip norm.

    Args:
      result: of `rounds.py`.
      messages: the methods in it, a row of panels for each.
    """
    noises, every = result["noises"], result["every"]
    clips = list(dict.fromkeys(noise["clip_norm"] for noise in noises))
    sigmas = list(dict.fromkeys(noise["sigma"] for noise in noises))
    # Not the colours of the methods: one shade for each noise.
    colours = mpl.colormaps["viridis"](np.linspace(0.75, 0, len(sigmas)))
    shades = dict(zip(sigmas, colours, strict=True))
    with mpl.rc_context(STYLE):
        title = "PMTL on FEMNIST-206, softmax regression: mean ± standard deviation over seeds"
        figure = picture(title, 6.9, 5.6)
        rows = figure.subplots(len(messages) + 1, len(clips), sharey="row")
        for panels, name in zip(rows, messages, strict=False):
            accuracies = np.array([seed["accuracy"] for seed in result[name]["seeds"]], float)
            done = every * (1 + np.arange(accuracies.shape[2]))
            for panel, clip in zip(panels, clips, strict=True):
                panel.set_title(f"{METHODS[name].title}, γ = {clip:g}")
                for index, noise in enumerate(noises):
                    if noise["clip_norm"] == clip:
                        _band(panel, done, accuracies[:, index], color=shades[noise["sigma"]])
                _band(panel, done, accuracies[:, -1], color="0.5", ls="dashed")
                panel.set(xlabel="rounds", ylim=(0, None))
            panels[0].set_ylabel("test accuracy")
        for panel, clip in zip(rows[-1], clips, strict=True):
            for kind, dashes in (("sound", "solid"), ("paper", "dotted")):
                for noise, of in zip(noises, result["epsilon"][kind], strict=True):
                    if noise["clip_norm"] == clip:
                        shade = shades[noise["sigma"]]
                        at, epsilons = result["epsilon_at"], np.array(of, float)
                        line(panel, at, epsilons, color=shade, ls=dashes)
            panel.set(xlabel="rounds", yscale="log", title=f"ε, γ = {clip:g}")
        rows[-1][0].set_ylabel("ε")
        handles = [Line2D([], [], color=shades[sigma], label=f"σ = {sigma:g}") for sigma in sigmas]
        handles += [
            Line2D([], [], color="0.5", ls="dashed", label="without noise or clipping"),
            Line2D([], [], color="0.2", label="ε zero-out, joint DP, δ = 1/(10 m)"),
            Line2D([], [], color="0.2", ls="dotted", label="ε as the paper counts, δ = 1/m"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def loss_and_epsilon(result: Any, messages: Sequence[str]) -> Figure:
    """Draw the training loss over the rounds with noise and without, and the ε of the noise.

    Args:
      result: of `rounds.py`.
      messages: the methods in it.
    """
    noise = result["noises"][result["shown"]]
    title = f"PMTL on FEMNIST-206, σ = {noise['sigma']:g}, γ = {noise['clip_norm']:g}"
    with mpl.rc_context(STYLE):
        figure = picture(title, 8.0, 3.2)
        left, right = figure.subplots(1, 2)
        for name in messages:
            method, losses = METHODS[name], np.array([s["loss"] for s in result[name]["seeds"]])
            done = 1 + np.arange(losses.shape[2])
            _band(left, done, losses[:, 0], color=method.colour, label=method.title)
            label = f"{method.title}, no noise or clipping"
            _band(left, done, losses[:, 1], color=method.colour, ls="dashed", label=label)
        left.set(xlabel="rounds", ylabel="training loss,\nmean over the cohort", yscale="log")
        for kind, dashes, label in (
            ("sound", "solid", "zero-out, joint DP, δ = 1/(10 m)"),
            ("paper", "dotted", "as the paper counts, δ = 1/m"),
        ):
            epsilons = np.array(result["epsilon"][kind][result["shown"]], float)
            line(right, result["epsilon_at"], epsilons, color="0.2", ls=dashes, label=label)
        right.set(xlabel="rounds", ylabel="ε", ylim=(0, None))
        for panel in (left, right):
            legend_above(panel, ncols=1)
    return figure


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
