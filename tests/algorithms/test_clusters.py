"""PMTL in public clusters: the plain algorithm with one of them, independent runs with several."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import coefficients, designs, gradient_descent, least_squares, read_by

import fedjaxsim as fjs
from fedjaxsim.algorithms.pmtl import Message
from fedjaxsim.privacy.assumptions import MOST_ROWS

COUNTS = [5, 9, 7, 4, 11]
CLUSTERS = [0, 1, 0, 1, 1]


def run(population, task, clusters, values, minibatches, sampling, message: Message = "update"):
    algorithm = fjs.pmtl(task, message=message, clusters=clusters)
    sim = fjs.Simulation(algorithm, population, sampling, minibatches)
    hparams = read_by(sim, **values)
    return sim, sim.run(sim.init(0, hparams), hparams, 4)[0]


@pytest.mark.thorough
def test_one_cluster_is_the_plain_algorithm():
    with jax.enable_x64(True):
        population, task = least_squares(COUNTS)
        values = {"learning_rate": 0.1, "lam": 0.3, "clip": 0.2, "noise_multiplier": 0.5}
        values |= {"sampling_rate": 0.6}
        given = values, fjs.Minibatches(4, steps=2), fjs.poisson(1.0)
        (sim, plain), (other, one) = (
            run(population, task, clusters, *given) for clusters in (None, [0] * 5)
        )
        for a, b in zip(jax.tree.leaves(plain.shared), jax.tree.leaves(one.shared), strict=True):
            np.testing.assert_allclose(b[0], a, rtol=1e-12)
        chex.assert_trees_all_close(one.personal, plain.personal, rtol=1e-12)
        chex.assert_trees_all_equal(plain.privacy.charges, one.privacy.charges)
        assert sim.public == (*population.public, MOST_ROWS, *task.public)
        assert [text[:27] for text in set(other.public) - set(sim.public)] == [
            "The clusters of the clients"
        ]


@pytest.mark.thorough
@pytest.mark.parametrize("message", ["update", pytest.param("offset", marks=pytest.mark.thorough)])
def test_clusters_are_runs_of_their_own(message):
    # Algorithm 1 in numpy for the members of one cluster after those of the other: full batches,
    # everyone, E = 2, a clip norm that binds, and no noise.
    with jax.enable_x64(True):
        population, task = least_squares(COUNTS)
        eta, lam, clip = 0.1, 0.3, 0.2
        values = {"learning_rate": eta, "lam": lam, "clip": clip}
        given = values, fjs.Minibatches(11, epochs=2), fjs.full_participation()
        sim, state = run(population, task, CLUSTERS, *given, message)
        centers, examples = np.zeros((2, 4)), list(designs(population))
        for cluster, members in enumerate(([0, 2], [1, 3, 4])):
            center, models = centers[cluster], dict.fromkeys(members, np.zeros(4))
            for _ in range(4):
                sent = []
                for k in members:
                    w = gradient_descent(*examples[k], models[k], eta, 2, center, lam)
                    move = w - (models[k] if message == "update" else center)
                    sent.append(move * min(1, clip / np.linalg.norm(move)))
                    models[k] = w
                center += np.mean(sent, axis=0)
            np.testing.assert_allclose(
                coefficients(state.personal)[members], [models[k] for k in members], rtol=1e-10
            )
        np.testing.assert_allclose(coefficients(state.shared.params), centers, rtol=1e-10)
        assert np.abs(centers[0] - centers[1]).max() > 0.01
        # What another algorithm may start from is the mean of the centers over clients.
        published = coefficients(sim.algorithm.warm_start.published(state.shared))
        np.testing.assert_allclose(published, [0.4, 0.6] @ centers, rtol=1e-10)


def test_a_client_sends_in_its_own_slot_and_a_release_is_divided_by_its_clusters_size():
    population, task = least_squares(COUNTS)
    algorithm = fjs.pmtl(task, clusters=CLUSTERS)
    sent = []

    def client(*arguments):
        personal, message, metrics = algorithm.client(*arguments)
        sent.append(jax.tree.map(jnp.shape, message))
        return personal, message, metrics

    watched = algorithm._replace(client=client)
    sim = fjs.Simulation(watched, population, fjs.full_participation(), fjs.Minibatches(4, steps=1))
    hparams = sim.hyperparameters()
    state = sim.init(0, hparams)
    assert sent[0] == {"kernel": (2, 1, 3), "bias": (2, 1)}
    ones = jax.tree.map(jnp.ones_like, state.shared.params)
    server = jax.jit(lambda shared: algorithm.server(shared, ones, hparams, jnp.int32(0)))
    after = server(state.shared).params
    np.testing.assert_allclose(after["bias"], [[5 / 2], [5 / 3]], rtol=1e-6)


@pytest.mark.parametrize("clusters", [[0, 2], [-1, 0], [0.0, 1.0], [[0, 1]], []])
def test_clusters_that_are_none_are_refused(clusters):
    _, task = least_squares([5])
    with pytest.raises(ValueError, match="clusters"):
        fjs.pmtl(task, clusters=clusters)


def test_clusters_of_other_clients_are_refused():
    population, task = least_squares(COUNTS)
    sim = fjs.Simulation(
        fjs.pmtl(task, clusters=[0, 1]),
        population,
        fjs.full_participation(),
        fjs.Minibatches(4, steps=1),
    )
    with pytest.raises(ValueError, match="5 clients"):
        sim.init(0, sim.hyperparameters())
