import chex
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.mechanisms import gaussian, no_release, noise_like
from fedjaxsim.privacy.messages import Messages

IDS = jnp.arange(5)
HPARAMS = Hyperparameters(clip=2.0, noise_multiplier=1.5).as_arrays()


@jax.jit
def total(messages, mask, hparams=HPARAMS):
    mechanism = gaussian()
    one = jax.tree.map(lambda leaf: leaf[0], messages)
    return mechanism.add(mechanism.zero(one, 5), Messages(messages), mask, IDS, (), hparams)


any_float = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(deadline=None, max_examples=200)
@given(hnp.arrays(np.float32, (5, 3), elements=any_float), st.integers(0, 4))
def test_one_client_moves_the_sum_by_at_most_the_clip_norm(messages, client):
    mask = np.ones(5, bool)
    with_client = total(jnp.asarray(messages), mask).total
    mask[client] = False
    without = total(jnp.asarray(messages), mask).total
    moved = np.linalg.norm(np.asarray(with_client, np.float64) - np.asarray(without, np.float64))
    assert moved <= 2.0 * (1 + 1e-6)  # the sums themselves are rounded to float32


def test_counts_clipped_and_broken_messages_of_present_clients_only():
    messages = jnp.array([[3.0, 0], [1.0, 0], [np.nan, 0], [np.inf, 0], [9.0, 0]])
    result = total(messages, np.array([True, True, True, False, False]))
    assert int(result.clipped) == 1
    assert int(result.nonfinite) == 1
    np.testing.assert_allclose(result.total, [3.0, 0], rtol=3e-5)  # 2 + 1 + 0


class ReleaseTest(chex.TestCase):
    @chex.variants(with_jit=True)  # pyright: ignore[reportCallIssue]
    def test_release_is_the_noised_sum_over_the_public_denominator(self):
        mechanism = gaussian()
        sums = {"w": jnp.full(100_000, 30.0), "b": jnp.full(100_000, -30.0)}
        accumulator = mechanism.zero(sums, 1)._replace(total=sums)

        @self.variant  # pyright: ignore[reportAttributeAccessIssue]
        def release(key):
            return mechanism.release(accumulator, 10.0, key, (), HPARAMS, jnp.int32(0))

        out = release(jax.random.key(0))
        assert float(out.noise_multiplier) == 1.5
        noise = np.concatenate([out.value["w"] - 3.0, out.value["b"] + 3.0]) * 10.0
        # zC = 3; the sum of squares over 9 is χ² with 200,000 degrees of freedom.
        statistic = np.sum(np.square(noise, dtype=np.float64)) / 9.0
        low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], noise.size)
        assert low < statistic < high
        assert scipy.stats.kstest(noise / 3.0, "norm").pvalue > 1e-6
        # Leaves have noise of their own: a correlation of 100,000 pairs is N(0, 1/n).
        correlation = np.corrcoef(noise[:100_000], noise[100_000:])[0, 1]
        assert abs(correlation) < scipy.stats.norm.isf(5e-7) / np.sqrt(100_000)


def test_a_schedule_of_noise_is_read_by_round():
    hparams = Hyperparameters(clip=1.0, noise_multiplier=[1.0, 2.0, 3.0]).as_arrays()
    mechanism = gaussian()
    accumulator = mechanism.zero(jnp.zeros(4), 1)

    @jax.jit
    def release(t):
        return mechanism.release(accumulator, 1.0, jax.random.key(7), (), hparams, t)

    expected = jax.jit(lambda z: noise_like(jax.random.key(7), jnp.zeros(4), z))
    for t, z in enumerate([1.0, 2.0, 3.0]):
        out = release(jnp.int32(t))
        assert float(out.noise_multiplier) == z
        np.testing.assert_array_equal(out.value, expected(np.float32(z)))


def test_no_noise_and_no_clipping_is_the_plain_mean():
    hparams = Hyperparameters(clip=np.inf, noise_multiplier=0.0).as_arrays()
    accumulator = total(jnp.array([[1.0, 2.0], [3.0, 6.0]]), np.ones(2, bool), hparams)
    release = jax.jit(lambda total, key: gaussian().release(total, 2.0, key, (), hparams, 0).value)
    np.testing.assert_array_equal(release(accumulator, jax.random.key(0)), [2.0, 4.0])


def test_the_closed_mechanism_releases_nothing():
    mechanism = no_release()
    accumulator = mechanism.add(
        mechanism.zero((), 5), Messages(()), jnp.ones(5, bool), IDS, (), HPARAMS
    )
    out = mechanism.release(accumulator, 1.0, jax.random.key(0), (), HPARAMS, jnp.int32(0))
    assert out.value == ()
    assert mechanism.event.kind == "no_release"


@pytest.mark.parametrize("mode", [jax.jacfwd, pytest.param(jax.jacrev, marks=pytest.mark.thorough)])
def test_the_release_differentiates_in_noise_and_clip_norm(mode):
    mechanism, key = gaussian(), jax.random.key(3)

    def release(z, c):
        hparams = Hyperparameters(clip=c, noise_multiplier=z).as_arrays()
        out = mechanism.release(
            mechanism.zero(jnp.zeros(2), 1), 1.0, key, (), hparams, jnp.int32(0)
        )
        return out.value

    unit = np.asarray(jax.jit(lambda: noise_like(key, jnp.zeros(2), jnp.float32(1.0)))())
    of_z, of_c = jax.jit(mode(release, (0, 1)))(1.5, 2.0)
    np.testing.assert_allclose(of_z, 2.0 * unit, rtol=1e-6)
    np.testing.assert_allclose(of_c, 1.5 * unit, rtol=1e-6)
