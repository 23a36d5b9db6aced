"""Public transforms of messages before a mechanism bounds them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from support.problems import classification

import fedjaxsim as fjs
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram
from fedjaxsim.privacy.mechanisms.sums import adaptive_clipping, every_row, per_layer
from fedjaxsim.privacy.mechanisms.transforms import (
    EncodedState,
    Transform,
    chosen_coordinates,
    quantization,
    random_coordinates,
    random_projection,
    transformed,
)
from fedjaxsim.privacy.messages import Messages

HPARAMS = Hyperparameters(
    clip=2.0, noise_multiplier=0.0, count_noise=0.0, target_quantile=0.5, clip_learning_rate=0.2
).as_arrays()
TRANSFORMS = {
    "projection": random_projection(2),
    "coordinates": random_coordinates(3),
    "chosen": chosen_coordinates([3, 1]),
    "quantization": quantization(0.25),
}
V = {"a": np.array([[0.5, -0.25], [0.0, 1.0], [3e8, 3e8]], np.float32),
     "b": np.array([[[1.0], [0.5]], [[0.0], [0.0]], [[3e8], [-3e8]]], np.float32)}  # fmt: skip


def one(messages):
    return jax.tree.map(lambda leaf: leaf[0], messages)


def round_of(mechanism, messages, mask, state=None, hparams=HPARAMS):
    state = mechanism.init(hparams) if state is None else state
    accumulator = mechanism.add(
        mechanism.zero(one(messages), 3), Messages(messages), mask, jnp.arange(3), state, hparams
    )
    key = jax.random.key(0)
    return accumulator, mechanism.release(accumulator, 1.0, key, state, hparams, jnp.int32(0))


INNER = fjs.gaussian(), fjs.gaussian(exact_sums=True), per_layer()


@pytest.mark.parametrize(
    ("name", "inner"),
    [  # of each kind one is quick
        pytest.param(
            name, inner, marks=[] if INNER.index(inner) == place % 3 else [pytest.mark.thorough]
        )
        for place, name in enumerate(TRANSFORMS)
        for inner in INNER
    ],
)
def test_what_is_summed_is_bounded_after_it_is_encoded(name, inner):
    # The third client's numbers add up in one place of the projection: clipped before, it would
    # move the sum by up to √2 C.
    mechanism = transformed(inner, TRANSFORMS[name])
    everybody, two = np.ones(3, bool), np.array([True, True, False])

    @jax.jit
    def encoded(messages, mask, releases):
        accumulator, out = round_of(mechanism, messages, mask, EncodedState((), releases))
        total = accumulator._replace(total=accumulator.total.total)
        inside = inner.release(total, 1.0, jax.random.key(0), (), HPARAMS, jnp.int32(0)).value
        return ravel_pytree(inside)[0], accumulator.nonfinite, ravel_pytree(out.value)[0]

    for releases in range(3):
        whole, without = (encoded(V, mask, releases)[0] for mask in (everybody, two))
        assert np.linalg.norm(np.float64(whole) - np.float64(without)) <= 2.0 * (1 + 1e-6)
    assert mechanism.event == inner.event
    broken = {"a": np.full_like(V["a"], np.nan), "b": V["b"]}
    _, nonfinite, value = encoded(broken, everybody, 0)
    assert int(nonfinite) == 3
    np.testing.assert_array_equal(value, 0)


def test_a_projection_has_the_right_mean_and_coordinates_are_exact():
    v = jnp.array([1.0, -2.0, 0.5, 0.0])
    keys = jax.random.split(jax.random.key(1), 20_000)
    shapes = jax.ShapeDtypeStruct(v.shape, v.dtype)

    def there_and_back(transform):
        def back(key):
            return transform.decode(transform.encode(v, key), shapes, key)

        return jax.jit(jax.vmap(back))(keys)

    found = np.asarray(there_and_back(random_projection(3)), np.float64)
    # The variance of number i is that of Σ_{j≠i} v_j over the 3 places: (‖v‖² − v_i²)/3.
    error = np.sqrt((np.sum(np.square(v)) - np.square(v)) / 3 / len(keys))
    assert np.all(np.abs(found.mean(axis=0) - v) < 5 * error)
    kept = np.asarray(there_and_back(random_coordinates(3)))
    assert np.all((kept == v) | (kept == 0))
    share = (kept != 0).mean(axis=0)[:3]  # 3 of 4, within five standard errors
    assert np.all(np.abs(share - 0.75) < 5 * np.sqrt(0.75 * 0.25 / len(keys)))


def test_each_release_draws_a_new_transform_and_rounding_is_to_the_step():
    mechanism = transformed(fjs.gaussian(), random_coordinates(2))
    state, mask = mechanism.init(HPARAMS), np.ones(3, bool)
    found = set()
    a_round = jax.jit(lambda state: round_of(mechanism, V, mask, state)[1])
    for _ in range(6):
        out = a_round(state)
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(out.value)])
        found.add(tuple(np.flatnonzero(flat)))
        state = out.state
    assert int(state.releases) == 6
    assert len(found) > 1
    chosen = chosen_coordinates([2, 0])

    @jax.jit
    def there_and_back(v, w, key):
        encoded = chosen.encode(v, key)
        decoded = chosen.decode(encoded, jax.ShapeDtypeStruct((3,), v.dtype), key)
        return encoded, decoded, quantization(0.5).encode(w, key)

    encoded, decoded, rounded = there_and_back(
        np.array([5, 6, 7], np.float32), np.array([0.3, -0.8, 0.2], np.float32), jax.random.key(0)
    )
    np.testing.assert_array_equal(encoded, [7.0, 5.0])
    np.testing.assert_array_equal(decoded, [5.0, 0, 7.0])
    np.testing.assert_array_equal(rounded, [0.5, -1.0, 0.0])


def test_a_mechanism_whose_release_is_no_message_is_refused():
    row = {"a": V["a"]}

    def traced(mechanism):
        return jax.eval_shape(lambda row: round_of(mechanism, row, np.ones(3, bool)), row)

    for inner in (gaussian_gram(), every_row()):
        with pytest.raises(ValueError, match="looks like one message"):
            traced(transformed(inner, quantization(0.1)))
    with pytest.raises(ValueError, match="at least 3 numbers, got 2"):
        traced(transformed(fjs.gaussian(), random_coordinates(3)))
    bad: list[Any] = [[1, 1], [-1], [], [0.5], [[1]]]
    for indices in bad:
        with pytest.raises(ValueError, match="distinct positions"):
            chosen_coordinates(indices)
    with pytest.raises(ValueError, match="step"):
        quantization(0.0)


@pytest.mark.thorough
def test_a_run_behind_a_projection_costs_what_the_mechanism_costs():
    population, task = classification([4] * 6)
    costs, releases = [], 0
    for mechanism in (
        adaptive_clipping(),
        transformed(adaptive_clipping(), random_projection(8)),
    ):
        sim = fjs.Simulation(
            fjs.fedavg(task), population, fjs.poisson(0.5), fjs.Minibatches(2, steps=1), mechanism
        )
        hparams = sim.hyperparameters(clip=1.0, noise_multiplier=1.0, count_noise=3.0)
        state, _ = sim.run(sim.init(0, hparams), hparams, 2)
        costs.append(sim.guarantee(state, 1e-3).find("zero_out"))
        releases = getattr(state.mechanism, "releases", 0)
    assert costs[0] == costs[1]
    assert int(releases) == 2


def test_encoded_messages_are_bounded_and_summed_in_float32():
    # In float16 the sum of 4,096 messages of norm 1 is 2,048, and one message moves it by 0 or 2.
    half = Transform(
        lambda message, key: message.astype(jnp.float16),
        lambda encoded, message, key: encoded.astype(message.dtype),
    )
    mechanism, messages = transformed(fjs.gaussian(), half), np.ones((4096, 1), np.float32)
    hparams = HPARAMS.replace(clip=1.0)
    state, zero = mechanism.init(hparams), mechanism.zero(messages[0], 4096)

    @jax.jit
    def total(mask):
        ids = jnp.arange(4096)
        return mechanism.add(zero, Messages(messages), mask, ids, state, hparams).total.total

    everybody = np.ones(4096, bool)
    without = total(np.arange(4096) > 0)
    assert without.dtype == jnp.float32
    assert total(everybody) == pytest.approx(4096, rel=1e-4)
    assert total(everybody) - without == pytest.approx(1, abs=1e-3)


def test_encoded_messages_that_cannot_be_noised_are_refused():
    whole = Transform(lambda message, key: message.astype(jnp.int32), lambda e, message, key: e)
    with pytest.raises(ValueError, match="real floating numbers"):
        transformed(fjs.gaussian(), whole).zero(V["a"][0], 3)


def test_a_transform_with_a_rule_for_batches_is_refused():
    # It would encode a client's message with those of its chunk.
    @jax.custom_batching.custom_vmap
    def encode(message, key):
        return message

    @encode.def_vmap
    def everybody(size, batched, message, key):
        return jnp.broadcast_to(message.sum(axis=0), message.shape), True

    mixing = Transform(encode, lambda encoded, message, key: encoded)
    with pytest.raises(ValueError, match="custom_vmap"):
        transformed(fjs.gaussian(), mixing).zero(V["a"][0], 3)


def test_a_guarantee_names_that_chosen_positions_are_public():
    exact = fjs.gaussian(exact_sums=True)
    [sentence] = {*transformed(exact, TRANSFORMS["chosen"]).public} - {*exact.public}
    assert sentence.endswith("is given and taken as public.")
    assert transformed(exact, TRANSFORMS["coordinates"]).public == exact.public
