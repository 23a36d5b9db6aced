"""Compressed messages: unbiased, of the counted size, and bounded by the mechanism after."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import least_squares, numbers, read_by

import fedjaxsim as fjs
from fedjaxsim.algorithms.compression import Compression, compressed, quantize, random_k, top_k
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.runs.memory import traffic

MESSAGE = {"w": jnp.asarray([[1.0, -0.3], [0.2, 0.0]]), "b": jnp.asarray([-4.0, 0.5])}
BATCHES = Minibatches(2, steps=2)


def many(compression, count=4096):
    """Compress the message with many keys, leaves (count, ...)."""
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), count)
    return jax.jit(jax.vmap(lambda key: compression.apply(key, MESSAGE)))(keys)


# --- the attack first: a compression cannot exceed the bound --------------------------------------


def test_the_mechanism_bounds_what_comes_out():
    """A compression that multiplies by 10⁶ moves the release by the clip norm at most."""
    population, task = least_squares([4, 4, 4, 4])
    shouting = Compression(lambda key, v: jax.tree.map(lambda leaf: 1e6 * leaf, v), lambda v: 1)
    sim = fjs.Simulation(
        compressed(fjs.fedavg(task), shouting), population, full_participation(), BATCHES
    )
    hparams = read_by(sim, clip=0.5)
    before = sim.init(0, hparams)
    state, metrics = sim.round(before, hparams)
    moved = numbers(state.shared) - numbers(before.shared)
    assert metrics["clipped"] == 4
    assert np.linalg.norm(moved) <= 0.5


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [quantize(bits=3), random_k(kept=0.4)])
def test_the_mean_over_keys_is_the_message(compression):
    for sent, v in zip(*map(jax.tree.leaves, (many(compression), MESSAGE)), strict=True):
        error = 5 * np.std(sent, axis=0) / np.sqrt(len(sent)) + 1e-6
        assert np.all(np.abs(np.mean(sent, axis=0) - v) <= error)


def test_quantized_numbers_are_levels_with_the_stated_variance():
    """With 3 bits, levels are multiples of s/3, for s = 1 and 4; a third and 4 are levels."""
    sent = many(quantize(bits=3))
    for name, s in (("w", 1.0), ("b", 4.0)):
        level = np.asarray(sent[name]) * 3 / s
        np.testing.assert_allclose(level, np.round(level), atol=1e-5)
        assert np.abs(level).max() <= 3 + 1e-5
        assert np.var(sent[name], axis=0).max() <= 1.01 * s**2 / 6**2
    np.testing.assert_allclose(sent["b"][:, 0], -4.0)
    assert np.all(np.asarray(sent["w"])[:, 1, 1] == 0)


def test_sparse_messages_have_k_numbers():
    kept = top_k(kept=0.5).apply(jax.random.key(0), MESSAGE)  # 3 of 6
    np.testing.assert_array_equal(kept["w"], [[1, 0], [0, 0]])
    np.testing.assert_array_equal(kept["b"], [-4, 0.5])
    numbers_sent = np.zeros(4096)
    for name, sent in many(random_k(kept=0.4)).items():
        v = np.asarray(MESSAGE[name])
        np.testing.assert_allclose(np.where(sent == 0, 2 * v, sent), 2 * v + 0 * sent)  # 6/3
        numbers_sent = numbers_sent + np.count_nonzero(np.reshape(sent, (len(sent), -1)), axis=1)
    assert numbers_sent.max() == 3  # ⌈0.4 · 6⌉


def test_bytes_are_counted_by_hand():
    """Of 6 float32: 24 bytes; 3 bits: ⌈12/8⌉ + 4 and ⌈6/8⌉ + 4; 3 numbers with 3-bit positions."""
    population, task = least_squares([4, 4], features=5)  # 5 weights and a bias
    for compression, expected in (
        (None, 24), (quantize(bits=3), 2 + 4 + 1 + 4), (top_k(kept=0.5), 3 * 4 + 2),
        (random_k(kept=0.5), 3 * 4 + 8),
    ):  # fmt: skip
        plain = fjs.fedavg(task)
        algorithm = plain if compression is None else compressed(plain, compression)
        sim = fjs.Simulation(algorithm, population, full_participation(), BATCHES)
        assert traffic(sim, read_by(sim))["message_bytes"] == expected


def test_derivatives_of_quantized_messages_are_those_of_the_mean():
    def first(v):
        return quantize(bits=2).apply(jax.random.key(0, impl="threefry2x32"), v)["b"][1]

    np.testing.assert_array_equal(jax.grad(first)(MESSAGE)["b"], [0, 1])


# --- what cannot be; systems and placements are in tests/engine/test_availability.py --------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda task: quantize(bits=1), "bits"),
        (lambda task: top_k(kept=0.0), "kept"),
        (lambda task: compressed(fjs.fedavg(task), 8), "quantize"),  # type: ignore[arg-type]
        (lambda task: compressed(compressed(fjs.fedavg(task), top_k()), quantize()), "already"),
        (lambda task: start(compressed(fjs.local(task), quantize())), "nothing to compress"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make(least_squares([4, 4])[1])


def start(algorithm):
    population, _ = least_squares([4, 4])
    sim = fjs.Simulation(algorithm, population, full_participation(), BATCHES, fjs.no_release())
    sim.init(0, read_by(sim))
