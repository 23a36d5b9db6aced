"""The numbers behind the noise: the normal distribution, by counting the words that lead to it."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scipy.special import ndtri_exp

from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import threefry
from fedjaxsim.kernels.backend import Backend, planning_for
from fedjaxsim.privacy import noise
from fedjaxsim.privacy.mechanisms import gaussian, noise_like
from fedjaxsim.privacy.noise import from_words, normal

LARGEST = 2**63 - 1
_sizes = jax.jit(from_words)
_normal = jax.jit(normal, static_argnums=(1, 2))


def sizes(k: list[int]) -> np.ndarray:
    """The sizes that integers of 63 bits stand for, with a positive sign."""
    high = np.array([number >> 31 for number in k], np.uint32)
    low = np.array([number << 1 & 0xFFFFFFFE for number in k], np.uint32)
    return np.asarray(_sizes(high, low), np.float64)


def exceeding(t: np.ndarray) -> np.ndarray:
    """P(|Z| > t) for the numbers drawn: how many k give a larger size, over 2⁶³."""
    low, high = np.full(len(t), -1, object), np.full(len(t), LARGEST, object)
    while np.any(high - low > 1):
        middle = (low + high) // 2
        above = sizes(list(np.maximum(middle, 0))) > t
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.array([(2**63 - first) / 2**63 for first in high])


def test_the_tails_are_those_of_the_normal_distribution_by_counting():
    t = np.array([1e-6, 1e-3, 0.1, 0.5, 1, 2, 2.4, 2.5, 3, 4, 5, 5.3, 6, 7, 8, 8.5, 9])
    np.testing.assert_allclose(exceeding(t), 2 * scipy.stats.norm.sf(t), rtol=1e-4, atol=2**-63)


def test_sizes_invert_the_distribution_function_at_every_scale():
    # k at 2¹² places in each power of two of the distance from the end.
    distance = [1 + (j << s) for s in range(51) for j in range(2**11, 2**12)]
    ours = sizes([2**63 - d for d in distance])
    # A size stands for the middle of its cell: 2k + 1 of 2⁶⁴.
    log_exceeding = np.array([math.log(2 * d - 1) for d in distance]) - 64 * math.log(2)
    exact = -ndtri_exp(log_exceeding - math.log(2))
    np.testing.assert_allclose(ours, exact, rtol=1e-6)
    # Sizes fall as the distance grows, up to rounding.
    order = np.argsort(np.array(distance, np.float64), kind="stable")
    assert np.all(np.diff(ours[order]) <= 4 * np.spacing(np.float32(10)))


def test_sizes_near_zero_are_proportional_to_k():
    # At 0 the density is 1/√(2π), so |Z| ≈ √(π/2) P(|Z| ≤ z).
    k = [0, 1, 5, 1000, 2**31, 2**40]
    exact = math.sqrt(math.pi / 2) * (2 * np.array(k, np.float64) + 1) / 2**64
    np.testing.assert_allclose(sizes(k), exact, rtol=1e-6)


def test_the_last_bit_is_the_sign_and_the_end_lies_beyond_eight_and_a_half():
    ones = np.uint32(0xFFFFFFFF)
    high = np.array([ones, ones, 0, 0, 12345], np.uint32)
    low = np.array([ones, ones - 1, 1, 0, 678], np.uint32)
    values = np.asarray(_sizes(high, low))
    assert values[0] == -values[1]
    assert values[2] == -values[3]
    assert 9.1 < values[1] < 9.2
    np.testing.assert_array_equal(_sizes(high, low ^ np.uint32(1)), -values)


@pytest.mark.parametrize(("p", "z", "rounds"), [(0.02, 1.0, 2000), (0.05, 0.5, 2000)])
def test_no_release_is_impossible_without_a_client_to_within_any_delta(p, z, rounds):
    """With float32 normals of 23 bits this was 4.9e-4 in the first case, for a δ of 1e-4."""
    # A message of norm C moves the release by 1/z; what is then beyond the largest number drawn
    # cannot come from a run without the client.
    end = sizes([LARGEST])[0]
    impossible = exceeding(np.array([end - 1 / z]))[0] / 2
    assert p * rounds * impossible < 1e-10


def test_draws_are_normal_independent_and_symmetric():
    draws = np.asarray(_normal(jax.random.key(0), (1000, 500)), float)
    assert scipy.stats.kstest(draws.ravel(), "norm").pvalue > 1e-6
    for values in (draws, draws**2, np.sign(draws)):
        centred = (values - values.mean()) / values.std()
        for one, other in (
            (centred[:, 1:], centred[:, :-1]),
            (centred[1:], centred[:-1]),
        ):
            assert abs(np.mean(one * other)) * np.sqrt(one.size) < 5


def test_keys_shapes_and_types():
    first, second = (_normal(jax.random.key(seed), (10, 100)) for seed in (0, 1))
    assert first.dtype == jnp.float32
    assert not np.any(np.asarray(first) == np.asarray(second))
    for shape in ((), (0, 3)):
        draw = jax.eval_shape(lambda key, s=shape: normal(key, s), jax.random.key(0))
        assert draw.shape == shape
    with jax.enable_x64(True):
        wide = _normal(jax.random.key(0), (10, 100), jnp.float64)
        assert wide.dtype == jnp.float64
    np.testing.assert_allclose(wide, first, rtol=2e-6)  # the same words
    with pytest.raises(ValueError, match="bfloat16"):
        normal(jax.random.key(0), (3,), jnp.bfloat16)
    with pytest.raises(ValueError, match="fewer than"):
        jax.eval_shape(lambda key: normal(key, (2**16, 2**16)), jax.random.key(0))


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(1, marks=pytest.mark.thorough),
        pytest.param(2, marks=pytest.mark.thorough),
        3,
        pytest.param(1001, marks=pytest.mark.thorough),
    ],
)
def test_a_draw_in_two_halves_is_that_of_the_words_of_the_key(size):
    counts = np.arange(size, dtype=np.uint32)
    words = threefry.words(jax.random.key_data(jax.random.key(7)), 0 * counts, counts)
    drawn = _normal(jax.random.key(7), (size,))
    with planning_for(Backend("gpu", None)):  # at once
        whole = normal(jax.random.key(7), (size,))
    # Programs of their own may round the last bit of a logarithm their own way.
    for each in (drawn, whole):
        np.testing.assert_array_max_ulp(np.asarray(each), np.asarray(_sizes(*words)), maxulp=4)


@pytest.mark.usefixtures("unrolled")
def test_the_draw_is_compiled_once_however_many_leaves_use_it():
    def hashes(leaves):
        shapes = [jax.ShapeDtypeStruct((3 + leaf,), jnp.float32) for leaf in range(leaves)]

        def noised(key, total):
            return jax.tree.map(jnp.add, total, noise_like(key, total, jnp.float32(2)))

        compiled = jax.jit(noised).lower(jax.random.key(0), shapes).compile()
        return str(compiled.as_text()).count(" xor(")

    assert 20 <= hashes(5) == hashes(1)  # a hash has 20 rounds with one each


def test_the_gaussian_mechanism_draws_from_them():
    mechanism, key = gaussian(), jax.random.key(3)
    shapes = {
        "a": jax.ShapeDtypeStruct((2, 3), jnp.float32),
        "b": jax.ShapeDtypeStruct((), jnp.float32),
    }
    hparams = Hyperparameters(clip=0.5, noise_multiplier=2.0).as_arrays()
    release = jax.jit(
        lambda key: mechanism.release(mechanism.zero(shapes, 1), 10.0, key, (), hparams, 0).value
    )
    out = release(key)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(out)])
    np.testing.assert_allclose(flat, np.asarray(_normal(key, (7,))) * 0.5 * 2.0 / 10, rtol=1e-6)


def test_short_noise_is_drawn_only_by_tests_in_which_noise_is_not_the_question(draw_of):
    folders = {path.name: path for path in Path(__file__).parent.parent.iterdir() if path.is_dir()}
    for name, pattern in (
        ("audit", ""), ("kernels", ""), ("privacy", "noise"), ("privacy", "mechanism"),
        ("privacy", "own_mechanism"), ("privacy", "samplers"), ("privacy", "clipping"),
        ("privacy", "precision"), ("privacy", "transforms"),
    ):  # fmt: skip
        paths = [*folders[name].glob(f"test_{pattern}*.py")]
        assert paths
        assert all(draw_of(path) is noise._draw for path in paths)
    assert noise._draw.__code__.co_filename == noise.__file__
    key = jax.random.key(0)
    np.testing.assert_array_equal(threefry.bits(key, (9,)), jax.random.bits(key, (9,)))
    short = draw_of(folders["engine"] / "test_program.py")
    assert Path(short.__code__.co_filename).name == "session.py"
    # What it draws has the package's mean and variance.
    drawn = jax.jit(short, static_argnums=(1, 2))(jax.random.key_data(key), 10**5, jnp.float32)
    draws = np.asarray(drawn, float)
    assert abs(draws.mean()) < 5 / math.sqrt(draws.size)
    assert abs(draws.var() - 1) < 5 * math.sqrt(2 / draws.size)
