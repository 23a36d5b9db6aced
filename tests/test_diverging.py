"""Runs that diverge are said to, in Python too; and steps that cannot diverge on bounded rows."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import simulations
from support.simulations import SEGMENT

import fedjaxsim as fjs
from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.divergence import DivergingWarning
from fedjaxsim.models import linear
from fedjaxsim.runs.assemble import simulation_of
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config

CLIENTS, ROWS, FEATURES, TABLES, ROUNDS = 12, 6, 4, 200, 100
HEADS = ("dpfedmtl", "dpfedmtl-as-published", "fedper", "fedrep", "fedbn")


def tables(count):
    """Random tables in [-1, 1], and rows at the bound: corners, one for all, one for each client.

    Returns:
      x (count, n, d) and y (count, n) float32.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (count, CLIENTS, ROWS, FEATURES))
    x[1::4] = np.sign(x[1::4])
    x[2::4] = np.sign(x[2::4, :1, :1])
    x[3::4] = np.sign(x[3::4, :, :1])
    y = rng.uniform(-1, 1, (count, CLIENTS * ROWS))
    return x.reshape(count, -1, FEATURES).astype(np.float32), y.astype(np.float32)


def bounded(x, y):
    columns = fjs.data.Columns(tuple(f"x{j}" for j in range(FEATURES)), bound=(1,) * FEATURES)
    population = fjs.data.Population.from_flat({"x": x, "y": y}, np.full(CLIENTS, ROWS))
    return dataclasses.replace(population, columns={"x": columns})


@pytest.mark.thorough
@pytest.mark.parametrize("name", [n for n, each in SYSTEMS.items() if not each.softmax])
def test_no_system_diverges_on_bounded_tables_at_its_default_step(name):
    x, y = tables(TABLES)
    settings = {"head": "bias"} if name in HEADS else {}
    settings |= {"noise_multiplier": 0.0} if name == "dpfedmtl-as-published" else {}
    settings |= {"penalty": "vanilla"} if name == "finetune" else {}
    settings |= {} if SYSTEMS[name].whole_pass else {"batch_size": 3}
    config = run_config(algorithm=name, loss="squared", data="random", rounds=ROUNDS, **settings)
    experiment = prepare(config, simulation_of(config, bounded(x[0], y[0])))
    simulation, hparams = experiment.simulation, experiment.hparams.as_arrays()
    assert float(experiment.hparams.learning_rate) <= 1 / (FEATURES + 1)
    program, rows = simulation.program, simulation.rows["train"]

    def loss_of_one(fields):
        own = dataclasses.replace(rows, fields=rows.fields | fields)
        key = jax.random.key(1, impl="threefry2x32")
        state, _ = program.rounds(program.init(key, hparams), hparams, own, rounds=ROUNDS)
        return program.evaluate(state, hparams, own).sums["squared_error"].sum()

    end = jax.jit(jax.vmap(loss_of_one))({"x": jnp.asarray(x), "y": jnp.asarray(y)})
    # Of a model that predicts 0. Momentum adds up the noise of minibatches over 1/(1 − β) rounds.
    most = 2 / (1 - float(experiment.hparams.get("server_momentum", 0.0)))
    assert np.all(end < most * np.square(y).sum(axis=1))


@pytest.mark.parametrize(
    ("factory", "values", "curvature"),
    [
        (fjs.fedavg, {}, lambda loss: loss),
        (fjs.pmtl, {"lam": 3.0}, lambda loss: loss + 3),
        (fjs.ppsgd, {}, lambda loss: 2 * loss),
        (fjs.ppsgd, {"personalization": float("inf")}, lambda loss: loss),
        (fjs.stl, {"ridge": 0.5}, lambda loss: loss + 0.5),
    ],
)
def test_the_default_step_is_one_over_the_curvature_of_bounded_rows(factory, values, curvature):
    rng = np.random.default_rng(0)
    population = fjs.data.Population.from_clients(
        [{"x": 9 * rng.normal(size=(4, 3)), "y": rng.normal(size=4)} for _ in range(3)]
    )
    for bias in (False, True):
        task = fjs.tasks.squared(linear((3,), 1, bias=bias))
        silent = {"mechanism": fjs.no_release()} if factory is fjs.stl else {}
        batches = fjs.Minibatches(4, steps=1)

        def learning_rate(data, task=task, silent=silent, batches=batches):
            parts = factory(task), data, fjs.full_participation(), batches
            return fjs.Simulation(*parts, **silent).hyperparameters(**values).learning_rate

        assert learning_rate(population) == 0.1  # nothing bounds the rows
        wanted = 1 / curvature(1 + bias)
        assert learning_rate(fjs.data.unit_rows(population)) == pytest.approx(wanted)


def test_a_run_that_diverges_says_so(shared_full):
    population, _ = simulations.problem()
    with_pay = population.fields["x"] * np.array([1, 1, 1000], np.float32)
    fields = {**population.fields, "x": with_pay}
    simulation = shared_full.with_population(dataclasses.replace(population, fields=fields))
    hparams = simulation.hyperparameters()
    for rounds in (3 * SEGMENT, SEGMENT):  # seen in the course of a run, and at its end
        state = simulation.init(0, hparams)
        with pytest.warns(DivergingWarning, match=r"diverges from round \d"):
            simulation.run(state, hparams, rounds, eval_every=SEGMENT)
    with warnings.catch_warnings(action="error"):
        small = simulation.hyperparameters(learning_rate=1e-8)
        simulation.run(simulation.init(0, small), small, 3 * SEGMENT, eval_every=SEGMENT)


def test_targets_that_are_all_one_number_leave_nmse_undefined_by_name():
    clients = [{"x": np.ones((4, 1)) * k, "y": np.arange(4.0) / 4} for k in range(1, 4)]
    population = fjs.data.Population.from_clients(clients)
    x, y = population.fields["x"], np.tile([0.0, 0.5, 1.0, 1.0], 3)
    population = fjs.data.Population.from_flat({"x": x, "y": y}, [[2, 0, 2]] * 3)
    task = fjs.tasks.squared(linear((1,), 1))
    simulation = fjs.Simulation(fjs.fedavg(task), population, fjs.full_participation())
    hparams = simulation.hyperparameters()
    with pytest.warns(UserWarning, match="nmse is undefined: the targets of all 6 test rows are 1"):
        found = simulation.evaluate(simulation.init(0, hparams), hparams)
    summary = found.summary()
    assert np.isnan(summary["test_nmse"])
    assert summary["test_nmse_undefined"] == 3
    assert "test_failed" not in summary
