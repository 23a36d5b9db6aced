"""Draw the pictures of the pages again whose numbers are in experiments/results, in today's style.

    python experiments/pictures.py

writes equal-privacy, dpfedmtl-4, silo-privacy, mpmtl-6a, mpmtl-8, correlated-noise, twenty and
ppsgd-2 to docs/figures. No run is repeated.
"""

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjaxsim.report.plots import COLOURS, MARKERS, STYLE, picture, save
from fedjaxsim.report.results import estimate

RESULTS = Path(__file__).with_name("results")
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
BLUE, VERMILION, GREEN, GREY, ORANGE, PURPLE, SKY, OLIVE, INDIGO = COLOURS[:9]
"""Blue, vermilion, green and grey are PMTL, FedAvg, Ditto and Local in all pictures."""
PALE = "#9a94d0"
"""A pale INDIGO, for the same method with more noise."""


def result(name: str) -> Any:
    """Read the numbers of an experiment."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def over_seeds(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval."""
    found = estimate(list(values))
    assert found.mean is not None
    return found.mean, found.half or 0.0


def epsilons(axes: Axes, values: list[float], label: str) -> None:
    """Scale the x axis by log ε, with a tick at each value; the last one may be ∞."""
    shown = ["∞" if math.isinf(value) else f"{value:g}" for value in values]
    axes.set_xticks(range(len(values)), shown, fontsize=7 if len(values) > 6 else 9)
    axes.set_xlabel(label)


EQUAL = {
    "compare-digits": "digits", "compare-digits-sampled": "digits, a fifth of the clients a round",
    "compare-school": "School", "compare-vehicle": "Vehicle", "compare-landmine": "Landmine",
    "compare-femnist": "FEMNIST-206",
}  # fmt: skip
TITLES = {"accuracy": "test accuracy", "auc": "mean AUC of clients", "nmse": "test nMSE"}
METHODS = {
    "local": ("Local", GREY, "--"), "pmtl-offset": ("PMTL, offset", BLUE, "-"),
    "pmtl": ("PMTL, update", BLUE, ":"), "ditto": ("Ditto", GREEN, "-"),
    "fedavg": ("FedAvg", VERMILION, "-"), "fedprox": ("FedProx", ORANGE, "--"),
}  # fmt: skip


def equal_privacy() -> Figure:
    """Draw results against ε on five data sets, digits twice."""
    figure = picture("Equal ε, equal tuning: means over seeds with 95 % intervals", 9, 5.4)
    panels = figure.subplots(2, 3).ravel()
    for axes, (name, title) in zip(panels, EQUAL.items(), strict=True):
        found = result(name)
        levels = [level["epsilon"] or math.inf for level in found["levels"]]
        for mark, (method, (label, colour, dashes)) in zip(MARKERS, METHODS.items(), strict=False):
            of_level = [
                over_seeds(test[f"test_{found['metric']}"] for test in one["test"])
                for one in found["methods"][method]
            ]
            mean, half = zip(*of_level, strict=True)
            if method == "local":
                mean, half = [mean[0]] * len(levels), [half[0]] + [0.0] * (len(levels) - 1)
            axes.errorbar(
                range(len(levels)), mean, half, color=colour, ls=dashes, marker=mark, label=label
            )
        axes.set(title=title, ylabel=TITLES[found["metric"]])
        epsilons(axes, levels, "ε (zero-out, joint DP)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def dpfedmtl_4() -> Figure:
    """Draw accuracy over rounds, without noise and at the largest noise of both mechanisms."""
    found = result("dpfedmtl")
    rounds = range(found["every"], found["rounds"] + 1, found["every"])
    panels = {
        "no noise": (
            ("fedavg", "0.0", "FedAvg", VERMILION, "-"),
            ("dpfedmtl", "0.0", "FedMTL", BLUE, "-"),
            ("dpfedmtl-head-first", "0.0", "FedMTL, head first", SKY, ":"),
            ("local", "0.0", "Local", GREY, "--"),
        ),
        "σ = 9.69": (
            ("fedavg-as-published", "9.69", "DPFedAvg, as published", VERMILION, "--"),
            ("dpfedmtl-as-published", "9.69", "DPFedMTL, as published", BLUE, "--"),
            ("dpfedmtl", "9.69", "FedMTL, z = σ on the sum", BLUE, "-"),
            ("fedavg", "9.69", "FedAvg, z = σ on the sum", VERMILION, "-"),
        ),
    }
    figure = picture(
        "FEMNIST-206, an MLP, 3 clients a round: mean and range of three seeds", 8, 3.6
    )
    for axes, (title, lines) in zip(
        figure.subplots(1, 2, sharey=True), panels.items(), strict=True
    ):
        for method, sigma, label, colour, dashes in lines:
            seeds = np.array([test["curve"] for test in found["methods"][method][sigma]["test"]])
            axes.plot(rounds, seeds.mean(axis=0), color=colour, ls=dashes, label=label)
            axes.fill_between(
                rounds, seeds.min(axis=0), seeds.max(axis=0), color=colour, alpha=0.15, lw=0
            )
        axes.set(title=title, xlabel="round", ylim=(0, None))
        axes.legend(loc="best")
    figure.axes[0].set_ylabel("test accuracy, clients by their rows")
    return figure


def silo_privacy() -> Figure:
    """Draw the error on School over the ε of each example, and over λ."""
    found = result("silo-privacy-school-unit")
    figure = picture("School, noise for each example: means over 3 splits, 95 % intervals", 8, 3.4)
    left, right = figure.subplots(1, 2)
    styles = {
        "Local": ("Local", GREY, "--"), "FedAvg": ("FedAvg", VERMILION, "-"),
        "mean-regularized": ("PMTL, offset", BLUE, "-"),
    }  # fmt: skip
    for mark, (method, (label, colour, dashes)) in zip(MARKERS, styles.items(), strict=False):
        by_level = found[method]
        points = [
            over_seeds(split[one["chosen"]] for split in one["tests"]) for one in by_level.values()
        ]
        mean, half = zip(*points, strict=True)
        x = [float(level) for level in by_level]
        left.errorbar(x, mean, half, color=colour, ls=dashes, marker=mark, label=label)
    levels = found["mean-regularized"]
    lambdas = [setting["lam"] for setting in levels["0.5"]["settings"]]
    shades = mpl.colormaps["Blues"](np.linspace(0.4, 1, len(levels)))
    for shade, (level, one) in zip(shades, levels.items(), strict=True):
        mean = np.mean(one["tests"], axis=0)
        right.plot(lambdas, mean, color=shade, marker="o", label=f"PMTL, ε = {float(level):g}")
    left.set(xscale="log", xlabel="ε of each example", ylabel="mean squared test error")
    left.set_xticks([float(level) for level in levels], [f"{float(level):g}" for level in levels])
    left.minorticks_off()
    right.set(xscale="log", xlabel="λ", ylabel="mean squared test error")
    right.set_xticks(lambdas, [f"{value:g}" for value in lambdas])
    right.minorticks_off()
    left.legend()
    right.legend()
    return figure


LOW_RANK = {
    "low-rank": ("MP-MTL low-rank", INDIGO, "-"),
    "low-rank-published": ("low-rank, as published (no ε)", INDIGO, "--"),
    "group-sparse": ("MP-MTL group-sparse", OLIVE, "-"),
    "group-sparse-published": ("group-sparse, as published (no ε)", OLIVE, "--"),
    "relationship": ("MP-MTL relationship", ORANGE, "-"),
    "dp-mtrl": ("DP-MTRL", PURPLE, "-"),
    "dp-aggr": ("DP-AGGR", SKY, "-"),
}


def mpmtl_6a() -> Figure:
    """Draw all methods' nMSE by ε, and MP-MTL's alone."""
    found = result("mpmtl-low-rank")
    figure = picture("Low-rank pattern, 320 tasks: mean nMSE of 100 repetitions", 8, 4.2)
    alone = np.mean(found["alone"]["test"]["ridge"])
    for axes, names in zip(figure.subplots(1, 2), (LOW_RANK, list(LOW_RANK)[:5]), strict=True):
        axes.axhline(alone, color="black", ls=":", label="each task alone (ridge)")
        for name in names:
            label, colour, dashes = LOW_RANK[name]
            finite = [each for each in found["methods"][name] if each["epsilon"] != "inf"]
            x = [float(each["epsilon"]) for each in finite]
            axes.plot(
                x, [np.mean(each["test"]) for each in finite],
                color=colour, ls=dashes, marker="o", label=label,
            )  # fmt: skip
        axes.set(xscale="log", xlabel="ε (replacing a client)")
    left, right = figure.axes
    left.set(yscale="log", ylabel="nMSE", title="all methods")
    right.set(ylabel="nMSE", title="MP-MTL alone, enlarged")
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, handlelength=3)
    return figure


def mpmtl_8() -> Figure:
    """Draw the nMSE of the first 20 of m tasks, and its distance from no noise."""
    found = {int(m): values for m, values in result("mpmtl-tasks").items()}
    tasks = sorted(found)
    lines = {
        ("low-rank", 0): ("MP-MTL low-rank, ε = 1", PALE, "-", "o"),
        ("low-rank", 1): ("MP-MTL low-rank, ε = 10", INDIGO, "-", "s"),
        ("low-rank-published", 0): ("as published (no ε), claimed 1", PALE, "--", "o"),
        ("low-rank-published", 1): ("as published (no ε), claimed 10", INDIGO, "--", "s"),
    }
    figure = picture(
        "Low-rank pattern, one release: the first 20 of m tasks, 3 repetitions", 8, 3.9
    )
    left, right = figure.subplots(1, 2)
    alone = [found[m]["alone"][0] for m in tasks]
    best = np.array([found[m]["low-rank"][2] for m in tasks])
    left.plot(tasks, alone, color=GREY, ls="--", marker="^", label="each task alone")
    for (method, level), (label, colour, dashes, mark) in lines.items():
        values = np.array([found[m][method][level] for m in tasks])
        style = {"color": colour, "ls": dashes, "marker": mark}
        left.plot(tasks, values, **style, label=label)
        right.plot(tasks, values - best, **style)
    left.plot(tasks, best, color="black", ls=":", marker="v", label="MP-MTL low-rank, no noise")
    left.set(ylabel="nMSE", title="error")
    right.set(yscale="log", ylabel="nMSE above no noise", title="what the noise costs")
    ticks = (0.001, 0.003, 0.01, 0.03)
    right.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for axes in (left, right):
        axes.set(xscale="log", xlabel="number of tasks m")
        axes.set_xticks(tasks, [f"{m:,}" for m in tasks])
        axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=3, handlelength=3)
    return figure


NOISES = (INDIGO, "-"), (SKY, "-"), (ORANGE, "--"), (OLIVE, "-."), (PURPLE, "-")
POPULATIONS = {
    "digits": "digits, 10 of 100 clients", "classifiers": "classifiers, 10 of 1,000 clients",
}  # fmt: skip


def correlated_noise() -> Figure:
    """Draw noise and accuracy against ε, a row for each population."""
    found = result("correlated-noise")["populations"]
    levels = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    figure = picture("100 rounds, a linear model: mean ± standard error of ten seeds", 9, 6.6)
    for row, (population, numbers) in zip(figure.subplots(2, 3), found.items(), strict=True):
        first, *others = row
        for mark, (name, noise), (colour, dashes) in zip(
            MARKERS, numbers["noise"].items(), NOISES, strict=False
        ):
            label = "banded, cyclic" if name.startswith("banded") else name
            style = {"color": colour, "ls": dashes, "marker": mark, "label": label}
            first.plot(levels, noise, **style)
            for axes, (system, of_arm) in zip(others, numbers["systems"].items(), strict=True):
                axes.errorbar(levels, of_arm[name]["accuracy"], of_arm[name]["error"], **style)
                axes.set(ylabel="test accuracy", title=f"{population}, {system}")
        first.set(yscale="log", ylabel="noise on sums, in C", title=POPULATIONS[population])
        ticks = (0.5, 1, 2, 5, 10, 20, 50)
        low, high = first.get_ylim()
        shown = [tick for tick in ticks if low <= tick <= high]
        first.set_yticks(shown, [f"{tick:g}" for tick in shown])
        for axes in row:
            axes.set(xscale="log", xlabel="ε (zero-out, joint DP)")
            axes.set_xticks(levels, [f"{level:g}" for level in levels])
            axes.minorticks_off()
    legend = figure.axes[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=5)
    return figure


def ppsgd_2() -> Figure:
    """Draw PP-SGD's accuracy against ε, a line for each level of personalization."""
    points = beside("ppsgd/best").read()
    data = list(dict.fromkeys(point.data for point in points))
    levels = sorted({point.personalization for point in points})
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(levels)))
    figure = picture("PP-SGD, linear models, at the best step size and clip norm", 8, 3.6)
    panels = figure.subplots(1, len(data))
    for axes, name in zip(panels, data, strict=True):
        drawn = [point for point in points if point.data == name]
        budgets = sorted({point.epsilon for point in drawn})
        seeds = len(drawn[0].values)
        for place, (level, shade) in enumerate(zip(levels, shades, strict=True)):
            line = sorted((p for p in drawn if p.personalization == level), key=lambda p: p.epsilon)
            mean, half = zip(*(over_seeds(point.values) for point in line), strict=True)
            label = "∞ (global)" if math.isinf(level) else f"{level:g}{' (local)' * (level == 0)}"
            x = np.arange(len(budgets)) + (0.03 * (place - 3) if seeds > 1 else 0)
            axes.errorbar(
                x, mean, half, color=shade, marker=MARKERS[place], elinewidth=0.8, label=label
            )
        runs = f"{seeds} seeds, 95 %" if seeds > 1 else "one seed"
        axes.set(title=f"{name}, {runs}", ylabel="test accuracy")
        axes.set_xticks(
            range(len(budgets)), ["∞" if math.isinf(each) else f"{each:.2g}" for each in budgets]
        )
        axes.set_xlabel("ε (zero-out, joint DP)")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(levels), title="personalization")
    return figure


def beside(name: str) -> Any:
    """Import a script of a folder beside this one."""
    path = Path(__file__).parent / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.pop(0)


def twenty() -> Figure:
    """Draw all systems at equal ε."""
    figure = beside("systems/figure")

    return figure.drawn(figure.of_file(RESULTS / "systems.csv"))


DRAWN: dict[str, Callable[[], Figure]] = {
    "equal-privacy": equal_privacy, "dpfedmtl-4": dpfedmtl_4, "silo-privacy": silo_privacy,
    "mpmtl-6a": mpmtl_6a, "mpmtl-8": mpmtl_8, "correlated-noise": correlated_noise,
    "twenty": twenty, "ppsgd-2": ppsgd_2,
}  # fmt: skip


def main(folder: Path = FIGURES) -> None:
    """Draw all of them."""
    with mpl.rc_context(STYLE):
        for name, draw in DRAWN.items():
            save(draw(), folder / f"{name}.png")


if __name__ == "__main__":
    main()
