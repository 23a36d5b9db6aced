"""Theorem 5.3 of DPFedMTL, on quadratics whose expected loss is known exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.algorithms.dpfedmtl import dpfedmtl_as_published
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.privacy.mechanisms.sums import plain_mean
from fedjaxsim.privacy.samplers import fixed_size
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import Task

M, ROUNDS, SEEDS = 5, 25, 128
CLIP = 1000.0
"""Never reached, as the theorem has no clipping."""
CENTRES = np.random.default_rng(0).normal(size=(M, 3))
HEADS = np.random.default_rng(1).normal(size=(M, 2))


def loss(params, batch):
    """f_i = a_i |w_i − b_i|²/2 + q_i |u − v_i|²/2."""
    rows = batch.fields
    of_head = rows["a"] * jnp.sum((params["w"] - rows["b"]) ** 2, axis=-1)
    of_trunk = rows["q"] * jnp.sum((params["u"] - rows["v"]) ** 2, axis=-1)
    return batch.mean(of_head + of_trunk) / 2


TASK = Task(
    init=lambda key: {"u": jnp.zeros(3), "w": jnp.zeros(2)},
    loss=loss,
    metrics=lambda params, batch: {"squared_error": batch.weight},
)


class Quadratic:
    """The clients' losses, and what the theorem takes of them."""

    def __init__(self, a, q, v):
        self.a, self.q, self.v = np.broadcast_to(a, M), np.broadcast_to(q, M), v
        self.optimum = self.q @ v / self.q.sum()
        self.population = Population.from_clients(
            [
                {"a": self.a[[i]] * 1.0, "b": HEADS[[i]], "q": self.q[[i]] * 1.0, "v": v[[i]]}
                for i in range(M)
            ]
        )
        self.smoothness = max(*self.a, *self.q)  # of every f_i: ℓ
        self.convexity = min(*self.a / M, self.q.mean())  # of f: c
        # Assumption 5.5 where all v_i are one: mean |q_i (u − v)|² over |mean q_i (u − v)|².
        self.diversity = np.mean(self.q**2) / np.mean(self.q) ** 2
        self.least = np.mean(self.q * np.sum((v - self.optimum) ** 2, axis=1)) / 2

    def gap(self, u, w):
        """f − f* of trunks (…, 3) and heads (…, M, 2)."""
        of_heads = np.mean(self.a * np.sum((w - HEADS) ** 2, axis=-1), axis=-1) / 2
        return of_heads + self.q.mean() * np.sum((u - self.optimum) ** 2, axis=-1) / 2

    def expected_gap(self, rate, steps, noise):
        """E f − f* after 0 … ROUNDS rounds of one client each, exactly; noise per step and number.

        A round multiplies |w_i − b_i|² by (1 − ηa_i)^{2H} with probability 1/M; of u − u* the mean
        and the second moment are followed.
        """
        shrink = 1 - (1 - (1 - rate * self.a) ** (2 * steps)) / M
        u, square, gaps = -self.optimum, np.sum(self.optimum**2), []
        targets = self.v - self.optimum
        for t in range(ROUNDS + 1):
            of_heads = np.mean(self.a * shrink**t * np.sum(HEADS**2, axis=1)) / 2
            gaps.append(of_heads + self.q.mean() * square / 2)
            means, squares = np.tile(u, (M, 1)), np.full(M, square)
            for _ in range(steps):
                keep, move = 1 - rate * self.q, rate * self.q
                squares = (
                    keep**2 * squares
                    + 2 * keep * move * np.sum(means * targets, axis=1)
                    + move**2 * np.sum(targets**2, axis=1)
                    + 3 * (rate * noise) ** 2
                )
                means = keep[:, None] * means + move[:, None] * targets
            u, square = means.mean(axis=0), squares.mean()
        return np.array(gaps)


THEOREM = Quadratic(a=[1.0, 2.0, 2.5, 3.0, 4.0], q=[0.5, 1.0, 1.0, 1.5, 2.0], v=CENTRES[[0] * M])
"""All clients want one trunk: Assumption 5.5 holds."""
DIVERSE = Quadratic(a=2.0, q=[0.5, 1.0, 1.0, 1.5, 2.0], v=CENTRES)
"""Every client wants another one: at the optimum the left side of Assumption 5.5 is infinite."""


@functools.cache
def program_of(steps):
    """Trunks and heads of many runs before and after every round, with one client a round."""
    minibatches = Minibatches(1, epochs=steps)
    sim = Simulation(
        dpfedmtl_as_published(TASK, head="w"),
        THEOREM.population,
        fixed_size(cohort=1),
        minibatches,
        plain_mean(),
    )

    def models(state):
        return state.shared.trunk.params["u"], state.personal["w"]

    def run(key, hparams, rows):
        def round_(state, _):
            state, _ = sim.program.rounds(state, hparams, rows, 1)
            return state, models(state)

        start = sim.program.init(key, hparams)
        _, later = jax.lax.scan(round_, start, length=ROUNDS)
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), models(start), later)

    many = jax.jit(jax.vmap(run, (0, None, None)))

    def gaps(problem, rate, noise):
        """(SEEDS, ROUNDS + 1); noise is σS, so σ = noise/(2C/M)."""
        hparams = sim.check(
            sim.hyperparameters(
                learning_rate=rate,
                clip=CLIP,
                noise_multiplier=noise * M / (2 * CLIP),
            )
        )
        keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), SEEDS)
        rows = sim.with_population(problem.population).rows["train"]
        return problem.gap(*map(np.asarray, many(keys, hparams, rows)))

    return gaps


@pytest.mark.parametrize(
    ("problem", "steps", "noise"),
    [
        pytest.param(DIVERSE, 1, 0.0, marks=pytest.mark.thorough),
        pytest.param(THEOREM, 1, 0.3, marks=pytest.mark.thorough),
        pytest.param(THEOREM, 1, 0.0, marks=pytest.mark.thorough),
        pytest.param(THEOREM, 2, 0.3, marks=pytest.mark.thorough),
    ],
)
def test_the_loss_is_what_it_is_expected_to_be(problem, steps, noise):
    rate = 1 / (problem.diversity * problem.smoothness)
    found = program_of(steps)(problem, rate, noise)
    expected = problem.expected_gap(rate, steps, noise)
    error = found.std(axis=0) / np.sqrt(SEEDS)
    assert np.all(np.abs(found.mean(axis=0) - expected) < 5 * error + 1e-5)
    assert np.abs(found.mean(axis=0) / expected - 1).max() < 0.3  # so that 5 errors are not all


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_theorem_5_3_holds_with_the_constants_that_can_be_derived(noise):
    # With η = 1/(λℓ), for one step a round: E f(w^T) − f* − β ≤ (1 − c/(λℓ))^T (f(w⁰) − f* − β) and
    # β = d (Sσ)²/(2λc). The paper's rate is 1 − c/(λML), and its β larger: both are implied.
    p = THEOREM
    gaps = p.expected_gap(1 / (p.diversity * p.smoothness), 1, noise)
    rounds = np.arange(ROUNDS + 1)
    ball = 3 * noise**2 / (2 * p.diversity * p.convexity)
    ratio = p.convexity / (p.diversity * p.smoothness)
    bound = (1 - ratio) ** rounds * (gaps[0] - ball) + ball
    assert np.all(gaps <= bound * (1 + 1e-12))
    assert gaps[-1] < gaps[0] / 2
    noise_terms = (2 + 1 / (2 * M * p.smoothness)) * 3 * noise**2
    larger = M * p.smoothness / (p.diversity * p.convexity) * noise_terms
    assert np.all(gaps <= (1 - ratio / M) ** rounds * (gaps[0] - larger) + larger)


def test_without_assumption_5_5_the_loss_stays_above_the_optimum_without_noise():
    gaps = DIVERSE.expected_gap(1 / (DIVERSE.diversity * DIVERSE.smoothness), 1, 0.0)
    ratio = DIVERSE.convexity / (DIVERSE.diversity * DIVERSE.smoothness)
    assert gaps[-1] > 10 * (1 - ratio) ** ROUNDS * gaps[0]


@pytest.mark.thorough
def test_with_the_smoothness_of_the_mean_loss_the_step_is_too_long():
    # Assumption 5.1 is on f, whose curvature along w_i is a_i/M: L = max(4/5, 1) = 1. Algorithm 1
    # steps along the gradient of f_i, whose curvature is 4: with η = 1/L a head's error is tripled.
    steep = Quadratic(a=4.0, q=1.0, v=CENTRES[[0] * M])
    assert steep.diversity == 1
    assert max(*steep.a / M, steep.q.mean()) == 1
    found = program_of(1)(steep, 1.0, 0.0)
    expected = steep.expected_gap(1.0, 1, 0.0)
    np.testing.assert_allclose(found[:, 1].mean(), expected[1], rtol=0.1)
    assert np.all(found[:, -1] > 1000 * found[:, 0])
