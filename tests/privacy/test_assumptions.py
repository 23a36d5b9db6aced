"""Assumptions name private numbers that are taken as public."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.problems import classification

from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.ppsgd import ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.npz import load_npz, save_npz
from fedjaxsim.data.partition import dirichlet, iid, pathological
from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import hold_out, split
from fedjaxsim.data.tables.load import load
from fedjaxsim.data.transforms import drop_constant_columns, unit_rows
from fedjaxsim.privacy.assumptions import DECLARED_ROWS
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.runs.assemble import simulation_of
from fedjaxsim.runs.settings import run_config
from fedjaxsim.simulation import Simulation

UNDECLARED, TASK = classification([10] * 4)
CLIENTS = dataclasses.replace(UNDECLARED, max_rows=10)


def build(algorithm=None, population=CLIENTS, mechanism=gaussian()):
    algorithm = pmtl(TASK) if algorithm is None else algorithm
    sampling = full_participation()
    return Simulation(algorithm, population, sampling, Minibatches(3, steps=1), mechanism)


def named(simulation):
    """What a simulation takes as public besides the declared bound on rows."""
    bound, *others = simulation.public
    assert bound == DECLARED_ROWS.format(10)
    return tuple(others)


def test_without_such_numbers_nothing_is_named():
    assert named(build(mechanism=gaussian())) == ()
    assert named(build(ppsgd(TASK, objective="average"))) == ()
    # A number that is one for all is a setting, and no number of a client.
    assert named(build(ppsgd(TASK, objective="weighted", sizes=3))) == ()


def test_the_bound_on_rows_is_named_unless_it_is_declared():
    [sentence] = build(population=UNDECLARED).public
    assert sentence.startswith("The largest number of rows of a client in each split")


def test_exact_sums_are_named():
    sim = build(mechanism=gaussian(exact_sums=True))
    [sentence] = named(sim)
    assert "summed as integers" in sentence
    hparams = sim.hyperparameters(clip=1.0, noise_multiplier=1.0)
    assert sentence in sim.guarantee(sim.init(0, hparams)).find("replace").assumptions


def test_a_simulation_names_what_each_part_names_once():
    task = TASK._replace(public=("of the task",))
    sim = build(
        pmtl(task)._replace(public=("of the algorithm", "of two")),
        dataclasses.replace(CLIENTS, public=("of the data", "of two")),
        gaussian()._replace(public=("of the mechanism",)),
    )
    everything = ("of the data", "of two", "of the task", "of the algorithm", "of the mechanism")
    assert named(sim) == everything
    assert named(dataclasses.replace(sim, algorithm=pmtl(task))) == (
        *everything[:3],
        "of the mechanism",
    )
    # An algorithm brings its task.
    assert named(dataclasses.replace(sim, algorithm=pmtl(TASK))) == (
        *everything[:2],
        "of the mechanism",
    )
    assert named(sim.with_population(CLIENTS)) == (
        "of the task",
        "of the algorithm",
        "of two",
        "of the mechanism",
    )


def test_weights_and_sizes_of_clients_are_named():
    (divisor,) = named(build(ppsgd(TASK, objective="weighted", sizes=[1, 2, 3, 3])))
    assert divisor.startswith("M = Σ m_i, the divisor of the weighted objective, is taken as")
    (weights,) = named(build(mechanism=gaussian([1.0, 2.0, 3.0, 4.0])))
    assert weights.startswith("The clients' weights, and their sum")


def test_what_a_transform_reads_of_all_clients_stays_with_the_population(tmp_path):
    x = np.arange(24.0).reshape(12, 2) * [1, 0] + [1, 1]  # the second feature is constant
    whole = Population.from_flat({"x": x, "y": [0, 1, 2] * 4}, [4, 3, 3, 2])
    assert whole.public == ()
    dropped = drop_constant_columns(whole)
    assert dropped.public == (
        "Which 1 of the 2 features are the same in all rows, and were dropped, is read from all "
        "clients' data and taken as public.",
    )
    tested = split(unit_rows(dropped), test=0.3, seed=0)
    assert tested.public == dropped.public
    assert [part.public for part in hold_out(tested, 0.5, seed=0)] == [dropped.public] * 2
    save_npz(tmp_path / "kept.npz", tested)
    assert load_npz(tmp_path / "kept.npz").public == dropped.public
    pooled = load(f"npz:{tmp_path / 'kept.npz'}", test=0.2)
    assert pooled.public == dropped.public
    cut = np.frombuffer(b'{"public": ["a', np.uint8)
    np.savez(tmp_path / "cut.npz", x=x, counts=[12], about=cut)
    with pytest.raises(ValueError, match="about"):
        load_npz(tmp_path / "cut.npz")


def test_a_division_by_label_is_named():
    fields = {"x": np.arange(12.0), "y": np.array([0, 1, 2] * 4)}
    assert iid(fields, 3, seed=0).public == ()
    for divided in (dirichlet(fields, 3, 1.0, seed=0), pathological(fields, 3, 2, seed=0)):
        (sentence,) = divided.public
        assert sentence.startswith("The partition was drawn by the labels of all rows")


def test_what_the_command_line_reads_is_named():
    def of(**settings):
        return named(simulation_of(run_config(**settings), CLIENTS))

    classes = (
        "The number of classes, 3, is the largest label of all clients and one more; it is taken "
        "as public."
    )
    assert of(algorithm="pmtl") == (classes,)
    divisor = (
        "M = Σ min(b, n_k), the divisor of the weighted objective, is made of the clients' numbers "
        "of training rows n_k and taken as public."
    )
    assert of(algorithm="ppsgd", objective="weighted") == (classes, divisor)
    assert of(algorithm="ppsgd") == (classes,)


def test_public_is_a_tuple_of_sentences():
    one: Any = "M is public"  # whose letters would be sentences
    with pytest.raises(ValueError, match=r"algorithm.*public"):
        build(pmtl(TASK)._replace(public=one))
