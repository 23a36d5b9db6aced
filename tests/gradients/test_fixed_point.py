"""Derivatives at fixed points, against those of the runs that lead there."""

import functools

import jax
import numpy as np
import pytest
from problems import least_squares

from fedjaxsim import fedprox, gaussian, local, no_release, pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.splitting import split
from fedjaxsim.gradients.modes import Implicit
from fedjaxsim.gradients.whole_run import hypergradient, mean_metric
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation


def simulation(algorithm, minibatches=None, sampling=None):
    population, task = least_squares([6, 10, 15, 8])
    population = split(population, validation=0.2)
    minibatches = minibatches or Minibatches(1000, epochs=2)
    sampling = sampling or full_participation()
    mechanism = no_release() if algorithm is local else gaussian()
    return Simulation(algorithm(task), population, sampling, minibatches, mechanism)


def limit(sim, rounds, wrt):
    return hypergradient(sim, mean_metric(sim), rounds, wrt, mode=Implicit())


@pytest.mark.thorough
def test_pmtl_has_the_derivatives_of_the_run_that_led_there():
    # Fixed points of the updates are a family: w̃ − η_s · (mean of w_k) is conserved.
    with jax.enable_x64(True):
        sim = simulation(functools.partial(pmtl, message="update"))
        hparams = sim.hyperparameters(learning_rate=0.3, lam=0.5)
        objective = mean_metric(sim)
        state, _ = sim.run(sim.init(0, hparams), hparams, 200)
        implicit = limit(sim, 200, ("lam", "learning_rate"))
        value, gradient = implicit(0, hparams)
        unrolled, slopes = hypergradient(sim, objective, 200, ("lam", "learning_rate"))(0, hparams)
        np.testing.assert_allclose(value, unrolled, rtol=1e-12)
        np.testing.assert_allclose(gradient["lam"], slopes["lam"], rtol=1e-6)
        assert abs(float(gradient["lam"])) > 1e-3
        np.testing.assert_allclose(
            gradient["learning_rate"], slopes["learning_rate"], rtol=1e-6, atol=1e-12
        )
        reported = sim.evaluate(state, hparams, "validation").mean("loss")
        np.testing.assert_allclose(value, reported, rtol=1e-12)

        with pytest.raises(ValueError, match="server_learning"):
            limit(sim, 200, "server_learning_rate")(0, hparams)
        early = limit(sim, 2, "lam")
        with pytest.raises(ValueError, match="more rounds"):
            early(0, hparams)
        assert np.isnan(jax.jit(early)(jax.random.key(0), hparams)[1]["lam"])
        with pytest.raises(ValueError, match="noise"):
            implicit(0, hparams.replace(noise_multiplier=1.0, clip=1.0))
        with pytest.raises(ValueError, match="sampling_rate"):
            limit(sim, 200, "sampling_rate")(0, hparams)


@pytest.mark.thorough
def test_fedprox_meets_its_isolated_fixed_point():
    with jax.enable_x64(True):
        sim = simulation(fedprox)
        hparams = sim.hyperparameters(learning_rate=0.3, mu=0.3)
        objective, names = mean_metric(sim), ("mu", "learning_rate", "server_learning_rate")
        _, gradient = limit(sim, 200, names)(0, hparams)
        _, slopes = hypergradient(sim, objective, 200, names)(0, hparams)
        for name in names:
            np.testing.assert_allclose(gradient[name], slopes[name], rtol=1e-6, atol=1e-12)
        assert abs(float(gradient["mu"])) > 1e-3
        assert abs(float(gradient["learning_rate"])) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": poisson(1.0)}, "'poisson'"),
        ({"minibatches": Minibatches(1000, steps=1)}, "full batches"),
        ({"minibatches": Minibatches(11, epochs=1)}, "at least 12"),
    ],
)
def test_rounds_that_differ_have_no_fixed_point(changes, message):
    sim = simulation(pmtl, **changes)
    with pytest.raises(ValueError, match=message):
        limit(sim, 200, "lam")
