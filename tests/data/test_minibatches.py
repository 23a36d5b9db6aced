import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.data.minibatches import Batch, ClientData, Minibatches, RowReader
from fedjaxsim.tasks.streaming_metrics import area_under_roc

TOTAL = 64  # rows of all clients together


@functools.cache
def compiled(minibatches, epochs):
    """(start, count, seed) -> how often each row was seen, and the steps taken and announced."""

    @jax.jit
    def rows_seen(start, count, seed):
        key = jax.random.key(seed)
        rows = RowReader({"row": jnp.arange(TOTAL)}, start, count)
        data = ClientData(rows, count, key, minibatches)

        def step(carry, batch):
            seen, steps = carry
            return seen.at[batch.fields["row"]].add(batch.weight), steps + 1

        carry = (jnp.zeros(TOTAL), jnp.int32(0))
        if epochs == 0:
            return *data.full_pass(step, carry), data.num_steps()
        return *data.fold(step, carry, epochs=epochs), data.num_steps()

    return rows_seen


def rows_seen(where, minibatches, seed, epochs=None):
    """Rows of a fold, perhaps with epochs of its own, or of an exact pass with 0 of them."""
    start, count = where
    return [np.asarray(v) for v in compiled(minibatches, epochs)(start, count, seed)]


def own(where):
    start, count = where
    return (np.arange(TOTAL) >= start) & (np.arange(TOTAL) < start + count)


ranges = st.integers(0, TOTAL - 1).flatmap(
    lambda start: st.tuples(st.just(start), st.integers(1, TOTAL - start))
)
# Each size and each number at least once, in few programs.
sizes = st.sampled_from([(1, 3), (5, 1), (5, 3), (100, 1)])
seeds = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize(("bound", "places"), [(1, 1), (2, 2), (8, 8), (16, 16), (64, 16)])
def test_a_full_pass_has_no_more_places_than_the_public_bound(bound, places):
    rows = RowReader({"row": jnp.arange(TOTAL)}, jnp.int32(0), jnp.int32(1))
    data = ClientData(
        rows, rows.length, jax.random.key(0), Minibatches(1, steps=1), most_rows=bound
    )
    sizes = []
    jax.make_jaxpr(lambda: data.full_pass(lambda _, batch: sizes.append(len(batch.weight)), None))()
    assert set(sizes) == {places}


@settings(deadline=None, max_examples=30)
@given(ranges, sizes, seeds)
def test_epochs_see_every_own_row_once_each_and_no_other(where, sizes, seed):
    size, epochs = sizes
    seen, steps, announced = rows_seen(where, Minibatches(size, epochs=epochs), seed)
    np.testing.assert_array_equal(seen, epochs * own(where))
    assert steps == announced == epochs * -(-where[1] // size)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_fold_may_have_epochs_of_its_own(epochs):
    seen, steps, announced = rows_seen((3, 7), Minibatches(5, epochs=2), 0, epochs)
    np.testing.assert_array_equal(seen, epochs * own((3, 7)))
    assert (steps, announced) == (2 * epochs, 4)
    with pytest.raises(ValueError, match="epochs=2 of a fold need Minibatches"):
        rows_seen((3, 7), Minibatches(5, steps=2), 0, epochs=2)


@settings(deadline=None, max_examples=30)
@given(ranges, sizes, seeds)
def test_steps_with_replacement_see_own_rows_only(where, sizes, seed):
    size, number = sizes
    seen, steps, announced = rows_seen(where, Minibatches(size, steps=number), seed)
    assert seen[~own(where)].sum() == 0
    assert seen.sum() == size * number
    assert steps == announced == number


@settings(deadline=None)
@given(ranges)
def test_a_full_pass_sees_every_own_row_once(where):
    seen, steps, _ = rows_seen(where, Minibatches(1, steps=1), 0, epochs=0)
    np.testing.assert_array_equal(seen, own(where))
    assert steps == -(-where[1] // 16)


def test_draws_with_replacement_are_uniform():
    seen, _, _ = rows_seen((3, 7), Minibatches(1000, steps=40), seed=1)
    assert scipy.stats.chisquare(seen[3:10]).pvalue > 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0, "steps": 1}, "batch size"),
        ({"size": 1, "steps": 0}, "steps"),
        ({"size": 1, "epochs": 0}, "epochs"),
        ({"size": 1}, "steps or epochs"),
        ({"size": 1, "steps": 1, "epochs": 1}, "steps or epochs"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Minibatches(**arguments)


def test_passes_consume_every_own_row_once_a_pass_and_then_nothing():
    # 7 rows in batches of 3 are 3 batches a pass; 2 passes are 6 batches, taken 2 a round.
    minibatches = Minibatches(3, steps=2, passes=2)

    @jax.jit
    def a_round(taken, key):
        count, order = jnp.int32(7), jax.random.key(11)
        rows = RowReader({"row": jnp.arange(20)}, jnp.int32(5), count)
        data = ClientData(rows, count, key, minibatches, taken, order)

        def step(seen, batch):
            return seen.at[batch.fields["row"]].add(batch.weight)

        return data.fold(step, jnp.zeros(20)), data.num_steps()

    taken, seen, history = 0, np.zeros(20), []
    for t in range(5):
        of_round, steps = a_round(taken, jax.random.key(t))
        taken, seen = taken + int(steps), seen + np.asarray(of_round)
        history.append((int(steps), int(seen.sum()), int(seen.max())))
    own = (np.arange(20) >= 5) & (np.arange(20) < 12)
    np.testing.assert_array_equal(seen, np.where(own, 2, 0))
    # 3 batches (7 rows) finish the first pass: in the middle of the second round.
    assert history == [(2, 6, 1), (2, 10, 2), (2, 14, 2), (0, 14, 2), (0, 14, 2)]


def test_passes_need_steps():
    with pytest.raises(ValueError, match="passes"):
        Minibatches(3, epochs=1, passes=2)


def one_of_two_clients():
    rows = RowReader({"x": jnp.arange(6.0)}, jnp.int32(2), jnp.int32(4))
    return ClientData(rows, jnp.int32(4), jax.random.key(0), Minibatches(2, steps=1))


def test_a_view_offers_no_rows_but_its_own():
    data: Any = one_of_two_clients()
    with pytest.raises(AttributeError, match=r"'fields'.*data\.fold"):
        data.fields["x"].mean()
    with pytest.raises(AttributeError, match="'start'"):
        data.start  # noqa: B018
    offered = {name for name in dir(data) if not name.startswith("_")}
    ways = {"fold", "full_pass", "num_steps", "tickets"}
    assert offered == ways | {
        "batch_shapes", "count", "generates", "minibatches", "most_rows",
        "takes_equal_steps",
    }  # fmt: skip
    assert jax.tree.leaves(data) == [data]  # no leaf of a pytree is everybody's rows
    assert "2." not in repr(data)


def test_the_shapes_of_a_batch_are_those_of_its_batches():
    data = one_of_two_clients()
    batch = jax.eval_shape(
        lambda: data.fold(lambda _, batch: batch._replace(keys=None), zeros_like_batch(data))
    )
    expected = data.batch_shapes(2)
    chex.assert_trees_all_equal_shapes_and_dtypes(batch, expected)


def zeros_like_batch(data):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), data.batch_shapes(2))


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (3, 3), (1, 3), (2,)])
def test_values_that_are_not_one_per_example_are_refused(shape):
    batch = Batch({}, jnp.array([1.0, 1.0, 0.0]))
    for function in (batch.mean, batch.sum):
        with pytest.raises(ValueError, match=r"one number per example, of shape \(3,\)"):
            function(jnp.ones(shape))
    assert batch.mean(jnp.array([1.0, 3.0, 100.0])) == 2
    assert batch.sum(jnp.array([1.0, 3.0, 100.0])) == 4


def test_scores_in_a_column_are_refused():
    batch = Batch({}, jnp.ones(3))
    auc = area_under_roc(lambda params, batch: jnp.ones((3, 1)), lambda batch: jnp.ones(3) > 0)
    with pytest.raises(ValueError, match=r"scores must be one number per example.*\(3, 1\)"):
        auc.add(auc.start(16), None, batch)
