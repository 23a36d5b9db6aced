"""The picture of a comparison: colours, markers, bands, title and panels."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.clock import Axis, Clock, RoundWork
from fedjaxsim.report.figures import comparison_figure, looks_of
from fedjaxsim.report.plots import COLOURS, colours_of, marked_points, save
from fedjaxsim.report.progress import decimals
from fedjaxsim.report.results import Run, systems
from fedjaxsim.runs.comparison import ComparedRun, Comparison
from fedjaxsim.runs.directory import settings_of_system

pytestmark = pytest.mark.usefixtures("drawn")


def run(
    algorithm,
    *,
    seed=0,
    epsilon: float | None = 2.0,
    data="digits",
    sent=None,
    work=None,
    **settings,
):
    config = {"algorithm": algorithm, "seed": seed, "data": data, **settings}
    config["resolved"] = {"clients": 5, "bytes_sent": sent, "work": work}
    rows = [
        {"round": t, "test_accuracy": 0.1 * t + 0.2 * seed, "epsilon": epsilon and epsilon * t / 4,
         "delta": 0.01}
        for t in range(5)
    ]  # fmt: skip
    return Run("", settings_of_system(config), seed, rows, config)


def figure_of(*runs, columns=()):
    found = systems([dataclasses.replace(each, name=f"run-{k}") for k, each in enumerate(runs)])
    return comparison_figure(found, columns)


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_title_has_data_and_epsilon_and_the_legend_what_differs():
    alike = figure_of(run("pmtl"), run("fedavg"), run("local", epsilon=0.0))
    assert alike.get_suptitle() == "digits, 5 clients; ε: zero-out, joint DP, δ = 0.01"
    assert legend(alike) == ["PMTL, ε ≤ 2", "FedAvg, ε ≤ 2", "Local, ε = 0"]
    [axes] = alike.axes
    assert len({line.get_linewidth() for line in axes.get_lines()}) == 1
    apart = figure_of(run("pmtl"), run("pmtl", epsilon=None, data="csv:a/b.csv"), run("mine:own"))
    assert apart.get_suptitle() == "ε: zero-out, joint DP, δ = 0.01"
    assert legend(apart) == ["PMTL, ε ≤ 2", "PMTL, ε = ∞", "own, ε ≤ 2"]
    assert [axes.get_title() for axes in apart.axes] == ["digits, 5 clients", "b, 5 clients"]
    settings = figure_of(run("pmtl", lam=0.1), run("pmtl", lam=0.2), run("pmtl", lam=0.2))
    assert legend(settings) == ["PMTL, ε ≤ 2, lam = 0.1", "run-1", "run-2"]
    columns = figure_of(run("pmtl", one_hot=["sex", "ward"]), run("pmtl", one_hot=["sex"]))
    assert legend(columns) == ["PMTL, ε ≤ 2, one hot = sex, ward", "PMTL, ε ≤ 2, one hot = sex"]
    lists = figure_of(run("pmtl", lam=[0.1] * 999 + [0.3]), run("pmtl", lam=0.2))
    assert legend(lists) == ["PMTL, ε ≤ 2, lam = 0.1 to 0.3", "PMTL, ε ≤ 2, lam = 0.2"]
    with pytest.raises(ValueError, match=r"did you mean .test_accuracy"):
        figure_of(run("pmtl"), columns=["accuracy"])
    nothing = figure_of(run("local", epsilon=0.0))
    assert nothing.get_suptitle() == "digits, 5 clients; Local, ε = 0"
    assert nothing.legends == []


def test_a_setting_that_few_systems_of_a_sweep_read_differs_if_it_is_swept():
    base = {"name": "", "settings": {}, "seed": 0, "rows": (), "path": Path(), "guarantee": {}}
    runs = [
        ComparedRun(**base, config={"algorithm": name, **read}, draws=(), swept=swept)
        for name, read, swept in (
            ("ditto", {"lam": 0.1, "epsilon": 1.0, "pull": "l2"}, {"target_epsilon": 1.0}),
            ("pmtl", {"lam": 0.2, "epsilon": 1.0, "pull": None}, {"target_epsilon": 1.0}),
            ("local", {"pull": None}, {}),
        )
    ]
    apart = Comparison(tuple(runs)).settings_that_differ
    assert set(apart) == {"algorithm", "lam", "epsilon", "pull"}
    swept = Comparison(tuple(dataclasses.replace(run, sweep="s") for run in runs))
    assert set(swept.settings_that_differ) == {"algorithm", "lam", "epsilon"}


def test_curves_over_bytes_stand_where_each_system_has_sent_them():
    found = systems([run("fedavg", sent=2e6), run("scaffold", sent=4e6)])
    [axes] = comparison_figure(found, axis=Axis("bytes")).axes
    fedavg, scaffold, *_ = (line.get_xdata() for line in axes.get_lines())
    np.testing.assert_array_equal(fedavg, [0, 2, 4, 6, 8])
    np.testing.assert_array_equal(scaffold, [0, 4, 8, 12, 16])
    assert axes.get_xlabel() == "megabytes sent by clients (expected)"
    with pytest.raises(ValueError, match="run it again"):
        comparison_figure(systems([run("fedavg")]), axis=Axis("bytes"))


def test_curves_over_seconds_stand_at_the_time_of_their_own_work():
    late = RoundWork(operations=3e6, message_bytes=500.0, draws=4, answers=1.0)
    runs = [
        run("fedavg", work=late.record()),
        run("ditto", work=late._replace(at_work=7.0).record()),
    ]
    clock = Clock(speed=1e6, bandwidth=1e3, spread=0.0)
    [axes] = comparison_figure(systems(runs), axis=Axis("seconds", clock)).axes
    fedavg, ditto, *_ = (line.get_xdata() for line in axes.get_lines())
    np.testing.assert_array_equal(fedavg, [0, 3.5, 7, 10.5, 14])
    np.testing.assert_array_equal(ditto, [0, 0.5, 1, 1.5, 2])
    assert axes.get_xlabel().endswith("1e+06 multiplications/s, 1000 bytes/s, spread 0")
    with pytest.raises(ValueError, match="run it again"):
        comparison_figure(systems([run("fedavg")]), axis=Axis("seconds"))


@pytest.mark.thorough
def test_epsilon_has_a_panel_where_it_is_asked_for_and_seeds_have_bands(tmp_path):
    runs = [
        run(name, seed=seed)
        for name in ("pmtl", "ditto") for seed in (0, 1)
    ]  # fmt: skip
    [axes] = figure_of(*runs).axes
    # Values 0 and 0.2 at round 0, 0.4 and 0.6 at the end: their mean, and their range.
    [first, _] = axes.get_lines()
    assert np.asarray(first.get_ydata())[0] == pytest.approx(0.1)
    low = np.asarray(axes.collections[0].get_paths()[0].vertices)[:, 1].min()
    high = np.asarray(axes.collections[0].get_paths()[0].vertices)[:, 1].max()
    assert (low, high) == pytest.approx((0, 0.6))
    figure = figure_of(*runs, columns=["test_accuracy", "epsilon"])
    _, privacy = figure.axes
    np.testing.assert_array_equal(privacy.get_lines()[0].get_ydata(), [0, 0.5, 1, 1.5, 2])
    assert privacy.get_ylabel() == "bound on ε spent (nats)\nzero-out, joint DP"
    for ending, start in ((".pdf", b"%PDF"), (".svg", b"<?xml"), (".png", b"\x89PNG")):
        first, again = (tmp_path / f"{name}{ending}" for name in "ab")
        for path in (first, again):
            save(figure_of(*runs, columns=["test_accuracy", "epsilon"]), path)
        assert first.read_bytes().startswith(start)
        assert first.read_bytes() == again.read_bytes()
    save(figure, first)
    figure.canvas.draw()
    boxes = [box for axes in figure.axes if (box := axes.get_tightbbox())]
    boxes.append(figure.legends[0].get_window_extent())
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    with pytest.raises(ValueError, match="got test_loss"):
        figure_of(*runs, columns=["test_loss"])
    with pytest.raises(ValueError, match="got epsilon"):
        figure_of(run("pmtl", epsilon=None), columns=["epsilon"])


def test_an_interval_stays_in_the_metrics_range_and_bounds_on_epsilon_never_fall():
    rows = [{"round": t, "test_nmse": 0.5, "epsilon": e, "delta": 0.1}
            for t, e in enumerate((0.0, 1.0, 2.0, 1.5))]  # fmt: skip
    runs = [
        Run("", {"algorithm": "pmtl"}, seed, [row | {"test_nmse": value} for row in rows])
        for seed, value in enumerate((0.1, 0.7, 1.3))
    ]
    found = systems(runs)
    metric, spent = comparison_figure(found, ["test_nmse", "epsilon"]).axes
    band = np.asarray(metric.collections[0].get_paths()[0].vertices)[:, 1]
    half = 4.30265 * 0.6 / math.sqrt(3)
    assert (band.min(), band.max()) == pytest.approx((0, 0.7 + half), abs=1e-4)
    # ε ≤ 1.5 after three rounds, so it was not more after two.
    np.testing.assert_array_equal(spent.get_lines()[0].get_ydata(), [0, 1, 1.5, 1.5])


def test_the_last_evaluation_has_a_marker_and_seven_of_many_have():
    for count in (1, 2, 5, 40):
        assert marked_points(count, 0)[0] == 0
        assert all(marked_points(count, place)[-1] == count - 1 for place in range(9))
    assert {len(marked_points(100, place)) for place in range(7)} == {7, 8}
    assert marked_points(0, 3) == []


def test_a_pooled_metric_is_no_mean_over_clients_and_a_diverged_one_is_short():
    rows = [{"round": t, "test_nmse": 0.5 * t, "epsilon": 0.0, "delta": 0.1} for t in range(3)]
    [axes] = figure_of(Run("", {"algorithm": "pmtl"}, 0, rows)).axes
    assert axes.get_ylabel() == "test nMSE (MSE / variance)\npooled over clients"
    assert (decimals(2.64e37), decimals(0.12345), decimals(-999.9999)) == (
        "2.64e+37", "0.123", "-1000.000",
    )  # fmt: skip


def test_systems_differ_in_colour_settings_in_dashes_and_all_in_markers():
    for names in itertools.combinations(list(SYSTEMS)[::3], 3):
        assert len({colour for colour, _ in colours_of(names).values()}) == 3
    everything = colours_of(SYSTEMS)
    assert len(set(everything.values())) == min(len(SYSTEMS), 4 * len(COLOURS))
    # Common systems have hues of their own, whatever they are beside; the next six other colours.
    common = ("pmtl", "fedavg", "ditto", "local", "fedprox", "ppsgd")
    assert [everything[name] for name in common] == [(c, "solid") for c in COLOURS[:6]]
    eight = colours_of([*common, "ifca", "apfl"])
    assert len({colour for colour, _ in eight.values()}) == 8
    found = systems([run("pmtl", lam=0.1), run("pmtl", lam=0.2), run("ditto")])
    one, other, third = (look.style for look in looks_of(found))
    assert one["color"] == other["color"] != third["color"]
    assert one["ls"] != other["ls"]
    assert len({each["marker"] for each in (one, other, third)}) == 3
    alone = [look.style for look in looks_of(found[:2])]
    assert len({each["color"] for each in alone}) == 2
