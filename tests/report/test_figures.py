import itertools
import math
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.special import ndtr

from fedjaxsim.clock import Axis
from fedjaxsim.metrics import METRICS
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.report.figures import (
    envelope_figure,
    looks,
    privacy_figure,
    run_figure,
    trade_off_figure,
)
from fedjaxsim.report.labels import combination_label
from fedjaxsim.report.plots import save
from fedjaxsim.report.results import Run, envelope, last
from fedjaxsim.runs.sweep_results import default_figures
from fedjaxsim.runs.sweep_runs import expand_sweep

pytestmark = pytest.mark.usefixtures("drawn")
LEVELS = (0.0, 1.0, math.inf)
RATES = (0.1, 0.3)
ROUNDS = (0, 5, 10)
ONE = "ε = 1\nε ≤ 1 (zero-out, joint DP)"


def accuracy(level: float, z: float, rate: float, round_: int) -> float:
    """Local learning is best with much noise, global without, and η = 0.3 with any."""
    share = 1.0 if math.isinf(level) else level / (1 + level)
    return 0.01 * round_ * (0.5 + share * (0.3 - 0.1 * z)) + 0.1 * rate


def results(noises: tuple[float, ...], metric: str = "test_accuracy") -> list[Run]:
    """Levels of personalization × z × η, where η = 0.1 fails for the global model."""
    return [
        Run("", {"personalization": level, "noise_multiplier": z, "learning_rate": rate}, 0, [
            {"round": t, "train_loss": 1.0, metric: accuracy(level, z, rate, t),
             "epsilon": None if z == 0 and t else 0.4 * t / (z or 1), "epsilon_replace": None,
             "delta": 0.01, "failed": math.isinf(level) and rate == RATES[0]}
            for t in ROUNDS
        ])
        for level, z, rate in itertools.product(LEVELS, noises, RATES)
    ]  # fmt: skip


KEYS = ("personalization", "noise_multiplier", "learning_rate")


LEGEND = [f"personalization = {level}" for level in ("0", "1", "∞")]


def xs(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata(), np.float64).tolist()


def ys(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata(), np.float64).tolist()


def left_axes(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_title()]


def legend_texts(figure: Figure) -> list[str]:
    [legend] = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def drawn(figure: Figure, tmp_path) -> bytes:
    save(figure, tmp_path / "figure.png")
    return (tmp_path / "figure.png").read_bytes()[:4]


def level_figure(noises: tuple[float, ...], metric: str = "test_accuracy") -> Figure:
    table = results(noises, metric)
    best = envelope(table, KEYS, ["learning_rate"], metric)
    return envelope_figure(best, panels=["noise_multiplier"], lines=["personalization"], title="t")


def test_an_envelope_has_a_panel_per_noise_and_a_line_per_level(tmp_path):
    figure = level_figure((0.0, 1.0, 2.0))
    assert [axes.get_title() for axes in left_axes(figure)] == [
        "noise multiplier = 0 (no noise)",
        "noise multiplier = 1\nε ≤ 4 (zero-out, joint DP)",
        "noise multiplier = 2\nε ≤ 2 (zero-out, joint DP)",
    ]
    assert legend_texts(figure) == LEGEND
    first = left_axes(figure)[0]
    assert first.get_xlabel() == "rounds"
    assert first.get_ylabel() == "test accuracy (fraction)\nmean over clients"
    local, _, both = (ys(line) for line in first.get_lines())
    np.testing.assert_allclose(local, [accuracy(0, 0, 0.3, t) for t in ROUNDS])
    np.testing.assert_allclose(both, [accuracy(math.inf, 0, 0.3, t) for t in ROUNDS])
    assert figure.axes == left_axes(figure)  # one scale
    assert drawn(figure, tmp_path) == b"\x89PNG"


@pytest.mark.thorough
def test_ten_panels_stand_in_three_rows_and_excess_risk_on_a_log_axis(tmp_path):
    figure = level_figure(tuple(float(z) for z in range(10)), "test_excess_risk")
    axes = left_axes(figure)
    drawn(figure, tmp_path)
    corners = [panel.get_position() for panel in axes]
    assert len({round(corner.y0, 6) for corner in corners}) == 3
    assert len({round(corner.x0, 6) for corner in corners}) == 4
    assert [panel.get_yscale() for panel in axes] == ["log"] * 10
    shown = [any(text.get_visible() for text in panel.get_xticklabels()) for panel in axes]
    assert shown == [False] * 6 + [True] * 4


def test_panels_and_legend_do_not_overlap_or_leave_the_figure(tmp_path):
    figure = level_figure((0.0, 0.5, 1.0, 2.0, 4.0, 8.0))
    drawn(figure, tmp_path)
    boxes = [box for axes in figure.axes if (box := axes.get_tightbbox())]
    assert len(boxes) == 6
    boxes.append(figure.legends[0].get_window_extent())
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    width, height = figure.canvas.get_width_height()
    assert min(min(box.x0, box.y0) for box in boxes) >= -1
    assert max(box.x1 for box in boxes) <= width + 1
    assert max(box.y1 for box in boxes) <= height + 1


@pytest.mark.parametrize(
    ("seeds", "half", "said"),
    [
        # Mean 0.1, standard deviation 0.1, and t of two degrees of freedom.
        ((0, 1, 2), 0.1 / math.sqrt(3) * 4.30265, "mean over seeds, 95 %"),
        ((0, 2), 0.1, "mean and range of two seeds"),
    ],
)
def test_the_band_is_the_interval_over_seeds_or_the_range_of_two(seeds, half, said):
    runs = [
        Run("", {"lam": 1.0}, seed, [
            {"round": t, "train_loss": 1.0, "test_loss": 0.1 * seed + t, "epsilon": 0.0,
             "epsilon_replace": 0.0, "delta": 0.1, "failed": False}
            for t in (0, 1)
        ])
        for seed in seeds
    ]  # fmt: skip
    found = envelope(runs, ["lam"], [], "test_loss")
    figure = envelope_figure(found, panels=[], lines=["lam"], title="t")
    [axes] = figure.axes
    [band] = axes.collections
    heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
    np.testing.assert_allclose(
        sorted(set(np.round(heights, 9))),
        sorted([0.1 - half, 1.1 - half, 0.1 + half, 1.1 + half]),
        atol=1e-5,
    )
    assert axes.get_ylabel().endswith(said)
    assert figure.legends == []


def final(table: list[Run], best_over: list[str], metric: str = "test_accuracy") -> list[dict]:
    others = [key for key in KEYS if key not in best_over]
    return last(envelope(table, KEYS, best_over, metric), others)


def test_a_trade_off_has_a_line_per_level_and_infinity(tmp_path):
    table = final(results((0.0, 1.0, 4.0)), ["learning_rate"])
    figure = trade_off_figure(table, lines=["personalization"], title="t")
    [axes] = figure.axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "ε (zero-out, joint DP) at the end of training, nats"
    assert legend_texts(figure) == LEGEND
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "4", "∞"]
    for level, points in zip(LEVELS, axes.containers, strict=True):
        np.testing.assert_allclose(xs(points[0]), axes.get_xticks())
        expected = [accuracy(level, z, 0.3, 10) for z in (4.0, 1.0, 0.0)]
        np.testing.assert_allclose(ys(points[0]), expected)
    assert drawn(figure, tmp_path) == b"\x89PNG"


def test_what_releases_nothing_is_a_level_line_and_one_point_has_no_bound():
    rows = [
        {"algorithm": name, "round": 9, "metric": "test_accuracy", "mean": value, "half": None,
         "deviation": None, "seeds": 1, "epsilon": epsilon}
        for name, value, epsilon in (
            ("local", 0.5, 0.0), ("pmtl", 0.4, 3.0), ("pmtl", 0.6, 6.0), ("pmtl", 0.5, None),
            ("pmtl", 0.7, None),
        )
    ]  # fmt: skip
    figure = trade_off_figure(rows, lines=["algorithm"], title="t")
    [axes] = figure.axes
    assert ys(axes.get_lines()[0]) == [0.5, 0.5]
    [points] = axes.containers
    assert ys(points[0]) == [0.4, 0.6, 0.7]
    assert xs(points[0])[:2] == [3.0, 6.0]


def test_figures_of_a_sweep_in_which_all_failed_are_drawn(tmp_path):
    table = results((0.0, 1.0), "test_excess_risk")
    for row in itertools.chain(*(run.rows for run in table)):
        row["failed"] = True
    found = envelope(table, KEYS, ["learning_rate"], "test_excess_risk")
    noise, level = "noise_multiplier", "personalization"
    end = last(found, [noise, level])
    figures = [
        envelope_figure(found, panels=[noise], lines=[level], title="t"),
        trade_off_figure(end, lines=[level], title="t"),
    ]
    for figure in figures:
        assert drawn(figure, tmp_path) == b"\x89PNG"
    with pytest.raises(ValueError, match="row"):
        trade_off_figure([], lines=[], title="t")


def test_algorithms_have_colours_and_their_settings_dashes_or_shades():
    names = ["pmtl, lam = 0.1", "pmtl, lam = 0.2", "fedavg"]
    styles = [look.style for look in looks(["pmtl", "pmtl", "fedavg"], names)]
    assert [each["ls"] for each in styles] == ["solid", "dashed", "solid"]
    assert styles[0]["color"] == styles[1]["color"] != styles[2]["color"]
    shades = [look.style["color"] for look in looks(["pmtl"] * 3, names)]
    assert len(set(shades)) == 3
    # A system has its own colour, whatever it is beside.
    [alone] = looks(["pmtl"], ["PMTL"])
    assert alone.style["color"] == styles[0]["color"]


def test_combinations_are_named_without_what_is_not_set():
    assert combination_label(["noise_multiplier", "target_epsilon"], (None, math.inf)) == (
        "ε = ∞ (no noise)"
    )
    assert combination_label(["noise_multiplier", "target_epsilon"], (None, None)) == (
        "noise multiplier and ε not set"
    )


def default(*tables: dict, **along: Any) -> dict[str, Figure]:
    """The figures of made-up results of a plan."""
    plan = expand_sweep({}, tables)
    runs = []
    for index, run in enumerate(plan.runs):
        settings = dict(plan.swept[index])
        rows = [
            {"round": t, "train_loss": 1.0,
             "test_accuracy": 0.01 * t + 0.1 * (run.get("learning_rate") or 0.1),
             "epsilon": run.target_epsilon if t and run.target_epsilon < math.inf else None,
             "epsilon_replace": None, "delta": run.get("delta") or 0.1, "failed": False}
            for t in ROUNDS
        ]  # fmt: skip
        if run.algorithm == "local":
            rows = [row | {"epsilon": 0.0} for row in rows]
        runs.append(Run(str(index), settings, settings.pop("seed", 0), rows))
    return default_figures(plan, runs, "test_accuracy", **along)


def test_a_sweep_gets_the_figures_that_suit_its_keys(tmp_path):
    rates = {"learning_rate": (0.1, 0.3), "seed": (0, 1)}
    figures = default(rates)
    assert set(figures) == {"envelopes.png"}
    assert legend_texts(figures["envelopes.png"]) == ["learning rate = 0.1", "learning rate = 0.3"]
    figures = default({**rates, "lam": (0.1, 1.0, 3.0), "epsilon": (1.0, math.inf)})
    assert set(figures) == {"envelopes.png", "trade_off.png"}
    curves = figures["envelopes.png"]
    assert [axes.get_title() for axes in left_axes(curves)] == [ONE, "ε = ∞ (no noise)"]
    assert legend_texts(curves) == ["lam = 0.1", "lam = 1", "lam = 3"]
    assert (
        curves.get_suptitle() == "PMTL on digits; δ = 0.1; best over learning rate; mean of 2 seeds"
    )
    assert legend_texts(figures["trade_off.png"]) == legend_texts(curves)
    for figure in figures.values():
        assert drawn(figure, tmp_path) == b"\x89PNG"


def test_a_line_that_spends_nothing_beside_others_says_so_and_rounds_are_whole():
    both = default({"algorithm": ("local", "pmtl"), "epsilon": (1.0,)})["envelopes.png"]
    assert sorted(legend_texts(both)) == ["Local, ε = 0", "PMTL"]
    [axes] = both.axes
    for ticks in (axes.xaxis.get_major_locator().tick_values(0, end) for end in (3, 10)):
        assert all(tick == round(tick) for tick in ticks)
    alone = default({"algorithm": ("local",), "learning_rate": (1.0, 2.0), "seed": (0, 1)})[
        "envelopes.png"
    ]
    assert not any("ε" in text for text in legend_texts(alone))


@pytest.mark.thorough
def test_other_sweeps_are_drawn_too(tmp_path):
    sweeps = [
        [{"seed": (0, 1, 2)}],
        [{"epsilon": (1.0, 2.0)}],
        [{"lam": (0.1, 1.0), "epsilon": (1.0,)}],
        [{"sampling_rate": (0.1, 0.2), "algorithm": ("pmtl", "fedavg")}],
        [{"algorithm": ("local",)}, {"epsilon": (1.0,), "lam": (0.1,)}, {"noise_multiplier": (1,)}],
        [{"delta": (0.1, 0.2), "epsilon": (1.0, 2.0)}],
        [
            {
                "lam": tuple(range(1, 9)),
                "server_learning_rate": (1.0, 2.0),
                "clip": tuple(range(1, 4)),
            }
        ],
        [{"model": ("mlp",), "hidden": ((3,), (4, 5)), "learning_rate": (1.0, 2.0)}],
    ]
    panels = [len(left_axes(default(*tables)["envelopes.png"])) for tables in sweeps]
    # One that spends a finite ε says so; what releases nothing is in the panels of the others.
    assert panels == [0, 2, 1, 0, 2, 2, 0, 0]
    for tables in sweeps:
        for figure in default(*tables).values():
            assert drawn(figure, tmp_path) == b"\x89PNG"


def test_curves_of_a_sweep_and_of_a_run_stand_where_each_has_sent_its_bytes():
    tables = {"sampling_rate": (0.1, 0.2), "learning_rate": (0.1, 0.3)}
    sent = {"0": 1.0, "1": 1.0, "2": 2.0, "3": 2.0}  # by run; the best learning rate is 0.3
    axes = default(tables, axis=Axis("bytes"), per_round=sent)["envelopes.png"].axes[0]
    low, high = (xs(line) for line in axes.get_lines() if len(xs(line)) == len(ROUNDS))
    assert (low, high) == ([0, 5, 10], [0, 10, 20])
    assert axes.get_xlabel() == "megabytes sent by clients (expected)"
    rows = [{"round": t, "test_accuracy": 0.5, "epsilon": 0.0} for t in ROUNDS]
    [axes] = run_figure(rows, "", METRICS, Axis("bytes"), 3.0).axes
    assert xs(axes.get_lines()[0]) == [0, 15, 30]


def test_a_run_says_that_its_evaluations_are_of_a_sample():
    rows = [{"round": t, "test_accuracy": 0.5, "epsilon": 0.0} for t in ROUNDS]
    [whole] = run_figure(rows, "").axes
    [sampled] = run_figure([rows[0] | {"sampled_clients": 1500}, *rows[1:]], "").axes
    assert "sampled" not in whole.get_ylabel()
    assert "1,500 sampled clients" in sampled.get_ylabel()


def test_curves_of_a_plan_are_those_of_its_guarantee():
    found = report([PrivacySpend(SamplingScheme("full", 9, 9), GAUSSIAN, (Entry(4, 1, 9),))], 1e-4)
    trade = found.curve()
    errors, budgets = privacy_figure([trade, found.curve("replace")], "").axes
    _, curve, _ = errors.lines
    assert np.interp(0.5, xs(curve), ys(curve)) == pytest.approx(ndtr(-0.75), abs=1e-3)
    assert (xs(budgets.lines[0])[0], ys(budgets.lines[0])[0]) == (trade.deltas[0], 0)
