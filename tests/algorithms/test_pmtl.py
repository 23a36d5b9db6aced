"""PMTL: Algorithm 1 in numpy, both messages by hand, and what its center remembers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import (
    coefficients,
    designs,
    gradient_descent,
    least_squares,
    noise_key,
    read_by,
)

from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.mechanisms import noise_like
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import squared

FULL_BATCH = Minibatches(1000, epochs=1)


@functools.cache
def pmtl_with_everyone_or_some():
    """Both simulations, made once, for their compilation; in float64."""
    population, task = least_squares([5, 9, 17])
    return [
        Simulation(pmtl(task, message="update"), population, sampling, Minibatches(4, epochs=2))
        for sampling in (full_participation(), poisson(1.0))
    ]


@pytest.mark.thorough
def test_pmtl_center_is_the_mean_of_the_models_over_p():
    # Every move of a w_k is sent once and divided by p·m, so with the paper's server step of 1
    # w̃ − w⁰ = (mean of w_k − w⁰)/p, always; with the default p, w̃ is the mean. Here w⁰ = 0.
    everyone, some = pmtl_with_everyone_or_some()
    cases = [(everyone, 1.0, {}), (some, 0.5, {"server_learning_rate": 1.0}), (some, 0.5, {})]
    with jax.enable_x64(True):
        for sim, rate, given in cases:
            hparams = read_by(sim, learning_rate=0.05, lam=0.3, sampling_rate=rate, **given)
            state = sim.init(0, hparams)
            for _ in range(7):
                state, _ = sim.round(state, hparams)
                models = coefficients(state.personal)
                center = models.mean(axis=0) * float(hparams.server_learning_rate) / rate
                np.testing.assert_allclose(
                    coefficients(state.shared.params), center, rtol=1e-12, atol=1e-14
                )
            assert np.std(coefficients(state.personal), axis=0).max() > 0.01


@pytest.mark.thorough
def test_pmtl_center_never_forgets_noise():
    # w̃ − mean of w_k = the sum of all noise so far: Algorithm 1 sends w − w_k, which does not
    # depend on where w̃ has drifted, so nothing pulls w̃ back. (With everyone and no clip binding.)
    with jax.enable_x64(True):
        sim, _ = pmtl_with_everyone_or_some()
        hparams = sim.hyperparameters(
            learning_rate=0.05, lam=0.3, clip=100.0, noise_multiplier=0.01
        )
        state = sim.init(0, hparams)
        noise = np.zeros(4)
        for t in range(4):
            key = noise_key(state, t)
            draw = noise_like(key, state.shared.params, jnp.asarray(1.0 / 3))
            noise += coefficients(draw)
            state, _ = sim.round(state, hparams)
            gap = coefficients(state.shared.params) - coefficients(state.personal).mean(axis=0)
            np.testing.assert_allclose(gap, noise, rtol=1e-10)


def test_the_offset_forgets_all_but_the_last_noise():
    # The mean of w_k − w̃ takes w̃ to the mean of the models wherever it was: w̃ = mean of w_k + the
    # noise of this round, whatever λ is. (With everyone and no clip binding.) Without noise and λ
    # the models are those of clients alone, and w̃ is their mean.
    with jax.enable_x64(True):
        population, task = least_squares([5, 9, 17])
        batches = Minibatches(17, epochs=2)
        sim = Simulation(pmtl(task), population, full_participation(), batches)

        @jax.jit
        def drawn(state, t, deviation):
            return noise_like(noise_key(state, t), state.shared.params, deviation)

        for lam, z in [(0.3, 0.01), (0.0, 0.0)]:
            hparams = sim.hyperparameters(
                learning_rate=0.05, lam=lam, clip=100.0, noise_multiplier=z
            )
            state = sim.init(0, hparams)
            for t in range(4):
                noise = drawn(state, jnp.int32(t), jnp.asarray(100.0 * z / 3))
                state, _ = sim.round(state, hparams)
                gap = coefficients(state.shared.params) - coefficients(state.personal).mean(axis=0)
                np.testing.assert_allclose(gap, coefficients(noise), rtol=1e-10, atol=1e-14)
        alone = [gradient_descent(x, y, np.zeros(4), 0.05, 8) for x, y in designs(population)]
        np.testing.assert_allclose(
            coefficients(state.shared.params), np.mean(alone, axis=0), rtol=1e-10
        )


@pytest.mark.thorough
@pytest.mark.parametrize("message", [pytest.param("update", marks=pytest.mark.thorough), "offset"])
def test_both_messages_of_pmtl_are_their_formulas_worked_by_hand(message):
    # One weight and one row per client, (x, y) = (1, 2) and (1, 6), E = 1, η = 1/2, λ = 1: a step
    # takes w to w − (w − y)/2 − (w − w̃)/2 = (y + w̃)/2, wherever it was. p·m = 1, and C = 1.
    with jax.enable_x64(True):
        population = Population.from_clients(
            [{"x": np.ones((1, 1)), "y": np.array([y])} for y in (2.0, 6.0)]
        )
        task = squared(linear((1,), 1, bias=False))
        sim = Simulation(
            pmtl(task, message=message), population, poisson(1.0), Minibatches(1, epochs=1)
        )
        hparams = sim.hyperparameters(
            learning_rate=0.5, lam=1.0, clip=1.0, sampling_rate=0.5, server_learning_rate=1.0
        )
        state = sim.init(1, hparams)
        draw = jax.jit(sim.program.draw)
        w_tilde, w, cohorts = 0.0, [0.0, 0.0], set()
        for _ in range(8):
            drawn = draw(state, hparams.as_arrays()).cohort
            cohort = tuple(drawn.ids[drawn.mask].tolist())
            state, metrics = sim.round(state, hparams)
            after = np.ravel(state.personal["kernel"])
            assert len(cohort) == int(metrics["participants"])
            sent = 0.0
            for k in cohort:
                new = ((2.0, 6.0)[k] + w_tilde) / 2
                sent += np.clip(new - (w[k] if message == "update" else w_tilde), -1, 1)
                w[k] = new
            w_tilde += sent
            cohorts.add(cohort)
            np.testing.assert_allclose(after, w, rtol=1e-12)
            np.testing.assert_allclose(state.shared.params["kernel"], [[w_tilde]], rtol=1e-12)
        assert len(cohorts) > 2


def test_an_unknown_message_is_refused():
    _, task = least_squares([5])
    with pytest.raises(ValueError, match="message"):
        pmtl(task, message="sum")  # pyright: ignore[reportArgumentType]


@pytest.mark.thorough
def test_pmtl_reaches_the_mean_regularized_minimizer():
    with jax.enable_x64(True):
        population, task = least_squares([6, 10, 15, 8])
        lam, d, m = 0.5, 4, 4
        # Minimize Σ_k ‖X_k w_k − y_k‖²/(2 n_k) + (λ/2) Σ_k ‖w_k − w̄‖²: one linear system.
        system, target = np.zeros((m * d, m * d)), np.zeros(m * d)
        for k, (x, y) in enumerate(designs(population)):
            at = slice(k * d, (k + 1) * d)
            system[at, at] += x.T @ x / len(y) + lam * np.eye(d)
            target[at] = x.T @ y / len(y)
        system -= np.kron(np.full((m, m), lam / m), np.eye(d))
        minimizer = np.linalg.solve(system, target).reshape(m, d)

        sim = Simulation(pmtl(task), population, full_participation(), FULL_BATCH)
        hparams = sim.hyperparameters(learning_rate=0.4, lam=lam)
        state, _ = sim.run(sim.init(0, hparams), hparams, 400)
        np.testing.assert_allclose(coefficients(state.personal), minimizer, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(
            coefficients(state.shared.params), minimizer.mean(axis=0), rtol=1e-9, atol=1e-10
        )


@pytest.mark.thorough
def test_pmtl_is_algorithm_1_written_in_numpy():
    # Two clients, full batches, E = 2, clipping that binds; compared round by round.
    with jax.enable_x64(True):
        population, task = least_squares([6, 9])
        rate, lam, clip = 0.3, 0.4, 0.25
        algorithm = pmtl(task, message="update")
        sim = Simulation(algorithm, population, full_participation(), Minibatches(9, epochs=2))
        hparams = sim.hyperparameters(learning_rate=rate, lam=lam, clip=clip)
        state = sim.init(0, hparams)
        center, models, clipped = np.zeros(4), [np.zeros(4), np.zeros(4)], 0
        for _ in range(6):
            state, metrics = sim.round(state, hparams)
            updates = []
            for k, (x, y) in enumerate(designs(population)):
                new = gradient_descent(x, y, models[k], rate, 2, center, lam)
                updates.append(new - models[k])
                models[k] = new
            norms = [np.linalg.norm(u) for u in updates]
            center = (
                center + sum(u * min(1, clip / n) for u, n in zip(updates, norms, strict=True)) / 2
            )
            clipped += sum(n > clip for n in norms)
            assert int(metrics["clipped"]) == sum(n > clip for n in norms)
            np.testing.assert_allclose(coefficients(state.personal), models, rtol=1e-10)
            np.testing.assert_allclose(coefficients(state.shared.params), center, rtol=1e-10)
        assert 0 < clipped < 12  # both cases occurred
