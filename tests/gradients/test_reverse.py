"""How much memory derivatives need as a run grows longer: what the compiler plans, no timing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import least_squares

from fedjaxsim import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.gradients.modes import Forward, Reverse
from fedjaxsim.gradients.whole_run import hypergradient
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation

pytestmark = pytest.mark.usefixtures("fully_optimized")
CLIENTS, FEATURES = 32, 50


def bytes_of(mode, rounds):
    """Temporary memory of the derivative of a run of PMTL in which everyone takes part."""
    population, task = least_squares([8] * CLIENTS, features=FEATURES)
    sim = Simulation(pmtl(task), population, full_participation(), Minibatches(4, steps=1))
    hparams = sim.hyperparameters(lam=0.1, clip=1.0, noise_multiplier=0.1)

    def objective(state, hparams):
        del hparams
        return jnp.sum(jnp.square(state.shared.params["kernel"]))

    function = jax.jit(hypergradient(sim, objective, rounds, ("lam", "clip"), mode=mode))
    compiled = function.lower(jax.random.key(0), hparams.as_arrays()).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    value, gradient = compiled(jax.random.key(0), hparams.as_arrays())
    assert np.isfinite(value)
    assert all(float(slope) != 0 for slope in gradient.values())
    return analysis.temp_size_in_bytes


@pytest.mark.thorough
def test_memory_of_forward_mode_does_not_grow_with_the_rounds():
    assert bytes_of(Forward(), 1000) == bytes_of(Forward(), 10)


@pytest.mark.thorough
def test_memory_of_reverse_mode_grows_as_the_root_of_the_rounds():
    few, many = bytes_of(Reverse(), 256), bytes_of(Reverse(), 1024)
    assert many <= 2 * few
    # One round keeps no less than each client's row: keeping all rounds would take far more.
    assert many < 1024 * CLIENTS * (FEATURES + 1) * 4 / 4
