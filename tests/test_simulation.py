"""The facade: what it leaves alone, what it refuses before any compute, how it shows itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import simulations
from support.problems import classification, read_by

import fedjaxsim as fjs
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.mechanisms.transforms import (
    Transform,
    chosen_coordinates,
    quantization,
    random_coordinates,
    random_projection,
    transformed,
)
from fedjaxsim.privacy.samplers import Sampling, full_participation, poisson
from fedjaxsim.simulation import Simulation, SimulationState
from fedjaxsim.tasks.task import known_regression

PRIVATE = {
    "learning_rate": 0.1,
    "lam": 0.2,
    "clip": 0.3,
    "noise_multiplier": 0.8,
    "sampling_rate": 0.4,
}
EPOCH = Minibatches(4, epochs=1)
CLIENTS, TASK = classification([10] * 4)


def simulation(algorithm=pmtl, population=CLIENTS, task=TASK, **settings):
    return Simulation(algorithm(task), population, poisson(1.0), EPOCH, **settings)


@pytest.mark.thorough
def test_a_run_leaves_what_the_user_passed_alone():
    mine = {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(3)}
    sim = simulation(task=TASK._replace(init=lambda key: mine))
    hparams = read_by(sim, **PRIVATE)
    key = jax.random.key(0)
    sim.run(sim.init(key, hparams), hparams, 2)
    np.testing.assert_array_equal(mine["kernel"], np.ones((3, 4)))
    jax.random.split(key)  # raises if its buffer was donated


# --- errors before any compute -----------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"sampling_rate": 1.5},
        {"sampling_rate": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": np.nan},
        {"clip": 0.0},
        {"clip": 1e-20},
        {"clip": np.inf},
        {"learning_rate": -0.1},
        {"lam": np.inf},
        {"server_learning_rate": -1.0},
        {"lam": np.ones(2)},
        {"noise_multiplier": np.ones((2, 2))},
    ],
)
def test_bad_hyperparameters_are_refused(shared_pmtl, change):
    sim = shared_pmtl
    [name] = change
    for make in (
        lambda: sim.hyperparameters(**(PRIVATE | change)),
        lambda: sim.hyperparameters(**PRIVATE).replace(**change),
    ):
        with pytest.raises(ValueError, match=name):
            sim.init(0, make())


def test_bad_uses_are_refused(shared_pmtl):
    sim = shared_pmtl
    hparams = sim.hyperparameters(**PRIVATE)
    state = sim.init(0, hparams)
    with pytest.raises(ValueError, match="rounds"):
        sim.run(state, hparams, 0)
    with pytest.raises(ValueError, match="eval_every"):
        sim.run(state, hparams, 1, eval_every=0)
    with pytest.raises(ValueError, match="schedule"):
        sim.run(state, hparams.replace(noise_multiplier=[1.0, 2.0]), 3)
    with pytest.raises(ValueError, match="split"):
        sim.evaluate(state, hparams, "holdout")
    with pytest.raises(ValueError, match="key"):
        sim.init(jax.random.key(0, impl="rbg"), hparams)
    for seed in (-1, 2**64):  # JAX gives them the keys of 2³² − 1 and of 0
        with pytest.raises(ValueError, match=f"seed must be an integer in .*, got {seed}"):
            sim.init(seed, hparams)
    with pytest.raises(ValueError, match="delta"):
        sim.guarantee(state, delta=1.5)
    with pytest.raises(ValueError, match="5 clients"):
        Simulation(pmtl(TASK), CLIENTS, Sampling(lambda m: poisson(1.0).for_clients(m + 1)))
    with pytest.raises(ValueError, match="capacity"):
        Simulation(pmtl(TASK), CLIENTS, poisson(1.0, capacity=5))
    with pytest.raises(ValueError, match="chunk_size"):
        simulation(chunk_size=1)
    with pytest.raises(ValueError, match="5 clients"):
        sim.with_population(classification([10] * 3)[0])


def test_a_weighted_mechanism_checks_the_number_of_clients():
    with pytest.raises(ValueError, match="3 clients"):
        simulation(mechanism=gaussian(weights=np.ones(3), max_weight=1.0))


def test_labels_outside_the_model_are_refused_before_anything_runs():
    fields = {"x": CLIENTS.fields["x"], "y": CLIENTS.fields["y"] + 1}
    with pytest.raises(ValueError, match="labels"):
        simulation(population=dataclasses.replace(CLIENTS, fields=fields))


def test_data_made_afresh_have_no_epochs():
    population, task = regression_stream(3, 5), known_regression(5)
    for minibatches in (Minibatches(2, epochs=1), Minibatches(2, steps=1, passes=1)):
        with pytest.raises(ValueError, match="epochs or passes"):
            Simulation(pmtl(task), population, full_participation(), minibatches)


def test_a_state_of_another_simulation_is_refused(shared_pmtl):
    own = shared_pmtl
    hparams = own.hyperparameters(clip=1.0, noise_multiplier=1.0)
    begun = own.init(0, hparams)
    of_more_features = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), begun.shared)
    of_fewer_clients = jax.tree.map(lambda leaf: leaf[:3], begun.personal)
    others = {
        "server state": dataclasses.replace(begun, shared=of_more_features),
        "personal states": dataclasses.replace(begun, personal=of_fewer_clients),
    }
    for words, state in others.items():
        for use in (own.evaluate, own.round, functools.partial(own.run, rounds=1)):
            with pytest.raises(ValueError, match=f"the {words} must be .* to go on from, got"):
                use(state, hparams)


def test_clients_send_the_bytes_of_their_messages(shared_pmtl):
    # A model of 3 features with a bias, in float32, of p m = 0.6 · 5 clients.
    hparams = read_by(shared_pmtl, **simulations.VALUES)
    [kernel] = [v.size for k, v in shared_pmtl.task.init(jax.random.key(0)).items() if k != "bias"]
    assert shared_pmtl.bytes_sent(hparams) == pytest.approx(4 * (kernel + 1) * 0.6 * 5)


def test_a_state_shows_its_arrays_without_their_numbers():
    shared = {"w": np.ones((2, 3), np.float32), **{f"x{k}": np.int32(k) for k in range(4)}}
    state = SimulationState(*jax.tree.map(jnp.asarray, (7, shared, {}, (), (), 0)))
    assert repr(state).splitlines() == [
        "SimulationState of round 7",
        "  shared: w float32[2, 3], x0 int32[], x1 int32[], x2 int32[], … (5 arrays)",
    ]


def test_it_shows_its_parts_population_placement_and_layout(shared_pmtl):
    sim = shared_pmtl
    lines = repr(sim).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("Simulation of a Population of 5 clients, 48 rows")
    assert "clients by pmtl, server by server_step; reads " in lines[1]
    assert all(name in lines[1] for name in sim.records)
    assert lines[2] == (
        "  round: poisson sampling of at most 5 clients, 1 epoch of minibatches of 4 rows, "
        "gaussian mechanism"
    )
    assert lines[3] == "  placement: in memory of one device"
    assert lines[4].startswith(f"  plan: chunks of {sim.program.plan.chunk_size} clients, ")
    streamed = dataclasses.replace(sim, streamed=True, minibatches=Minibatches(4, steps=3))
    assert "streamed" in repr(streamed)
    assert "3 steps of minibatches" in repr(streamed)
    mine = dataclasses.replace(sim, algorithm=sim.algorithm._replace(client=_of_mine(sim)))
    assert "clients by _of_mine" in repr(mine)


def test_parts_show_what_made_them_and_what_they_read():
    task = fjs.tasks.logistic(fjs.models.linear((4,), 1, bias=False))._replace(judged_by="auc")
    of_task = "Task logistic on model linear(num_outputs=1, bias=False), metrics also auc, "
    of_task += "judged by auc"
    algorithm = pmtl(task, message="update", pull="rows")
    first, second, third = repr(algorithm).splitlines()
    made_by = "pmtl(local_optimizer='sgd', message='update', pull='rows')"
    by = f"clients by {made_by}, server by server_step"
    assert first == f"Algorithm: {by}; noise adds up in the server's state"
    mine = fjs.fedavg(task)._replace(server=lambda *args: args[0])
    assert "server by test_parts_show" in repr(mine).splitlines()[0]
    assert second.startswith("  reads learning_rate (0.1, or 1/L on bounded rows), ")
    assert third == f"  {of_task}"
    assert repr(gaussian()) == "Mechanism gaussian\n  reads clip (inf), noise_multiplier (0.0)"
    for transform, name in (
        (quantization(0.5), "quantization(step=0.5)"),
        (random_coordinates(3), "random_coordinates(size=3)"),
        (chosen_coordinates([1, 4]), "chosen_coordinates of 2"),
        (_signs(), "_signs()"),
    ):
        encoded = transformed(transformed(gaussian(), random_projection(2)), transform)
        behind = f"Mechanism gaussian behind {name}, random_projection(size=2)"
        assert repr(encoded).splitlines()[0] == behind
    mine = gaussian()._replace(hyperparameters=(fjs.Hyperparameter("width"),))
    assert repr(mine).splitlines()[1] == "  reads width (required)"


def _signs():
    return Transform(lambda message, key: jnp.sign(message), lambda encoded, *_: encoded)


def _of_mine(sim):
    return functools.partial(lambda *arguments: sim.algorithm.client(*arguments))
