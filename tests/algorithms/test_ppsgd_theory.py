"""PP-SGD keeps what Bietti et al. (2022) prove of it, on problems where everything is exact."""

import jax
import numpy as np
import pytest
from support.problems import read_by

from fedjaxsim.algorithms.ppsgd import ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import squared

V = np.array([1.0, -2.0, 0.5])
D = len(V)
TASK = squared(linear((D,), 1, bias=False))
CLIP = 100.0  # above every gradient


def minimal_norm(alpha, clients):
    """Lemma 4.6: the minimizer of the least α-norm, w and θ, where (v, 0) is one."""
    return alpha * clients / (alpha * clients + 1) * V, V / (alpha * clients + 1)


@pytest.mark.thorough
def test_lemma_4_6_the_limit_is_the_minimizer_of_least_norm():
    # Clients with one v, inputs of their own and no label noise: descent stays in the span of the
    # gradients, in which the minimizer of least norm is the only one.
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        # XᵀX/n has eigenvalues from 0.64 to 1.44, below 2/(η(α + 1/N)) = 2 for the step below.
        inputs = [
            np.sqrt(n) * np.linalg.qr(rng.normal(size=(n, D)))[0] * rng.uniform(0.8, 1.2, size=D)
            for n in (8, 12, 20)
        ]
        population = Population.from_clients([{"x": x, "y": x @ V} for x in inputs])
        algorithm = ppsgd(TASK, parametrization="paper")
        sim = Simulation(algorithm, population, full_participation(), Minibatches(20, epochs=1))
        for alpha in (0.0, 0.1, 1 / 3, 2.0):
            hparams = sim.hyperparameters(learning_rate=1 / (alpha + 1 / 3), personalization=alpha)
            state, _ = sim.run(sim.init(0, hparams), hparams, 500)
            w, theta = minimal_norm(alpha, 3)
            np.testing.assert_allclose(np.asarray(state.shared.value["kernel"])[0], w, rtol=1e-10)
            np.testing.assert_allclose(
                np.asarray(state.personal.value["kernel"])[:, 0],
                np.tile(theta, (3, 1)),
                rtol=1e-10,
            )


# --- Theorems 4.5 and 5.2 -------------------------------------------------------------------------
#
# A client's rows are x = ±e_k with labels v·x ± τ_i, in all combinations, and its minibatches are
# drawn from them with replacement. So P_i is the rows: ‖x‖ = R = 1 and L = 2R², the risk is what
# evaluation reports, v is its exact minimizer with f_i = τ_i²/2, and there the gradients have
# mean 0 and mean square τ_i²R².

NOISES = np.array([0.5, 1.0, 0.2, 0.8])
N = len(NOISES)
L = 2.0
SIZES = np.array([1, 3, 2, 2])
M = int(SIZES.sum())
ROUNDS, SEEDS = 300, 10


def noisy_clients():
    x = np.concatenate([np.eye(D), -np.eye(D)])
    return Population.from_clients(
        [
            {"x": np.tile(x, (2, 1)), "y": np.concatenate([x @ V + tau, x @ V - tau])}
            for tau in NOISES
        ]
    )


def check_bound(sim, alpha, smoothness, variance, z, weights, rate):
    """E f(z̄_T) − f* ≤ 4 L_α ‖z*‖²_α/T + 3 σ_α ‖z*‖_α/√T, with three standard errors."""
    w, theta = minimal_norm(alpha, N)
    norm = np.sqrt(w @ w / alpha + N * theta @ theta)
    hparams = read_by(
        sim,
        learning_rate=min(1 / (4 * smoothness), norm / np.sqrt(ROUNDS * variance)),
        personalization=alpha,
        clip=CLIP,
        noise_multiplier=z,
        sampling_rate=rate,
    )
    excess = []
    for seed in range(SEEDS):
        state, history = sim.run(sim.init(seed, hparams), hparams, ROUNDS)
        assert not np.any(history[0].metrics["clipped"])
        losses = sim.evaluate(state, hparams, "train").values["loss"]
        excess.append(weights @ (losses - NOISES**2 / 2))
    bound = 4 * smoothness * norm**2 / ROUNDS + 3 * norm * np.sqrt(variance / ROUNDS)
    assert bound < V @ V / (2 * D)  # the excess risk at zero, which is where the run starts
    assert np.mean(excess) + 3 * np.std(excess) / np.sqrt(SEEDS) < bound


LEVELS = [(0.05, 0.3), (1 / N, 0.0), (1 / N, 0.3), (2.0, 0.0), (2.0, 0.3)]


@pytest.mark.thorough
def test_theorem_4_5():
    with jax.enable_x64(True):
        algorithm = ppsgd(TASK, parametrization="paper", averaged=True)
        population, batch = noisy_clients(), Minibatches(1, steps=1)
        sim = Simulation(algorithm, population, full_participation(), batch)
        sigma = np.mean(NOISES**2)
        for alpha, noise in LEVELS:  # noise is σ_ζ
            check_bound(
                sim,
                alpha,
                smoothness=L * max(alpha, 1 / N),
                variance=(alpha * sigma + sigma) / N + alpha * D * noise**2,
                z=noise / CLIP * N,
                weights=np.full(N, 1 / N),
                rate=1.0,
            )


@pytest.mark.thorough
def test_theorem_5_2():
    # With clients drawn and sizes of their own; L_m,α with qM in place of the text's M.
    rate = 0.5
    with jax.enable_x64(True):
        algorithm = ppsgd(
            TASK, parametrization="paper", objective="weighted", sizes=SIZES, averaged=True
        )
        population, batch = noisy_clients(), Minibatches(3, steps=1)
        sim = Simulation(algorithm, population, poisson(1.0), batch)
        share = SIZES.max() / (rate * M)
        sigma = SIZES @ NOISES**2 / M
        for alpha, noise in LEVELS:
            check_bound(
                sim,
                alpha,
                smoothness=L * max(alpha + alpha * share, share),
                variance=(alpha * sigma + sigma) / (rate * M) + alpha * D * noise**2,
                z=noise / CLIP * rate * M,
                weights=SIZES / M,
                rate=rate,
            )
