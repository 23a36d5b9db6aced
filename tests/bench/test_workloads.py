"""The list of workloads, and each kind of them on a few clients."""

import re

import jax
import numpy as np
import pytest

from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.bench import systems
from fedjaxsim.bench.measure import measure
from fedjaxsim.bench.workloads import GROWTH, OF_SYSTEMS, WORKLOADS, select


def test_names_are_distinct_and_fit_a_command_line():
    assert len(WORKLOADS) == len(OF_SYSTEMS) + len(GROWTH)
    curves = {workload.curve for workload in GROWTH}
    for workload in WORKLOADS.values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", workload.name)
        assert workload.name not in curves
        assert workload.summary
    for workload in GROWTH:
        assert workload.name == f"{workload.curve}-{workload.size}"


def test_every_system_and_the_loop_are_there():
    for name in (
        "femnist-cnn-fedavg", "femnist-cnn-pmtl", "femnist-cnn-pmtl-offset", "femnist-cnn-dpfedmtl",
        "softmax-1k", "softmax-10k", "softmax-1k-own", "softmax-10k-own", "ppsgd-synthetic",
        "ppsgd-grid", "empty-round", "tiny-round", "text-gru-fedavg", "text-gru-pmtl",
        "text-transformer-fedavg", "text-transformer-pmtl",
        *(f"{'linear' if system.linear else 'mlp'}-{name}" for name, system in SYSTEMS.items()),
    ):  # fmt: skip
        assert name in WORKLOADS


def test_a_curve_stands_for_its_points_and_the_order_is_that_of_the_list():
    chosen = select("growth-steps, tiny-round,softmax-1k,tiny-round")
    assert [workload.name for workload in chosen] == [
        "softmax-1k", "tiny-round",
        "growth-steps-1", "growth-steps-10", "growth-steps-100", "growth-steps-1000",
    ]  # fmt: skip
    assert select(None) == (*OF_SYSTEMS, *GROWTH)


@pytest.mark.parametrize(
    ("name", "close"),
    [("sofmax-1k", "softmax-1k"), ("growth-step", "growth-steps"), ("femnist", "femnist")],
)
def test_an_unknown_name_is_refused_with_the_closest_one(name, close):
    with pytest.raises(ValueError, match=rf"unknown workload '{name}'.*{close}"):
        select(f"tiny-round,{name}")


def test_no_names_are_refused():
    with pytest.raises(ValueError, match="names separated by commas"):
        select(" , ")


def test_the_growth_in_parameters_is_what_the_points_say():
    load = WORKLOADS["growth-parameters-985"].build(clients=2)
    personal = load.init().personal
    assert sum(leaf[0].size for leaf in jax.tree.leaves(personal)) == 985


@pytest.mark.thorough
def test_nobody_is_drawn_in_the_empty_round_and_its_state_has_20_leaves():
    load = systems.empty_round(rounds=50)
    state = load.init()
    assert len(jax.tree.leaves(state)) == 20
    state, metrics = load.advance(state, load.rounds)
    assert int(state.round) == 50
    assert not np.any(metrics["participants"])


@pytest.mark.thorough
def test_everyone_takes_part_in_the_tiny_round():
    load = WORKLOADS["tiny-round"].build(rounds=3)
    _, metrics = load.advance(load.init(), load.rounds)
    np.testing.assert_array_equal(metrics["participants"], [10, 10, 10])


@pytest.mark.parametrize(
    ("name", "changes", "updates"),
    [
        # The expected cohort of 6 of 206/100 clients.
        ("femnist-cnn-pmtl-offset", {"clients": 6}, 600 / 206),
        ("softmax-1k", {"clients": 4}, 4),
        ("mlp-local", {"clients": 4, "expected": 2}, 2),
        ("linear-mpmtl", {"clients": 4}, 4),
        ("ppsgd-synthetic", {"clients": 4}, 4),
        ("text-gru-fedavg", {"clients": 4, "expected": 2, "length": 3, "hidden": (4,)}, 2),
        pytest.param(
            "text-transformer-pmtl",
            {"clients": 4, "expected": 2, "length": 3, "hidden": (4,)},
            2,
            marks=pytest.mark.thorough,
        ),
        ("growth-cohort-10", {"clients": 20, "expected": 3}, 3),
        ("growth-population-100", {"clients": 200, "expected": 10}, 10),
        ("growth-steps-10", {"clients": 4}, 4),
    ],
)
def test_workloads_count_the_updates_of_their_expected_cohort(name, changes, updates):
    load = WORKLOADS[name].build(rounds=1, **changes)
    assert load.work.updates == pytest.approx(updates)
    assert min(load.work.flops, load.work.bytes, load.data_bytes) > 0
    assert load.data == "synthetic"
    assert (load.evaluate is None) == name.startswith("growth")


@pytest.mark.thorough
def test_a_small_grid_is_measured_with_all_its_numbers():
    settings = systems.grid_settings(systems._ppsgd(6, None))
    assert len(settings) == 990
    load = systems.ppsgd_grid(settings[:4], clients=6, rounds=2)
    assert load.work.updates == 4 * 6
    numbers = measure(load, 1, ceilings=False)
    assert 0 < numbers["evaluation_share"] < 1
    assert numbers["updates_per_second"] == pytest.approx(24 * numbers["rounds_per_second"])
    # θ_i of every run and client, w of every run, and little else.
    assert numbers["state_mb"] == pytest.approx(4 * 4 * 7 * 100 / 1e6, rel=0.2)
    # One row for training and one for testing.
    assert numbers["data_mb"] == 4 * 6 * 2 * 100 / 1e6
    assert numbers["peak_mb"] > numbers["state_mb"]
