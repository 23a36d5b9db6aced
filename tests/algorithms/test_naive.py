"""Client-level DP of all models: what reaches which row, what it costs, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import classification, read_by

import fedjaxsim as fjs
from fedjaxsim.data.population import Population
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.mechanisms.sums import every_row
from fedjaxsim.tasks.task import squared

M, VICTIM = 4, 2
VALUES = {
    "learning_rate": 0.5,
    "lam": 0.3,
    "clip": 0.1,
    "noise_multiplier": 0.7,
    "sampling_rate": 0.75,
}


@pytest.fixture(scope="module")
def problem():
    return classification([10, 12, 14, 9])


def simulation(problem, algorithm=None, mechanism=None):
    population, task = problem
    return fjs.Simulation(
        algorithm or fjs.naive_dp(task, num_clients=M), population, fjs.poisson(1.0),
        fjs.Minibatches(4, steps=2), mechanism or every_row(),
    )  # fmt: skip


@pytest.mark.thorough
def test_it_is_its_formula_worked_by_hand():
    # One weight and one row per client, (x, y) = (1, 2), (1, 6) and (1, 9), E = 1, η = 1/2, λ = 1:
    # a step from w_k is (y − w_k)/2 + (w̄ − w_k)/2, clipped at C = 2 and added to the row as it is.
    with jax.enable_x64(True):
        y = np.array([2.0, 6.0, 9.0])
        population = Population.from_clients(
            [{"x": np.ones((1, 1)), "y": y[[k]]} for k in range(3)]
        )
        task = squared(linear((1,), 1, bias=False))
        sim = fjs.Simulation(
            fjs.naive_dp(task, num_clients=3), population, fjs.poisson(1.0),
            fjs.Minibatches(1, epochs=1), every_row(),
        )  # fmt: skip
        hparams = sim.hyperparameters(learning_rate=0.5, lam=1.0, clip=2.0, sampling_rate=0.5)
        state, w = sim.init(0, hparams), np.zeros(3)
        sizes = set()
        for _ in range(6):
            before = np.ravel(state.shared.rows["kernel"])
            state, metrics = sim.round(state, hparams)
            after = np.ravel(state.shared.rows["kernel"])
            moved = before != after
            assert moved.sum() == int(metrics["participants"])
            sizes.add(int(moved.sum()))
            w = w + np.where(moved, np.clip((y - w) / 2 + (w.mean() - w) / 2, -2, 2), 0)
            np.testing.assert_allclose(after, w, rtol=1e-12)
            np.testing.assert_allclose(state.shared.mean["kernel"], [[w.mean()]], rtol=1e-12)
        assert len(sizes) > 1
        predict = jax.vmap(sim.algorithm.predict, (None, None, None, 0))
        predicted = predict(state.shared, (), hparams, jnp.arange(3))
        np.testing.assert_allclose(np.ravel(predicted["kernel"]), w, rtol=1e-12)


def test_without_one_clients_message_its_row_moves_by_the_clip_norm_and_no_other(problem):
    _, task = problem
    whole = fjs.naive_dp(task, num_clients=M)

    def client(shared, personal, data, hparams, context):
        # All messages whole, but the victim's times a hyperparameter of this test.
        personal, message, metrics = whole.client(shared, personal, data, hparams, context)
        factor = jnp.where(context.client_id == VICTIM, hparams.factor, 1.0)
        return personal, jax.tree.map(lambda leaf: factor * leaf, message), metrics

    records = (*whole.hyperparameters, fjs.Hyperparameter("factor"))
    sim = simulation(problem, whole._replace(client=client, hyperparameters=records))
    settings = [sim.hyperparameters(**VALUES, factor=factor) for factor in (1.0, 0.0)]
    # With this seed the victim takes part.
    (one, metrics), (other, _) = (sim.round(sim.init(2, hparams), hparams) for hparams in settings)
    assert int(metrics["clipped"]) == int(metrics["participants"]) > 1
    moves = jax.tree.map(lambda a, b: np.asarray(a, float) - b, one.shared.rows, other.shared.rows)
    norms = np.sqrt(sum(np.square(v.reshape(M, -1)).sum(axis=1) for v in jax.tree.leaves(moves)))
    np.testing.assert_array_equal(norms[np.arange(M) != VICTIM], 0)
    np.testing.assert_allclose(norms[VICTIM], 0.1, rtol=1e-4)
    # Such a round is charged as one of the Gaussian mechanism.
    (charges,) = one.privacy.charges
    assert charges.event == fjs.gaussian().event
    assert (charges.noise_multiplier[0], charges.sampling_rate[0]) == (np.float32(0.7), 0.75)
    assert int(charges.rounds[0]) == 1


def test_a_release_or_a_population_of_another_size_is_refused(problem):
    _, task = problem
    for sim, message in [
        (simulation(problem, mechanism=fjs.gaussian()), "every_row"),
        (
            simulation(problem, fjs.naive_dp(task, num_clients=3)),
            "num_clients",
        ),
        (simulation(problem, fjs.fedavg(task)), "server"),
    ]:
        with pytest.raises(ValueError, match=message):
            sim.init(0, read_by(sim, **VALUES))
