"""Local steps of a linear model from shared weights, without weights of a client's own.

E steps of plain SGD from w on batches X_e of b examples move a linear model by

    v_e − w = −η Σ_{i ≤ e} X_iᵀ R_i,

R_e (b, c) the derivatives of the loss with respect to the outputs. So the update is the product of
the stacked X and the stacked −ηR, r = E·b rows each, and the outputs that the next step needs are
X_e v = X_e w + (X_e Xᵀ)(−ηR): a client holds r·(d + c) numbers instead of d·c. X_e w is one matrix
product for all clients, as w is the same for all.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.data.minibatches import ClientData, Minibatches
from fedjaxsim.fast.products import Product, Sealed
from fedjaxsim.models.task import Linear

PyTree = Any


def pays(params: PyTree, minibatches: Minibatches) -> bool:
    """Whether a product needs fewer multiplications than the matrix it stands for.

    Its norm needs the r × r Gram matrix of the features, r²·d multiplications, and steps after the
    first need the same once more; the matrix itself would take r·d·c, and passes over its d·c
    numbers besides.

    Args:
      params: {"kernel": (d, c), …}.
      minibatches: of the local steps. Of epochs the number of batches is the client's own, so that
        r is not known, and products are not used.
    """
    if minibatches.steps is None:
        return False
    d, c = params["kernel"].shape
    rows, grams = minibatches.steps * minibatches.size, min(2, minibatches.steps)
    return rows <= d and rows * grams <= c


def linear_update(
    params: PyTree,
    data: ClientData,
    linear: Linear,
    learning_rate: jax.Array,
    mu: jax.Array | float = 0.0,
) -> tuple[PyTree, jax.Array]:
    """What this round's local steps of plain SGD change, v − w, and the loss.

    Args:
      params: w, where to start.
      data: the client's rows, of minibatches with a number of steps.
      linear: of the task.
      learning_rate: η.
      mu: μ of the penalty (μ/2)‖v − w‖², which shrinks v − w by 1 − ημ before every step.

    Returns:
      The update: {"kernel": a sealed product, "bias": (c,) where there is one}, and the mean loss
      as from `descend`.
    """
    kernel, bias = params["kernel"], params.get("bias")
    d, c = kernel.shape
    steps, size = data.minibatches.steps, data.minibatches.size
    assert steps is not None

    def outputs_at(x, left, right):
        outputs = x @ kernel
        if steps > 1:  # at the only step v is still w
            outputs += (x @ left.T) @ right
        return outputs if bias is None else outputs + (bias + jnp.sum(right, axis=0))

    def append(rows, new):  # in place of the oldest, which are zeros
        return jnp.concatenate([rows[size:], new.astype(rows.dtype)])

    def step(carry, batch):
        left, right, total = carry
        x = linear.features(batch)
        value, derivative = jax.value_and_grad(linear.loss)(outputs_at(x, left, right), batch)
        right = append((1 - learning_rate * mu) * right, -learning_rate * derivative)
        return append(left, x), right, total + value

    rows = steps * size
    empty = (jnp.zeros((rows, d), kernel.dtype), jnp.zeros((rows, c), kernel.dtype))
    left, right, total = data.fold(step, (*empty, jnp.zeros(())))
    update: PyTree = {"kernel": Sealed(Product(left, right))}
    if bias is not None:  # the kernel of a feature that is always 1
        update["bias"] = jnp.sum(right, axis=0)
    return update, total / jnp.maximum(data.num_steps(), 1)
