"""Operations on messages, on numbers that can be checked by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import classification

import fedjaxsim as fjs
from fedjaxsim.kernels.products import Product, Sealed
from fedjaxsim.privacy.messages import Messages, widened

# Two clients: (1, 2)ᵀ(3, 4) = ((3, 4), (6, 8)) with a bias of (0, 1), and zeros.
LEFT, RIGHT = jnp.array([[[1.0, 2.0]], [[5.0, 5.0]]]), jnp.array([[[3.0, 4.0]], [[0.0, 0.0]]])
MATRIX = np.array([[[3.0, 4], [6, 8]], [[0, 0], [0, 0]]])
BIAS = jnp.array([[0.0, 1.0], [0.0, 0.0]])
FORMS = {
    "factors": Messages({"w": Product(LEFT, RIGHT), "b": BIAS}),
    "arrays": Messages({"w": jnp.asarray(MATRIX), "b": BIAS}),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_may_be_done_is_the_same_in_either_form(form):
    messages, limit = FORMS[form], jnp.float32(np.sqrt(126) / 3)

    @jax.jit
    def results():
        bounded = messages.bound(limit, jnp.ones(2, bool))
        absent = messages.bound(jnp.float32(1.0), jnp.array([False, True]))
        before = {"w": jnp.ones((3, 2, 2)), "b": jnp.zeros((3, 2))}
        return (
            messages.dense()["w"],
            messages.total(),
            messages.nonzero(),
            messages.scale(jnp.array([0.5, 7.0])).total()["w"],
            (bounded.messages.total()["w"], bounded.clipped),
            messages.add_rows(before, jnp.array([2, 0])),
            (absent.messages.dense()["w"], absent.clipped),
        )

    dense, total, nonzero, scaled, (bounded, clipped), rows, absent = results()
    np.testing.assert_array_equal(dense, MATRIX)
    np.testing.assert_array_equal(total["w"], MATRIX[0])
    np.testing.assert_array_equal(total["b"], [0, 1])
    np.testing.assert_array_equal(nonzero, [True, False])
    np.testing.assert_array_equal(scaled, MATRIX[0] / 2)
    np.testing.assert_allclose(bounded, MATRIX[0] / 3, rtol=1e-4)
    np.testing.assert_array_equal(clipped, [True, False])
    np.testing.assert_array_equal(rows["w"], [np.ones((2, 2)), np.ones((2, 2)), MATRIX[0] + 1])
    np.testing.assert_array_equal(rows["b"], [[0, 0], [0, 0], [0, 1]])
    assert not any(np.any(each) for each in absent)


@jax.jit
def forms(both):
    """Of two products: which are finite, and all that is made of them."""
    bounded = Messages(both).bound(jnp.float32(np.inf), jnp.ones(2, bool))
    messages = bounded.messages
    rows = messages.add_rows(jnp.zeros((2, 2, 2)), jnp.arange(2))
    sums = messages.total(), messages.gram(), messages.gram_diagonal()
    return bounded.finite, messages.dense(), rows, *sums


@pytest.mark.parametrize("factor", ["left", "right"])
def test_a_product_that_is_not_finite_adds_nothing_in_any_form(factor):
    other = Product(LEFT[:1], RIGHT[:1])
    broken = {name: getattr(other, name).at[0, 0, 0].set(jnp.nan) for name in (factor,)}
    both = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), dataclasses.replace(other, **broken), other
    )

    finite, dense, rows, total, gram, diagonal = forms(both)
    w = MATRIX[0]
    np.testing.assert_array_equal(finite, [False, True])
    np.testing.assert_array_equal(dense, [0 * w, w])
    np.testing.assert_array_equal(rows, [0 * w, w])
    np.testing.assert_array_equal(total, w)
    np.testing.assert_array_equal(gram, w @ w.T)
    np.testing.assert_array_equal(diagonal, np.diag(w @ w.T))


def test_gram_matrices_are_of_one_vector_per_client():
    messages = Messages(jnp.array([[1.0, 2.0], [0.0, 3.0]]))
    np.testing.assert_array_equal(messages.gram(), [[1, 2], [2, 13]])
    np.testing.assert_array_equal(messages.gram_diagonal(), [1, 13])


REFUSED = {
    "division": lambda v: v / 2,
    "product with an array": lambda v: jnp.ones(2) * v,
    "NumPy function": np.sum,
    "index": lambda v: v[0],
    "comparison": lambda v: v > 0,
    "norm by hand": lambda v: sum(x**2 for x in v) ** 0.5,
}


@pytest.mark.parametrize("what", REFUSED)
def test_arithmetic_on_messages_or_on_a_sealed_update_is_refused(what):
    with pytest.raises(TypeError, match=r"a Messages object is no array: .* dense\(\)"):
        jax.tree.map(REFUSED[what], FORMS["factors"])
    update = {"w": Sealed(Product(LEFT[0], RIGHT[0])), "b": BIAS[0]}
    with pytest.raises(TypeError, match=r"a Sealed object is no array: .* dense\(\)"):
        jax.tree.map(REFUSED[what], update["w"])
    np.testing.assert_array_equal(update["w"].dense(), MATRIX[0])


def test_functions_of_jax_refuse_messages():
    for function in (jnp.sum, jnp.linalg.norm, jnp.asarray, jax.jit(lambda v: v)):
        with pytest.raises(TypeError, match="Messages"):
            jax.tree.map(function, FORMS["factors"])


def test_a_message_is_widened_factor_by_factor():
    sealed = Sealed(Product(LEFT[0].astype(jnp.bfloat16), RIGHT[0]))
    assert sealed.dtype == jnp.float32
    assert jax.tree.leaves(widened({"w": sealed}))[0].dtype == jnp.float32
    with pytest.raises(ValueError, match=r"got int32\[2, 2\] at \['w'\]"):
        widened({"w": Sealed(Product(LEFT[0].astype(jnp.int32), RIGHT[0]))})


def halving(of_numbers):
    """A mechanism of a user's own, which halves all messages before they are summed."""
    inner = fjs.gaussian()

    def add(accumulator, messages, mask, ids, state, hparams):
        given = messages.dense() if of_numbers else messages
        halves = jax.tree.map(lambda v: v / 2, given)
        return inner.add(accumulator, Messages(halves), mask, ids, state, hparams)

    return inner._replace(add=add)


@pytest.mark.thorough
def test_a_users_mechanism_sees_no_factors():
    # A linear model of 4 classes and one example a client, whose update is sent as factors: halving
    # both would quarter it.
    population, task = classification([3, 4, 5])

    def after_a_round(mechanism):
        sim = fjs.Simulation(
            fjs.fedavg(task),
            population,
            fjs.full_participation(),
            fjs.Minibatches(1, steps=1),
            mechanism,
        )
        hparams = sim.hyperparameters(learning_rate=0.1)
        start = sim.init(0, hparams)
        state, _ = sim.round(start, hparams)
        return jax.tree.map(jnp.subtract, state.shared.params, start.shared.params)

    with pytest.raises(TypeError, match="a Messages object is no array"):
        after_a_round(halving(of_numbers=False))
    whole, half = after_a_round(fjs.gaussian()), after_a_round(halving(of_numbers=True))
    assert np.any(np.asarray(whole["kernel"]) != 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-5), half, whole)
