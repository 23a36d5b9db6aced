"""Attacks by numbers made of all clients' rows: a client's functions get its own and public ones.

Each population has one client whose rows, or numbers of rows, differ.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from support.problems import read_by

import fedjaxsim as fjs
from fedjaxsim.algorithms.mpmtl import stl
from fedjaxsim.data.text import encode
from fedjaxsim.engine.evaluation import targets_of
from fedjaxsim.engine.rows import Rows
from fedjaxsim.tasks.streaming_metrics import StreamingMetric
from fedjaxsim.testing import check_billboard

M = 8
TASK: Any = fjs.tasks.squared(fjs.models.linear((3,), 1))


def population(first=(3, 16, 1), others=(3, 16, 1), **more):
    """Clients of whom the first has other numbers of rows."""
    counts = np.array([first] + [others] * (M - 1))
    rng = np.random.default_rng(0)
    fields = {"x": rng.normal(size=(counts.sum(), 3)), "y": rng.normal(size=counts.sum())}
    return fjs.Population.from_flat(fields, counts, **more)


def padded_hits():
    """A metric that divides by the places of a buffer instead of the client's rows."""

    def start(most_rows):
        return jnp.zeros(most_rows), jnp.int32(0)

    def add(carry, params, batch):
        buffer, at = carry
        return jax.lax.dynamic_update_slice(buffer, batch.weight, (at,)), at + len(batch.weight)

    return StreamingMetric(start, add, lambda carry: jnp.mean(carry[0]))


def simulation_of(task, clients, algorithm=fjs.local, minibatches=None, **layout):
    minibatches = minibatches or fjs.Minibatches(2, steps=1)
    sampling, mechanism = fjs.full_participation(), fjs.no_release()
    return fjs.Simulation(algorithm(task), clients, sampling, minibatches, mechanism, **layout)


def test_a_streaming_metric_knows_the_public_bound_alone():
    bounds = {
        Rows.shapes(population((3, n, 1), max_rows=40), "validation").most_rows
        for n in (16, 17, 33, 40)
    }
    assert len(bounds) == 1
    records = {"hits": fjs.tasks.Metric("hits", larger_is_better=True)}
    task = TASK._replace(streaming_metrics={"hits": padded_hits()}, records=records)
    sim = simulation_of(task, population((3, 17, 1)), chunk_map="vmap")
    hparams = sim.hyperparameters(learning_rate=0.1)
    check_billboard(sim, hparams, rounds=1, clients=[0], split="validation")


def test_the_number_of_targets_of_a_row_is_its_own():
    tokens = np.full((4 * M, 8), 9, np.int32)
    tokens[:, :2] = 2
    task = TASK._replace(
        # The last token is padding: of a row by itself, and not of those of all clients.
        targets=lambda fields: jnp.sum(fields["tok"] < jnp.max(fields["tok"]), axis=-1)
    )

    def targets(last):
        tokens[3, 7] = last
        counts = [[2, 1, 1]] * M
        clients = fjs.Population.from_flat({"tok": tokens}, counts)
        return targets_of(clients, "test", task)

    np.testing.assert_array_equal(targets(9), 2)
    np.testing.assert_array_equal(targets(10)[1:], 2)
    np.testing.assert_array_equal(targets(10)[0], 7)


@pytest.mark.parametrize(
    ("algorithm", "minibatches", "layout"),
    [
        (stl, None, {}),
        pytest.param(fjs.local, fjs.Minibatches(4, epochs=1), {}, marks=pytest.mark.thorough),
        pytest.param(stl, None, {"chunk_map": "scan"}, marks=pytest.mark.thorough),
        pytest.param(
            fjs.local, fjs.Minibatches(4, epochs=2), {"chunk_map": "scan"},
            marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
def test_how_many_rows_a_client_has_moves_no_bit_of_another(algorithm, minibatches, layout):
    # From 7 of 300 rows in training to 300, over every bound of an exact pass and of a shuffle.
    clients = population((7, 150, 143), (7, 2, 0), max_rows=300)
    sim = simulation_of(TASK, clients, algorithm, minibatches, **layout)
    check_billboard(sim, read_by(sim, learning_rate=0.1), rounds=2, clients=[0], split=None)


def test_the_numbers_of_tokens_do_not_follow_from_the_length_of_a_text():
    def tokens(first):
        texts = np.array([first, "abcd", "dcba"])
        return encode({"x": [texts]}, ["a"])[1]["x"]

    assert tokens("abcd") == tokens("ab")
    assert tokens("ab")[-1] == ""


def test_a_layout_is_traced_without_any_row():
    seen = []

    def loss(params, batch):
        seen.append(batch.fields["x"])
        return TASK.loss(params, batch)

    simulation_of(TASK._replace(loss=loss), population())
    assert seen
    assert all(isinstance(x, Tracer) for x in seen)


def until_moved(task):
    """FedAvg whose clients step until they are far enough: without rows they would never be."""

    def client(shared, personal, data, hparams, context):
        def step(w, batch):
            return jax.tree.map(lambda leaf, g: leaf - 0.1 * g, w, task.gradient(w, batch))

        def near(w):
            moved = jax.tree.map(lambda leaf, old: jnp.sum((leaf - old) ** 2), w, shared)
            return sum(jax.tree.leaves(moved)) < 1e-3

        w = jax.lax.while_loop(near, lambda w: data.fold(step, w), shared)
        return personal, jax.tree.map(jnp.subtract, w, shared), {}

    return fjs.Algorithm(
        init=lambda key, hparams: (task.init(key), ()),
        client=client,
        server=lambda shared, release, hparams, round_: jax.tree.map(jnp.add, shared, release),
        predict=lambda shared, *_: shared,
        task=task,
    )


@pytest.mark.parametrize(
    "placed",
    [
        {},
        pytest.param({"devices": jax.devices()[:2]}, marks=pytest.mark.thorough),
        pytest.param({"streamed": True}, marks=pytest.mark.thorough),
    ],
    ids=["one device", "two devices", "streamed"],
)
def test_a_slot_without_a_client_runs_on_a_clients_rows(placed):
    layout = {} if placed else {"chunk_map": "vmap"}
    clients = population((10, 5, 5), (3, 16, 1))
    batches = fjs.Minibatches(2, epochs=1)
    sim = fjs.Simulation(until_moved(TASK), clients, fjs.poisson(0.3), batches, **layout, **placed)
    hparams = sim.hyperparameters(clip=10.0, noise_multiplier=0.0)
    state, _ = sim.run(sim.init(0, hparams), hparams, 4)  # with empty slots it would never end
    moved = jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), state.shared)
    assert 0 < max(jax.tree.leaves(moved)) < np.inf
