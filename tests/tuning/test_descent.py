"""Descents on objectives whose minimum, or every step, is known by hand."""

import math

import numpy as np
import optax
import pytest

from fedjaxsim.tuning import descent
from fedjaxsim.tuning.descent import ObjectiveValue, descend

SGD = optax.sgd(1.0)


def bowl(optimum, curvatures):
    """Σ c (log h − log h*)², free of chance, and its derivatives with respect to h."""

    def measure(point):
        logs = {name: math.log(point[name] / best) for name, best in optimum.items()}
        value = sum(c * logs[name] ** 2 for name, c in curvatures.items())
        slopes = {name: 2 * c * logs[name] / point[name] for name, c in curvatures.items()}
        return ObjectiveValue(
            np.array([value]), {name: np.array([s]) for name, s in slopes.items()}
        )

    return measure


def scripted(values, slope=2.0):
    """Return given values one after another; d/d log h is the slope."""
    left = [np.atleast_1d(np.asarray(value, float)) for value in values]

    def measure(point):
        value = left.pop(0)
        return ObjectiveValue(value, {"h": np.full(value.shape, slope / point["h"])})

    return measure


def exponents(path):
    return [math.log(step.point["h"]) for step in path.steps]


def test_the_known_optimum_of_a_bowl_in_log_space_is_found():
    optimum = {"lam": 3e-4, "clip": 20.0}
    path = descend(bowl(optimum, {"lam": 0.5, "clip": 8.0}), {"lam": 1.0, "clip": 0.5}, steps=60)
    for name, best in optimum.items():
        assert path.best.point[name] == pytest.approx(best, rel=0.02)
    kept = [step.value for step in path.steps if step.accepted]
    assert kept == sorted(kept, reverse=True)


def test_the_optimum_of_a_bowl_along_no_axis_is_found():
    # ½ dᵀ H d of d = log h − log h*; H has the eigenvalues 1.4, 3.6 and 40.
    matrix = np.array([[3.0, 1.0, 0.0], [1.0, 2.0, -0.5], [0.0, -0.5, 40.0]])
    optimum = {"lam": 0.02, "eta": 0.5, "clip": 3.0}

    def measure(point):
        away = np.array([math.log(point[name] / best) for name, best in optimum.items()])
        slopes = dict(zip(optimum, matrix @ away, strict=True))
        value = np.array([away @ matrix @ away / 2])
        return ObjectiveValue(value, {n: np.array([s / point[n]]) for n, s in slopes.items()})

    start = {"lam": 0.02 * math.e, "eta": 0.5 / math.e, "clip": 3.0 * 1.1}
    path = descend(measure, start, steps=60)
    for name, best in optimum.items():
        assert path.best.point[name] == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("optimizer", [descent.OPTIMIZER, optax.lion(1.0), SGD])
def test_a_descent_repeats_itself(optimizer):
    measure = bowl({"a": 0.1, "b": 30.0}, {"a": 1.0, "b": 5.0})
    paths = [
        descend(measure, {"a": 1.0, "b": 2.0}, steps=12, optimizer=optimizer) for _ in range(2)
    ]
    first, again = ([(s.point, s.radius, s.accepted) for s in path.steps] for path in paths)
    assert first == again
    assert paths[0].best.value < 0.1 * paths[0].steps[0].value


def test_bad_steps_are_taken_back_and_the_radius_is_halved():
    # From h = 1 the step asked for is 2 in log h, so each one is as long as the radius.
    values = [5.0, np.nan, 1e30, 4.0, 3.0, 3.5]
    path = descend(scripted(values), {"h": 1.0}, steps=5, optimizer=SGD)
    assert [step.accepted for step in path.steps] == [True, False, False, True, True, False]
    assert [step.radius for step in path.steps] == [math.inf, 1, 0.5, 0.25, 0.375, 0.5625]
    np.testing.assert_allclose(
        exponents(path), [0, -1, -0.5, -0.25, -0.625, -0.625 - 0.5625], rtol=1e-6
    )
    assert path.best is path.steps[4]
    assert path.stopped == descent.SPENT


def test_a_short_step_taken_back_halves_its_own_length():
    # The optimizer asks for 0.2 only: half of the radius would allow the same step again.
    path = descend(scripted([1.0, 2.0, 0.5]), {"h": 1.0}, steps=2, optimizer=optax.sgd(0.1))
    np.testing.assert_allclose(exponents(path), [0, -0.2, -0.1], rtol=1e-6)
    assert path.steps[2].radius == pytest.approx(0.1, rel=1e-6)


def test_the_radius_grows_to_the_first_one_and_no_further():
    path = descend(scripted([9, 10, 8, 7, 6, 5.0]), {"h": 1.0}, steps=5, optimizer=SGD)
    assert [step.radius for step in path.steps] == [math.inf, 1, 0.5, 0.75, 1, 1]


def test_a_gradient_that_is_not_finite_is_a_bad_step():
    def measure(point):
        slope = np.inf if point["h"] < 0.5 else 2.0
        return ObjectiveValue(np.array([point["h"]]), {"h": np.array([slope])})

    path = descend(measure, {"h": 1.0}, steps=1, optimizer=SGD)
    assert [step.accepted for step in path.steps] == [True, False]


@pytest.mark.parametrize(
    ("rises", "accepted"),
    [
        ([0.1, 0.1, 0.1, 0.1], False),  # all runs are worse, however far apart they are
        ([0.4, -0.2, 0.4, -0.2], True),  # the same mean, with a standard error of 0.173
        ([0.3, 0.0, 0.2, -0.1], False),  # the same mean, with a standard error of 0.091
    ],
)
def test_a_step_is_bad_beyond_the_standard_error_of_the_difference(rises, accepted):
    start = np.array([1.0, 50.0, -3.0, 7.0])
    measure = scripted([start, start + rises])
    path = descend(measure, {"h": 1.0}, steps=1, optimizer=SGD)
    assert path.steps[1].accepted is accepted


def test_a_rejection_makes_the_optimizer_forget():
    # Momentum would go on downwards after the slope has turned.
    slopes = iter([2.0, -0.1, -0.1, -0.1])
    values = iter([3.0, 2.0, 2.5, 1.0])

    def measure(point):
        slope = np.array([next(slopes) / point["h"]])
        return ObjectiveValue(np.array([next(values)]), {"h": slope})

    path = descend(measure, {"h": 1.0}, steps=3, optimizer=optax.sgd(0.4, momentum=0.9))
    # −0.8; then −0.8·0.9 + 0.04 further, taken back; then 0.04 from where it was.
    np.testing.assert_allclose(exponents(path), [0, -0.8, -0.8 - 0.68, -0.8 + 0.04], rtol=1e-5)


def test_it_ends_where_the_gradient_vanishes_within_its_standard_error():
    def measure(spread):
        noise = spread * np.array([1.0, -1.0, 2.0, -2.0])
        return lambda point: ObjectiveValue(point["h"] + noise, {"h": 0.3 + noise})

    # The mean slope is 0.3; that of [1, −1, 2, −2] has a standard error of √(10/3)/2 = 0.913.
    clear = descend(measure(0.3), {"h": 1.0}, steps=1)
    lost = descend(measure(0.4), {"h": 1.0}, steps=1)
    assert len(clear.steps) == 2
    assert lost.stopped == descent.FLAT
    assert len(lost.steps) == 1
    assert lost.steps[0].gradient_error["h"] == pytest.approx(0.4 * math.sqrt(10 / 3) / 2)


def test_bounds_hold_and_end_the_descent():
    measure = bowl({"a": 1e-3, "b": 5.0}, {"a": 1.0, "b": 1.0})
    path = descend(measure, {"a": 1.0, "b": 5.0}, steps=50, bounds={"a": (0.2, 3.0)})
    assert path.best.point["a"] == pytest.approx(0.2)
    assert all(step.point["a"] >= 0.2 * (1 - 1e-9) for step in path.steps)
    assert path.stopped == descent.BOUNDED


def test_it_ends_when_no_short_step_helps():
    path = descend(scripted([0.0, *[1.0] * 20]), {"h": 1.0}, steps=20, optimizer=SGD)
    assert path.stopped == descent.SHORT
    # 1, 1/2, … 1/512 are tried; 1/1024 is below a thousandth.
    assert len(path.steps) == 11


def test_what_a_path_says_of_itself():
    start, end = np.array([4.0, 6.0]), np.array([1.0, 1.0])
    path = descend(scripted([start, end]), {"h": 1.0}, steps=1, cost=8.0)
    assert [step.runs for step in path.steps] == [8, 16]
    assert path.steps[0].value == 5.0
    assert path.steps[0].gradient == pytest.approx({"h": 2.0})


def test_the_caller_can_stop_it():
    seen = []

    def on_step(step):
        seen.append(step)
        return len(seen) < 2

    measure = scripted([5, 4, 3.0])
    path = descend(measure, {"h": 1.0}, steps=2, optimizer=SGD, on_step=on_step)
    assert path.stopped == descent.STOPPED
    assert list(path.steps) == seen
    assert len(seen) == 2


def test_a_start_that_is_not_finite_ends_it():
    path = descend(scripted([np.inf]), {"h": 1.0}, steps=3)
    assert path.stopped == descent.NOT_FINITE
    assert len(path.steps) == 1
    assert path.steps[0].objective.not_finite[0] == "the objective"


def test_the_derivative_that_is_not_finite_is_named():
    found = descent.ObjectiveValue(
        np.ones(2), {"lam": np.ones(2), "clip": np.array([[1.0, 2.0], [np.nan, 1.0]])}
    )
    assert found.not_finite == ("the derivative by clip",)
    assert not found.finite


@pytest.mark.parametrize(
    ("start", "options", "message"),
    [
        ({}, {}, "hyperparameter"),
        ({"h": 0.0}, {}, "^h "),
        ({"h": math.inf}, {}, "^h "),
        ({"h": 1.0}, {"steps": 0}, "steps"),
        ({"h": 1.0}, {"bounds": {"h": (2.0, 3.0)}}, "^h "),
        ({"h": 1.0}, {"bounds": {"g": (2.0, 3.0)}}, "bounds"),
    ],
)
def test_bad_input_is_refused(start, options, message):
    with pytest.raises(ValueError, match=message):
        descend(scripted([]), start, **{"steps": 1, **options})
