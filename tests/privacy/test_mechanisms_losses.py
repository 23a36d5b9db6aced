"""The privacy losses of mechanisms on worst pairs of inputs, against their distributions."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram, pure_gram, spectral_bound, wishart
from fedjaxsim.privacy.mechanisms.sums import adaptive_clipping, client_noise, pure
from fedjaxsim.privacy.messages import Messages

ALARM = 1e-6  # false-alarm rate of every statistical test here
DRAWS = 20_000
C, Z, SIGMA, DENOMINATOR = 2.0, 1.25, 1.5, 4.0
HPARAMS = Hyperparameters(
    clip=C,
    noise_multiplier=Z,
    count_noise=SIGMA,
    target_quantile=0.5,
    clip_learning_rate=0.2,
).as_arrays()
KEYS = jax.random.split(jax.random.key(0), DRAWS)

FAR, NEAR, NOTHING = [9.0, 0, 0], [-1.9999, 0, 0], [0, 0, 0]  # clipped to 2; just inside
ACROSS = [0, 9.0, 0]


def add(mechanism, message):
    """The accumulator of one client's message."""
    return add_one(mechanism, np.array([message], np.float32))


@partial(jax.jit, static_argnums=0)
def add_one(mechanism, messages):
    one = jnp.ones(1, bool)
    return mechanism.add(
        mechanism.zero(messages[0], 1),
        Messages(messages),
        one,
        jnp.zeros(1, int),
        mechanism.init(HPARAMS),
        HPARAMS,
    )


@partial(jax.jit, static_argnums=0)
def releases(mechanism, accumulator):
    def one(key):
        return mechanism.release(
            accumulator, DENOMINATOR, key, mechanism.init(HPARAMS), HPARAMS, jnp.int32(0)
        )

    return jax.vmap(one)(KEYS)


def coordinates(statistic):
    """The Frobenius geometry of symmetric matrices as coordinates, (…, d(d + 1)/2); else as it is.

    Off the diagonal a number stands for two, and counts √2 times.
    """
    statistic = np.asarray(statistic, np.float64)
    if statistic.ndim < 2 or statistic.shape[-1] != statistic.shape[-2]:
        return statistic
    rows, columns = np.triu_indices(statistic.shape[-1])
    return statistic[..., rows, columns] * np.where(rows == columns, 1, math.sqrt(2))


GAUSSIAN, WEIGHTED, ADAPTIVE = gaussian(), gaussian([4.0], max_weight=4.0), adaptive_clipping()
GRAM = gaussian_gram(psd_deviations=None)
DIAGONAL = gaussian_gram(diagonal=True, psd_deviations=None)
PURE = pure()
PURE_GRAM = pure_gram(psd_deviations=None)
PURE_DIAGONAL = pure_gram(diagonal=True, psd_deviations=None)
GRAMS = [GRAM, DIAGONAL, PURE_GRAM, PURE_DIAGONAL]


def sums(mechanism, released):
    """Recover the noised statistic from a release."""
    return coordinates(released.value) * (1.0 if mechanism in GRAMS else DENOMINATOR)


@pytest.mark.parametrize(
    ("mechanism", "message", "other"),
    [
        pytest.param(GAUSSIAN, FAR, NOTHING, marks=pytest.mark.thorough),
        (WEIGHTED, FAR, NEAR),
        (GRAM, FAR, ACROSS),
        pytest.param(GAUSSIAN, FAR, NEAR, marks=pytest.mark.thorough),
        pytest.param(GRAM, FAR, NOTHING, marks=pytest.mark.thorough),
        pytest.param(DIAGONAL, FAR, NOTHING, marks=pytest.mark.thorough),
        pytest.param(DIAGONAL, FAR, ACROSS, marks=pytest.mark.thorough),
    ],
)
def test_gaussian_losses_are_normal_with_the_stated_mu(mechanism, message, other):
    # The log ratio of N(a, s²) and N(b, s²) under the first is N(μ²/2, μ²), μ = ‖a − b‖/s.
    mu = (1 if other is NOTHING else mechanism.event.replace) / Z
    accumulator = add(mechanism, message)
    x = sums(mechanism, releases(mechanism, accumulator))
    a, b = coordinates(accumulator.total), coordinates(add(mechanism, other).total)
    s = Z * (C**2 if mechanism in GRAMS else C)
    losses = (np.sum((x - b) ** 2, axis=1) - np.sum((x - a) ** 2, axis=1)) / (2 * s**2)
    assert scipy.stats.kstest(losses, scipy.stats.norm(mu**2 / 2, mu).cdf).pvalue > ALARM
    # No coordinate has less noise than the others, and none is shared.
    noise = (x - a) / s
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > ALARM / 2
    norms = scipy.stats.kstest(np.sum(noise**2, axis=1), scipy.stats.chi2(noise.shape[1]).cdf)
    assert norms.pvalue > ALARM / 2


@pytest.mark.parametrize(("other", "factor"), [(NOTHING, 1.0), (NEAR, 2.0)])
def test_the_sum_and_the_count_of_adaptive_clipping_cost_z_together(other, factor):
    accumulator = add(ADAPTIVE, FAR)
    released = releases(ADAPTIVE, accumulator)
    # C' = C exp(−η (1/2 + count/denominator − γ)), with η = 0.2 and γ = 1/2.
    count = -DENOMINATOR * np.log(np.asarray(released.state, np.float64) / C) / 0.2
    z_sum = (Z**-2 - (2 * SIGMA) ** -2) ** -0.5
    x = np.column_stack([np.asarray(released.value) * DENOMINATOR / (z_sum * C), count / SIGMA])

    def point(total):
        return np.append(np.asarray(total[0], np.float64) / (z_sum * C), total[1] / SIGMA)

    a, b = point(accumulator.total), point(add(ADAPTIVE, other).total)
    losses = (np.sum((x - b) ** 2, axis=1) - np.sum((x - a) ** 2, axis=1)) / 2
    mu = factor / Z
    assert scipy.stats.kstest(losses, scipy.stats.norm(mu**2 / 2, mu).cdf).pvalue > ALARM
    assert np.all(np.asarray(released.noise_multiplier) == Z)


def pure_loss_distribution(shift, losses):
    """P(loss ≤ l) for noise of density ∝ e^(−‖x‖) in three dimensions, moved by `shift`.

    The loss at v + x, ‖v‖ = shift, is ‖v + x‖ − ‖x‖. The radius r is Gamma(3), the cosine between
    v and x uniform; the loss is at most l where the cosine is at most
    ((r + l)² − r² − shift²)/(2 r shift).
    """
    r = scipy.stats.gamma.ppf((np.arange(4_000) + 0.5) / 4_000, 3)
    cosine = ((r + losses[:, None]) ** 2 - r**2 - shift**2) / (2 * r * shift)
    below = np.where(r + losses[:, None] < 0, 0.0, np.clip((cosine + 1) / 2, 0, 1))
    return below.mean(axis=1)


@pytest.mark.parametrize(
    ("mechanism", "message", "other"),
    [
        (PURE, FAR, NOTHING),
        pytest.param(PURE_GRAM, FAR[:2], ACROSS[:2], marks=pytest.mark.thorough),
        pytest.param(PURE, FAR, NEAR, marks=pytest.mark.thorough),
        pytest.param(PURE_GRAM, FAR[:2], NOTHING[:2], marks=pytest.mark.thorough),
        pytest.param(PURE_DIAGONAL, FAR, ACROSS, marks=pytest.mark.thorough),
    ],
)
def test_pure_losses_are_bounded_by_epsilon_and_have_their_distribution(mechanism, message, other):
    accumulator = add(mechanism, message)
    released = releases(mechanism, accumulator)
    charged = float(released.noise_multiplier[0])
    adjacency = 1 if other[0] == other[1] == 0 else mechanism.event.replace
    epsilon = adjacency / charged
    x = sums(mechanism, released)
    a, b = coordinates(accumulator.total), coordinates(add(mechanism, other).total)
    scale = Z * (C**2 if mechanism in GRAMS else C)
    near, far = (np.linalg.norm(x - point, axis=1) / scale for point in (a, b))
    losses = far - near
    assert np.abs(losses).max() <= epsilon * (1 + 1e-5)
    assert losses.max() > 0.98 * epsilon  # reached: ε is not larger than it must be
    grid = np.linspace(-epsilon, epsilon, 201)
    distribution = partial(np.interp, xp=grid, fp=pure_loss_distribution(epsilon, grid))
    assert scipy.stats.kstest(losses, distribution).pvalue > ALARM
    # In three dimensions, the radius is Gamma(3) and each coordinate of the direction uniform.
    assert scipy.stats.kstest(near, scipy.stats.gamma(3).cdf).pvalue > ALARM / 4
    for coordinate in ((x - a) / scale / near[:, None]).T:
        assert scipy.stats.kstest((coordinate + 1) / 2, "uniform").pvalue > ALARM / 4


@pytest.mark.thorough
def test_noise_at_the_clients_adds_up_over_the_realised_cohort():
    mechanism = client_noise()
    one = add(mechanism, [1.0, 0, 0])
    accumulator = jax.tree.map(lambda leaf: 2 * leaf, one)
    noise = np.asarray(releases(mechanism, accumulator).value) - [1.0, 0, 0]
    # The mean of two messages with noise of zC each.
    assert scipy.stats.kstest(noise.ravel() / (Z * C / math.sqrt(2)), "norm").pvalue > ALARM
    assert mechanism.event.kind == "no_known_cost"


@pytest.mark.thorough
def test_wishart_noise_gives_outputs_that_a_neighbour_cannot():
    """Why no ε is given: these outputs have no probability at all if the client holds w.

    R − wwᵀ is not positive definite for R = E, of a client with nothing, with probability
    1 − e^(−ε). A guarantee (ε', δ) needs δ of at least that.
    """
    mechanism = wishart()
    epsilons = np.array([0.1, 0.5, 1.0, 2.0])

    @jax.jit
    def noise(z):
        hparams = HPARAMS.replace(noise_multiplier=z)
        accumulator = mechanism.zero(jnp.zeros(2), 1)

        def one(key):
            return mechanism.release(accumulator, 1.0, key, (), hparams, jnp.int32(0)).value

        return jax.vmap(one)(KEYS)

    w = np.array([0.6 * C, 0.8 * C])
    for epsilon in epsilons:
        released = np.asarray(noise(jnp.float32(1 / epsilon)), np.float64)
        assert np.all(np.linalg.eigvalsh(released) > 0)
        impossible = np.count_nonzero(np.linalg.eigvalsh(released - np.outer(w, w))[:, 0] < 0)
        test = scipy.stats.binomtest(impossible, DRAWS, -math.expm1(-epsilon))
        assert test.pvalue > ALARM / len(epsilons)
    assert mechanism.event.kind == "no_known_cost"


@pytest.mark.parametrize(
    ("kind", "diagonal"),
    [
        pytest.param(gaussian_gram, False, marks=pytest.mark.thorough),
        (gaussian_gram, True),
        pytest.param(pure_gram, False, marks=pytest.mark.thorough),
    ],
)
def test_the_shift_makes_the_release_positive_definite(kind, diagonal):
    t = 1.2
    mechanism = kind(diagonal, psd_deviations=t)
    accumulator = mechanism.zero(jnp.zeros(6), 1)  # nothing but noise: the worst case
    values = np.asarray(releases(mechanism, accumulator).value, np.float64)
    smallest = values.min(axis=1) if diagonal else np.linalg.eigvalsh(values)[:, 0]
    failure = math.exp(-(t**2) / 2) * (2 if kind is pure_gram else 1)
    # One-sided: as many positive definite draws as the bound promises, up to chance.
    assert np.count_nonzero(smallest > 0) > scipy.stats.binom.ppf(ALARM, DRAWS, 1 - failure)


def test_the_spectral_bound_holds_the_mean_of_the_smallest_eigenvalue():
    # On a diagonal of two, E max = 1/√π < √(2 ln 2); of one, no shift for the mean is needed.
    assert spectral_bound((2,), 0.0) == pytest.approx(math.sqrt(2 * math.log(2)))
    assert spectral_bound((1,), 3.0) == 3.0
    assert spectral_bound((8, 8), 0.0) == 4.0
