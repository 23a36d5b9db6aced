"""The rules of a descent: what theory says of a quadratic model, and its trust region."""

import math

import numpy as np
import pytest

from fedjaxsim.tune import Measured, Optax, Place, Quadratic, descend

CURVATURE = np.array([[3.0, 1.0, 0.0], [1.0, 2.0, -0.5], [0.0, -0.5, 40.0]])
"""Positive definite; its eigenvalues are 1.4, 3.6 and 40."""
OPTIMUM = {"lam": 0.02, "eta": 0.5, "clip_norm": 3.0}


def measure(point):
    """The logarithm of the objective is ½ dᵀ H d, d the logarithms of h over those of h*."""
    away = np.array([math.log(point[name] / best) for name, best in OPTIMUM.items()])
    slope = CURVATURE @ away
    value = math.exp(away @ slope / 2)
    gradients = {n: np.array([value * s / point[n]]) for n, s in zip(OPTIMUM, slope, strict=True)}
    return Measured(np.array([value]), gradients)


def place(values, slope, at=None):
    slope = np.asarray(slope, float)
    at = np.zeros(len(slope)) if at is None else np.asarray(at, float)
    values = np.atleast_1d(np.asarray(values, float))
    finite = bool(np.all(np.isfinite(values)) and np.all(np.isfinite(slope)))
    return Place(at, values, slope, np.zeros(len(slope)), finite)


def test_a_quadratic_is_learnt_after_as_many_steps_as_coordinates():
    # Nocedal and Wright, theorem 6.1: after k independent steps the model is exact. Steps within
    # the trust region follow, the last of which is Newton's and ends at the optimum itself.
    start = {"lam": 0.02 * math.e, "eta": 0.5 / math.e, "clip_norm": 3.0 * 1.1}
    path = descend(measure, start, steps=10, rule=Quadratic())
    for name, best in OPTIMUM.items():
        assert path.best.point[name] == pytest.approx(best, rel=1e-6)


def test_the_first_step_is_the_longest_one_down_the_slope():
    rule = Quadratic(longest=1.5)
    here = place([2.0, 4.0], [3.0, 0.0, 4.0])
    np.testing.assert_allclose(
        rule.step(rule.start(here), here), [-0.9, 0.0, -1.2], rtol=1e-6, atol=1e-12
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_step_in_the_trust_region_is_better(seed):
    rng = np.random.default_rng(seed)
    eigenvalues = rng.normal(size=3) * [5.0, 1.0, 0.3]  # of either sign
    axes = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    model, slope = axes @ np.diag(eigenvalues) @ axes.T, rng.normal(size=3)
    rule, radius = Quadratic(longest=10.0), 0.8
    memory = rule.start(place(1.0, slope))._replace(curvature=model, radius=radius)
    step = rule.step(memory, place(1.0, slope))
    weights = np.maximum(np.abs(eigenvalues), 0.01 * np.max(np.abs(eigenvalues)))

    def change(steps):
        return steps @ slope + np.einsum("ni,ij,nj->n", steps, model, steps) / 2

    def length(steps):
        return np.linalg.norm((steps @ axes) * np.sqrt(weights), axis=1)

    assert length(step[None])[0] <= radius * (1 + 1e-9)
    others = rng.normal(size=(20_000, 3))
    others *= (radius * rng.uniform(size=20_000) ** (1 / 3) / length(others))[:, None]
    assert change(step[None])[0] <= change(others).min() + 1e-9


def test_a_cliff_shortens_the_steps_and_teaches_no_curvature():
    rule = Quadratic()
    here = place(1.0, [1.0, 0.0])
    memory = rule.start(here)
    step = rule.step(memory, here)
    for there in (place(np.nan, [np.nan, np.nan], step), place(1e30, [1e33, 0.0], step)):
        after = rule.learn(memory, here, there, kept=False)
        np.testing.assert_array_equal(after.curvature, memory.curvature)
        assert after.radius == pytest.approx(memory.radius / 3)
        assert rule.radius(after) == pytest.approx(rule.radius(memory) / 3)


def test_only_a_positive_objective_has_a_logarithm():
    with pytest.raises(ValueError, match=r"positive objective, got -1.0 at the start"):
        Quadratic().start(place(-1.0, [1.0]))


@pytest.mark.parametrize("rule", [Optax, Quadratic])
@pytest.mark.parametrize("length", [0.0, math.inf, -1.0])
def test_bad_lengths_are_refused(rule, length):
    name = "largest" if rule is Optax else "longest"
    with pytest.raises(ValueError, match="positive and finite"):
        rule(**{name: length})
