"""Local steps of a linear model from shared weights, in factored form.

E steps of plain SGD from w on batches X_e of b examples move a linear model by

    v_e − w = −η Σ_{i ≤ e} R_iᵀ X_i,

with R_e (b, c) the derivatives of the loss in the outputs: a product of the stacked −ηR and the
stacked X, r = E·b rows each. The outputs of the next step are X_e vᵀ = X_e wᵀ + (X_e Xᵀ)(−ηR): a
client holds r·(c + d) numbers instead of c·d, and X_e wᵀ is one matrix product for all clients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjaxsim.kernels.products import Product, Sealed
from fedjaxsim.kernels.traces import note

PyTree = Any


class Linear(NamedTuple):
    """The linear form of a task: outputs = features @ kernel.T, plus the bias if there is one.

    Its params are {"kernel": (c, d)}, with or without {"bias": (c,)}. `features` are
    `(batch) -> (b, d)`; `Task.loss` is the `loss`, `(outputs (b, c), batch) -> ()`, of the outputs.
    """

    features: Callable[[Any], jax.Array]
    loss: Callable[[jax.Array, Any], jax.Array]


def is_cheaper(params: PyTree, steps: int, size: int) -> bool:
    """Return whether the factored update is cheaper than the dense one.

    The norm of the product takes r²·d multiplications, for the Gram matrix of the features, and
    steps after the first take r²·d once more; the dense matrix takes r·c·d, and passes over its
    c·d numbers.
    """
    c, d = params["kernel"].shape
    rows, grams = steps * size, min(2, steps)
    return rows <= d and rows * grams <= c


def linear_update(
    params: PyTree,
    fold: Callable[..., Any],
    steps: int,
    size: int,
    linear: Linear,
    learning_rate: jax.Array,
    mu: ArrayLike = 0.0,
) -> PyTree:
    """Run E local steps of plain SGD from w, on minibatches of b; return the update v − w.

    `fold` is `(step, carry) -> carry`, over minibatches of a client's rows. The penalty
    (μ/2)‖v − w‖² shrinks v − w by 1 − ημ before every step. The update of the kernel is a sealed
    product.
    """
    kernel, bias = params["kernel"], params.get("bias")
    c, d = kernel.shape

    def outputs_at(x, left, right):
        outputs = x @ kernel.T
        if steps > 1:  # in a single step v is still w
            outputs += (x @ right.T) @ left
        return outputs if bias is None else outputs + (bias + jnp.sum(left, axis=0))

    def append(rows, newest):  # in place of the oldest, which are zeros
        return jnp.concatenate([rows[size:], newest.astype(rows.dtype)])

    def step(carry, batch):
        left, right = carry
        x = linear.features(batch)
        value, derivative = jax.value_and_grad(linear.loss)(outputs_at(x, left, right), batch)
        note(value)
        left = append((1 - learning_rate * mu) * left, -learning_rate * derivative)
        return left, append(right, x)

    rows = steps * size
    empty = (jnp.zeros((rows, c), kernel.dtype), jnp.zeros((rows, d), kernel.dtype))
    left, right = fold(step, empty)
    update: PyTree = {"kernel": Sealed(Product(left, right))}
    if bias is not None:  # the kernel of a feature that is always 1
        update["bias"] = jnp.sum(left, axis=0)
    return update
