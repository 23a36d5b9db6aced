"""DP-MTRL: MTRL without noise, and models that are functions of its releases alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.linear_tasks import PLAIN, TASK, M, behind, path

from fedjaxsim.algorithms.mpmtl import dp_mtrl
from fedjaxsim.privacy.mechanisms.sums import every_row
from fedjaxsim.testing import check_billboard


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


@functools.cache
def published_rows(rounds):
    """DP-MTRL's simulation, and what its clients predict with after so many rounds."""
    sim = behind(dp_mtrl(TASK, num_clients=M, acceleration="convex"), every_row())

    def run(hparams):
        return sim.run(sim.init(0, hparams), hparams, rounds)[0]

    return sim, run


@pytest.mark.thorough
def test_dp_mtrl_without_noise_is_mtrl_and_with_it_clients_have_their_noised_models():
    sim, run = published_rows(3)
    predict = jax.vmap(sim.algorithm.predict, (None, 0, None, 0))
    ids = jnp.arange(M)
    hparams = sim.hyperparameters(**PLAIN)
    state = run(hparams)
    found = predict(state.shared, state.personal, hparams, ids)["kernel"][:, 0].T
    np.testing.assert_allclose(found, path("relationship", "convex")(PLAIN)[2], rtol=1e-6)
    noised = hparams.replace(clip=2.0, noise_multiplier=1.5)
    state = run(noised)
    # What clients predict with is a function of the releases: their own state does not matter.
    anything = jax.tree.map(lambda leaf: leaf + 1.0, state.personal)
    for own in (state.personal, anything):
        models = predict(state.shared, own, noised, ids)["kernel"]
        np.testing.assert_array_equal(models.swapaxes(1, 2), state.shared.rows)
    check_billboard(sim, noised, clients=[2])
