"""Local training, which several algorithms share: a client's minibatch steps with an optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjaxsim.data.minibatches import Batch, ClientData

PyTree = Any


def descend(
    params: PyTree,
    data: ClientData,
    optimizer: optax.GradientTransformation,
    loss: Callable[[PyTree, Batch], jax.Array],
    penalty_grad: Callable[[PyTree], PyTree] | None = None,
) -> tuple[PyTree, jax.Array]:
    """Takes this round's local steps on `loss` plus a penalty.

    Args:
      params: where to start; a pytree.
      data: the client's rows.
      optimizer: started afresh.
      loss: `(params, batch) -> ()`.
      penalty_grad: `(params) -> pytree`, the gradient of the penalty, added to that of the loss.

    Returns:
      The parameters after the last step, and the mean over the steps of the minibatch losses, each
      taken before its step, (); 0 where the client's data are used up.
    """

    def step(carry, batch):
        params, state, total = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        if penalty_grad is not None:
            grads = jax.tree.map(jnp.add, grads, penalty_grad(params))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, total + value

    start = (params, optimizer.init(params), jnp.zeros(()))
    params, _, total = data.fold(step, start)
    return params, total / jnp.maximum(data.num_steps(), 1)
