"""The pictures of these experiments, with one colour for each method."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from methods import METHODS

from fedjaxsim.metrics import metric
from fedjaxsim.report.plots import COLOURS, STYLE, line, picture, save

__all__ = ["against_epsilon", "convergence", "loss_and_epsilon", "over_rounds", "save"]


def against_epsilon(results: dict[str, Any]) -> Figure:
    """Test results against ε, one panel for each data set, without noise at the right end.

    Args:
      results: of `equal_privacy.compare`, by name.
    """
    across = min(3, len(results))
    down = -(-len(results) // across)
    with mpl.rc_context(STYLE):
        figure = picture("Equal ε: mean ± standard deviation over seeds", 2.9 * across, 2.5 * down)
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for panel, result in zip(panels, results.values(), strict=False):
            _panel(panel, result)
        for panel in panels[len(results) :]:
            panel.set_axis_off()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
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
                places, mean, deviation, color=method.colour, label=method.title,
                marker="o", ms=3, lw=1.3, elinewidth=0.7,
            )  # fmt: skip
        else:
            panel.axhline(mean[0], color=method.colour, ls="dashed", lw=1.3, label=method.title)
    panel.set_xticks(places, ["∞" if e is None else f"{e:g}" for e in epsilons])
    panel.set_xlabel("ε (zero-out, joint DP)")
    panel.set_ylabel(f"test {metric(result['metric']).title}")
    panel.set_title(result["title"])


def over_rounds(result: Any, messages: Sequence[str]) -> Figure:
    """Accuracy and ε over the rounds at every noise, one column for each clip norm.

    Args:
      result: of `rounds.py`.
      messages: the methods in it, a row of panels for each.
    """
    noises, done = result["noises"], result["every"] * (1 + np.arange(result["evaluations"]))
    clips = list(dict.fromkeys(noise["clip_norm"] for noise in noises))
    sigmas = list(dict.fromkeys(noise["sigma"] for noise in noises))
    with mpl.rc_context(STYLE):
        figure = picture("PMTL on FEMNIST-206, softmax regression: mean over seeds", 9.0, 7.0)
        rows = figure.subplots(len(messages) + 1, len(clips), sharey="row")
        for panels, name in zip(rows, messages, strict=False):
            accuracy = np.mean([seed["accuracy"] for seed in result[name]["seeds"]], axis=0)
            for panel, clip in zip(panels, clips, strict=True):
                panel.set_title(f"{METHODS[name].title}, γ = {clip:g}")
                for index, noise in enumerate(noises):
                    if noise["clip_norm"] == clip:
                        place = sigmas.index(noise["sigma"])
                        line(panel, done, accuracy[:, index], color=COLOURS[place])
                line(panel, done, accuracy[:, -1], color="0.5", ls="dashed")
                panel.set_xlabel("rounds")
            panels[0].set_ylabel("test accuracy")
        for panel, clip in zip(rows[-1], clips, strict=True):
            for kind, dashes in (("sound", "solid"), ("paper", "dotted")):
                for noise, of in zip(noises, result["epsilon"][kind], strict=True):
                    if noise["clip_norm"] == clip:
                        place = sigmas.index(noise["sigma"])
                        epsilons = np.array(of, float)
                        line(panel, result["epsilon_at"], epsilons, color=COLOURS[place], ls=dashes)
            panel.set(xlabel="rounds", yscale="log", title=f"γ = {clip:g}")
        rows[-1][0].set_ylabel("ε")
        handles = [
            Line2D([], [], color=COLOURS[place], label=f"σ = {sigma:g}")
            for place, sigma in enumerate(sigmas)
        ]
        handles += [
            Line2D([], [], color="0.5", ls="dashed", label="without noise or clipping"),
            Line2D([], [], color="0.2", label="ε: zero-out, joint DP, δ = 1/(10 m)"),
            Line2D([], [], color="0.2", ls="dotted", label="ε as the paper counts, δ = 1/m"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def loss_and_epsilon(result: Any, messages: Sequence[str], index: int) -> Figure:
    """The training loss and ε over the rounds, one panel for each message.

    Args:
      result: of `rounds.py`.
      messages: the methods in it.
      index: which of its noises.
    """
    noise = result["noises"][index]
    title = f"PMTL on FEMNIST-206, σ = {noise['sigma']:g}, γ = {noise['clip_norm']:g}"
    with mpl.rc_context(STYLE):
        figure = picture(title, 8.0, 3.2)
        panels = figure.subplots(1, len(messages), sharey=True)
        for panel, name in zip(panels, messages, strict=True):
            losses = np.array([seed["loss"] for seed in result[name]["seeds"]])[:, :, index]
            done = 1 + np.arange(losses.shape[1])
            mean, deviation = losses.mean(0), losses.std(0, ddof=1)
            line(panel, done, mean, (mean - deviation, mean + deviation), color=COLOURS[1])
            panel.set(xlabel="rounds", ylabel="training loss (orange)", title=METHODS[name].title)
            right = panel.twinx()
            shown = [place for place, t in enumerate(result["epsilon_at"]) if t <= done[-1]]
            spent = np.array([result["epsilon_at"], result["epsilon"]["sound"][index]])[:, shown]
            line(right, *spent, color=COLOURS[0])
            right.set_ylabel("ε, zero-out, joint DP (blue)")
            right.set_ylim(bottom=0)
            right.grid(visible=False)
    return figure


def convergence(result: Any, sigma: float) -> Figure:
    """Weighted accuracy over the rounds, without noise and at one σ behind both doors.

    Args:
      result: of `dpfedmtl.py`.
      sigma: the noise.
    """
    done = result["every"] * (1 + np.arange(result["rounds"] // result["every"]))
    with mpl.rc_context(STYLE):
        figure = picture(f"FEMNIST-206, 784–32–62, K = 3: σ = {sigma:g} where noised", 6.4, 4.0)
        panel = figure.subplots()
        for name, of in result["methods"].items():
            method = METHODS[name]
            for level, rows in of.items():
                if float(level) not in (0.0, sigma):
                    continue
                noised = float(level) > 0
                published = name.endswith("as-published")
                curve = np.mean([test["curve"] for test in rows["test"]], axis=0)
                dashes = ("dashed" if published else "dotted") if noised else "solid"
                label = method.title + (", central noise" if noised and not published else "")
                line(panel, done, curve, color=method.colour, ls=dashes, label=label)
        panel.set(xlabel="rounds", ylabel="test accuracy, weighted by examples")
        figure.legend(loc="outside right center")
    return figure
