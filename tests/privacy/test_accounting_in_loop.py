"""What is computed inside jit, in float32, against float64 on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import compose

from fedjaxsim.privacy import ledger as ledgers
from fedjaxsim.privacy.accounting import in_loop, rdp
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.events import Gaussian
from fedjaxsim.privacy.ledger import charge, entries


@jax.jit
def rdp_of_poisson(z, p):
    return rdp.poisson(z, p, rdp.INTEGER_ORDERS, jnp)


@pytest.mark.parametrize("p", [1e-5, 1e-3, 0.02, 0.3, 0.5, 0.9])
@pytest.mark.parametrize(
    "z",
    [0.5, 2.0, 100.0, *(pytest.param(z, marks=pytest.mark.thorough) for z in (0.8, 10.0, 1000.0))],
)
def test_float32_agrees_with_float64(z, p):
    z, p = np.float32(z), np.float32(p)
    exact = compose((float(z), float(p), 1), orders=rdp.INTEGER_ORDERS)
    np.testing.assert_allclose(rdp_of_poisson(z, p), exact, rtol=3e-5)


def test_a_million_rounds_do_not_drift():
    def run(ledger):
        return jax.lax.scan(lambda c, _: (charge(c, 0.8, 0.01, 0), None), ledger, length=10**6)[0]

    account = ledgers.no_charges(SamplingScheme("poisson", 1000, 1000), Gaussian(), 1)
    z, p = np.float32(0.8), np.float32(0.01)
    assert entries(jax.jit(run)(account)) == [(float(z), float(p), 10**6)]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [((1.0, 1 / 205, 100 / 205, 200.0), 16.8323), ((2.0, 1e-4, 0.01, 20000.0), 2.77982)],
)
def test_noise_for_a_target_in_jit(plan, expected):
    z = jax.jit(in_loop.noise_multiplier_in_jit)(*plan)
    assert float(z) == pytest.approx(expected, rel=2e-5)


def test_the_inverse_returns_the_upper_end_and_has_all_derivatives():
    arguments = (0, 1, 2, 3)
    inverse = jax.jit(in_loop.noise_multiplier_in_jit)
    backward = jax.jit(jax.grad(in_loop.noise_multiplier_in_jit, argnums=arguments))
    forward = jax.jit(jax.jacfwd(in_loop.noise_multiplier_in_jit, argnums=arguments))
    with jax.enable_x64(True):
        for plan in ((1.0, 1 / 205, 100 / 205, 200.0), (2.0, 1e-4, 0.01, 20000.0)):
            epsilon, delta, p, rounds = plan
            rounds_of_plan = (float(inverse(*plan)), p, int(rounds))
            values = compose(rounds_of_plan, orders=rdp.INTEGER_ORDERS)
            met = rdp.epsilon(values, delta, rdp.INTEGER_ORDERS)
            assert epsilon * (1 - 1e-9) < met <= epsilon * (1 + 1e-12)
            back, ahead = backward(*plan), forward(*plan)
            for index, value in enumerate(plan):
                step = 1e-4 * value
                above, below = (
                    inverse(*(x + sign * step * (i == index) for i, x in enumerate(plan)))
                    for sign in (1, -1)
                )
                difference = float(above - below) / (2 * step)
                assert float(back[index]) == pytest.approx(difference, rel=1e-4)
                assert float(ahead[index]) == pytest.approx(difference, rel=1e-4)


def test_the_inverse_maps_over_targets():
    targets = jnp.array([0.5, 1.0, 8.0])
    mapped = jax.jit(jax.vmap(lambda e: in_loop.noise_multiplier_in_jit(e, 1e-5, 0.1, 100.0)))
    one = jax.jit(in_loop.noise_multiplier_in_jit)
    np.testing.assert_allclose(
        mapped(targets), [one(e, 1e-5, 0.1, 100.0) for e in targets], rtol=1e-5
    )
