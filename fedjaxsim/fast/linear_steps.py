"""Local steps of a linear model from shared weights, without weights of a client's own.

E steps of plain SGD from w on batches X_e of b examples move a linear model by

    v_e − w = −η Σ_{i ≤ e} X_iᵀ R_i,

R_e (b, c) the derivatives of the loss with respect to the outputs. So the update is the product of
the stacked X and the stacked −ηR, r = E·b rows each, and the outputs that the next step needs are
X_e v = X_e w + (X_e Xᵀ)(−ηR): a client holds r·(d + c) numbers instead of d·c. X_e w is one matrix
product for all clients, as w is the same for all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjaxsim.fast.products import Product, Sealed

PyTree = Any


class Linear(NamedTuple):
    """What makes a task linear: outputs = features @ kernel, plus the bias where there is one.

    Its params are {"kernel": (d, c)}, with or without {"bias": (c,)}.

    Attributes:
      features: `(batch) -> (b, d)`.
      loss: `(outputs (b, c), batch) -> ()`; `Task.loss` is this loss of these outputs.
    """

    features: Callable[[Any], jax.Array]
    loss: Callable[[jax.Array, Any], jax.Array]


def pays(params: PyTree, steps: int, size: int) -> bool:
    """Whether a product needs fewer multiplications than the matrix it stands for.

    Its norm needs the r × r Gram matrix of the features, r²·d multiplications, and steps after the
    first need the same once more; the matrix itself would take r·d·c, and passes over its d·c
    numbers besides.

    Args:
      params: {"kernel": (d, c), …}.
      steps: E. Of epochs the number of batches is the client's own, so that r is not known, and
        products are not used.
      size: b.
    """
    d, c = params["kernel"].shape
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
) -> tuple[PyTree, jax.Array]:
    """What local steps of plain SGD change, v − w, and the sum of the minibatch losses.

    Args:
      params: w, where to start.
      fold: `(step, carry) -> carry`, over minibatches of a client's rows.
      steps: E, the most minibatches there are.
      size: b, of a minibatch.
      linear: of the task.
      learning_rate: η.
      mu: μ of the penalty (μ/2)‖v − w‖², which shrinks v − w by 1 − ημ before every step.

    Returns:
      The update: {"kernel": a sealed product, "bias": (c,) where there is one}, and the losses.
    """
    kernel, bias = params["kernel"], params.get("bias")
    d, c = kernel.shape

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
    left, right, total = fold(step, (*empty, jnp.zeros(())))
    update: PyTree = {"kernel": Sealed(Product(left, right))}
    if bias is not None:  # the kernel of a feature that is always 1
        update["bias"] = jnp.sum(right, axis=0)
    return update, total


def turned_gradient(
    params: PyTree, linear: Linear, batch: Any, times: ArrayLike = 1.0
) -> tuple[jax.Array, PyTree]:
    """`jax.value_and_grad` of a multiple of a task's loss, with XᵀR multiplied as (RᵀX)ᵀ.

    Where c is small, a CPU multiplies matrices with rows of d numbers in a third of the time of
    those with rows of c. The barrier keeps the compiler from turning the product round again.

    Args:
      params: {"kernel": (d, c), …}.
      linear: of the task.
      batch: of b examples.
      times: (), the multiple.

    Returns:
      The value and its gradient, like the params.
    """
    kernel, bias = params["kernel"], params.get("bias")
    x = linear.features(batch)
    outputs = x @ kernel if bias is None else x @ kernel + bias
    value, derivative = jax.value_and_grad(lambda o: times * linear.loss(o, batch))(outputs)
    turned = jax.lax.optimization_barrier(derivative.T @ x)
    gradient: PyTree = {"kernel": turned.T.astype(kernel.dtype)}
    if bias is not None:
        gradient["bias"] = jnp.sum(derivative, axis=0, dtype=bias.dtype)
    return value, gradient


def turns(params: PyTree) -> bool:
    """Whether the gradient of a linear task is multiplied as (RᵀX)ᵀ."""
    d, c = params["kernel"].shape
    return jax.default_backend() == "cpu" and 1 < c < d
