"""Derivatives of whole runs against differences of whole runs, and against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import every_system, least_squares, read_by, simulation_of

from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import split
from fedjaxsim.gradients.modes import Reverse
from fedjaxsim.gradients.whole_run import (
    _calibrated,
    _noise_slope,
    hypergradient,
    mean_metric,
)
from fedjaxsim.privacy.accounting.in_loop import noise_multiplier_in_jit
from fedjaxsim.privacy.messages import clip_by_global_norm
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.privacy.schedule import Schedule

pytestmark = pytest.mark.exact_keys
THOROUGH = pytest.mark.thorough
T = 50
LIKE_OTHERS = ("scaffold", "feddyn", "qffl", "pfedme", "per-fedavg", "fedala")
"""Systems whose reverse mode meets no other loop or branch than those of apfl and ifca."""
BOTH = ("pmtl", "fedavg", "mpmtl")
"""Systems whose runs are differentiated in both modes."""
BASE = {
    "learning_rate": 0.05,
    "server_learning_rate": 0.8,
    "lam": 0.3,
    "mu": 0.2,
    "ridge": 0.1,
    "personalization": 0.7,
    "clip": 0.4,
    "noise_multiplier": 0.3,
    "sampling_rate": 0.6,
}
SCHEDULE = (0, 17, T - 1)
"""Rounds of fedavg's noise schedule whose derivatives are compared."""


def read_names(sim):
    """The hyperparameters that a run of it has derivatives in."""
    return tuple(name for name in sim.records if name != "sampling_rate")


def regression(broken):
    """Five clients; the broken one has two rows, so no validation rows, and diverges at once."""
    population, task = least_squares([5, 9, 17, 8, 12])
    clients = [population.rows(k) for k in range(5)]
    if broken:
        clients.append({"x": np.full((2, 3), 1e200), "y": np.full(2, 1e200)})
    return split(Population.from_clients(clients), validation=0.2), task


@functools.cache
def case(name):
    """A simulation, its hyperparameters, and its derivatives in forward mode.

    Between them the algorithms have every kind of loop: epochs and steps, both chunk maps, cohorts
    that are drawn and everyone.
    """
    population, task = regression(name in ("fedavg", "fedprox"))
    epochs = name in ("pmtl", "fedavg", "local", "scaffold")
    sends = SYSTEMS[name].sends
    sim = simulation_of(
        name,
        task,
        population,
        poisson(0.6) if sends else full_participation(),
        Minibatches(4, epochs=1) if epochs else Minibatches(4, steps=2),
        chunk_size=3,
        chunk_map="vmap" if name in ("ppsgd", "fedavg") else "scan",
    )
    hparams = read_by(sim, **BASE)
    if name == "fedavg":
        z = np.asarray(Schedule.parse("power:0.4").noise(0.3, T), np.float64)
        hparams = hparams.replace(noise_multiplier=z)
    return sim, hparams, hypergradient(sim, mean_metric(sim), T, read_names(sim))


@functools.cache
def reverse_of(name):
    """The derivatives of the same runs in reverse mode; 20 does not divide the rounds."""
    sim, *_ = case(name)
    segment = 20 if name == "ppsgd" else None
    return hypergradient(sim, mean_metric(sim), T, read_names(sim), mode=Reverse(segment))


def difference(value, at, step):
    """The derivative of a smooth function by central differences of the fourth order."""
    near = value(at + step) - value(at - step)
    far = value(at + 2 * step) - value(at - 2 * step)
    return (8 * near - far) / (12 * step)


def check_differences(name, function):
    """Check a function of a seed and hyperparameters that gives a value and its derivatives."""
    sim, hparams, _ = case(name)
    _, gradient = function(3, hparams)

    def at(wrt, point, index=()):
        leaf = np.array(getattr(hparams, wrt), np.float64)
        leaf[index] = point
        return float(function(3, hparams.replace(**{wrt: leaf}))[0])

    for wrt in read_names(sim):
        leaf = np.asarray(getattr(hparams, wrt))
        assert gradient[wrt].shape == leaf.shape
        for index in SCHEDULE if leaf.ndim else ((),):
            # So near that no message's norm crosses the clip norm, where there is a kink.
            expected = difference(
                lambda point, wrt=wrt, index=index: at(wrt, point, index),
                leaf[index],
                1e-4 * leaf[index],
            )
            assert abs(expected) > 1e-6
            np.testing.assert_allclose(gradient[wrt][index], expected, rtol=1e-6)


@pytest.mark.parametrize("system", every_system("pmtl"))
def test_derivatives_of_a_run_are_those_of_differences(system):
    """In reverse mode, or in forward mode, of systems that have both or loops like others."""
    with jax.enable_x64(True):
        in_forward_mode = system in (*BOTH, *LIKE_OTHERS)
        check_differences(system, case(system)[2] if in_forward_mode else reverse_of(system))


@pytest.mark.thorough
@pytest.mark.parametrize("system", BOTH)
def test_both_modes_give_the_same_numbers(system):
    # In fedavg a client's messages are never finite, so they count as zero: forward mode and the
    # differences above show what reverse mode must make of them.
    with jax.enable_x64(True):
        sim, hparams, forward = case(system)
        value, gradient = forward(3, hparams)
        same, backward = reverse_of(system)(3, hparams)
        np.testing.assert_allclose(same, value, rtol=1e-12)
        for name in read_names(sim):
            assert backward[name].shape == np.shape(getattr(hparams, name))
            np.testing.assert_allclose(backward[name], gradient[name], rtol=1e-10, atol=1e-14)


@pytest.mark.thorough
def test_derivatives_are_finite_at_kinks():
    with jax.enable_x64(True):
        # The level 1 of PP-SGD, where both step sizes have one; and no noise at all.
        _, hparams, forward = case("ppsgd")
        hparams = hparams.replace(personalization=1.0, noise_multiplier=0.0)
        for function in (forward, reverse_of("ppsgd")):
            assert all(np.all(np.isfinite(g)) for g in function(0, hparams)[1].values())

        # A norm of exactly C, and next to it: between the derivatives from inside and outside.
        def norm(v, c):
            return jnp.linalg.norm(clip_by_global_norm(v, c).messages)

        for c in (5.0, np.nextafter(5.0, 6), 5 / (1 - 128 * np.finfo(float).eps)):
            by_v, by_c = jax.grad(norm, argnums=(0, 1))(jnp.array([3.0, 4.0]), jnp.asarray(c))
            inside = np.append([0.6, 0.8], 0.0)
            outside = np.array([0.0, 0.0, 1.0])
            got = np.append(by_v, by_c)
            assert any(np.allclose(got, side, atol=1e-12) for side in (inside, outside))


@pytest.mark.thorough
def test_the_price_of_privacy_is_paid_in_noise():
    with jax.enable_x64(True):
        sim, base, forward = case("pmtl")
        delta, epsilon = 1e-2, 8.0
        priced = hypergradient(sim, mean_metric(sim), T, "epsilon", delta=delta)
        value, found = priced(3, base, epsilon)
        price = found["epsilon"]

        # The run is that of the z that meets ε, and derivatives follow the chain rule.
        hparams = sim.calibrate(base, epsilon=epsilon, rounds=T, delta=delta)
        same, gradient = forward(3, hparams)
        np.testing.assert_allclose(value, same, rtol=1e-12)
        slope = slope_of_noise(sim, base, epsilon, rounds=T, delta=delta)
        np.testing.assert_allclose(price, gradient["noise_multiplier"] * slope, rtol=0.02)


def slope_of_noise(sim, hparams, epsilon, **plan):
    """dz/dε by central differences of `calibrate`, whose ε is right to 0.1 %."""
    below, above = (
        float(sim.calibrate(hparams, epsilon=epsilon * factor, **plan).noise_multiplier)
        for factor in (0.9, 1.1)
    )
    return (above - below) / (0.2 * epsilon)


def test_at_a_fixed_epsilon_noise_is_the_least_that_meets_it():
    # By the Rényi bound of the loop a small p and a small ε need much more noise.
    population = Population.from_clients([{"x": np.ones((1, 3)), "y": np.ones(1)}] * 2000)
    _, task = regression(False)
    sim = simulation_of("fedavg", task, population, poisson(0.01), Minibatches(1, steps=1))
    hparams = sim.hyperparameters(clip=1.0)
    plan = {"rounds": 100, "delta": 1e-6}
    arguments = sim, hparams, plan["rounds"], 0.3, plan["delta"], ("epsilon",)
    noisy = _calibrated(*arguments)
    z = float(noisy.noise_multiplier)
    assert z == sim.calibrate(hparams, epsilon=0.3, **plan).noise_multiplier
    assert z < 0.8 * float(jax.jit(lambda: noise_multiplier_in_jit(0.3, 1e-6, 0.01, 100))())
    found = _noise_slope(sim, noisy, **plan)
    assert found == pytest.approx(slope_of_noise(sim, hparams, 0.3, **plan), rel=0.02)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrt", "message"),
    [
        ("lamda", "'lamda'.*'lam'"),
        (("lam", "epsillon"), "'epsilon'"),
        ((), "at least one of"),
        ("sampling_rate", "who takes part"),
        ("epsilon", "epsilon"),
    ],
)
def test_names_without_a_derivative_are_refused(wrt, message):
    sim, hparams, *_ = case("pmtl")
    with pytest.raises(ValueError, match=message):
        hypergradient(sim, mean_metric(sim), T, wrt)(0, hparams)


def test_a_mode_is_an_object():
    sim, *_ = case("pmtl")
    with pytest.raises(ValueError, match=r"Forward\(\) or Reverse\(\), got 'reverse'"):
        hypergradient(sim, mean_metric(sim), T, "lam", mode="reverse")  # pyright: ignore


def test_at_a_fixed_epsilon_a_schedule_is_refused():
    sim, hparams, *_ = case("pmtl")
    price = hypergradient(sim, mean_metric(sim), T, "epsilon")
    with pytest.raises(ValueError, match="epsilon"):
        price(0, hparams.replace(noise_multiplier=np.linspace(1.0, 2.0, T)), 1.0)
