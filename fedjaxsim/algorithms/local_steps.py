"""Local training: a client's minibatch steps with an optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from fedjaxsim.algorithms.optimizers import LocalChoice, as_local
from fedjaxsim.data.minibatches import Batch, ClientData
from fedjaxsim.hyperparameters import Hyperparameter, Hyperparameters
from fedjaxsim.kernels.linear_steps import is_cheaper, linear_update
from fedjaxsim.tasks.task import Task

PyTree = Any
PULL = Hyperparameter(
    "lam",
    default=0.1,
    scale="log",
    symbol="λ",
    help="λ, the weight of the pull of a client's model towards the shared one.",
)


class Pull(NamedTuple):
    """The penalty (strength/2)·‖v − centre‖² on top of the loss, centre like the params."""

    strength: ArrayLike
    centre: PyTree


def local_steps(
    params: PyTree,
    data: ClientData,
    task: Task,
    local_optimizer: LocalChoice,
    hparams: Hyperparameters,
    round_: jax.Array,
    pull: Pull | None = None,
    penalty: Callable[[PyTree, Batch], jax.Array] | None = None,
) -> tuple[PyTree, jax.Array]:
    """Take this round's local steps on a client's own rows.

    Args:
      params: w, the start.
      data: the client's rows.
      task: model and loss.
      local_optimizer: a name or an optimizer; its state starts anew.
      hparams: hyperparameters.
      round_: () int32.
      pull: a penalty added to the loss.
      penalty: another one, `(params, batch) -> ()`.

    Returns:
      v, the parameters after the last step, and the mean over steps of the minibatch losses, each
      before its step, (); 0 if the client's data are consumed.
    """
    optimizer = as_local(local_optimizer)(hparams, round_)

    def step(carry, batch):
        params, state, total = carry
        value, grads = jax.value_and_grad(task.loss)(params, batch)
        if pull is not None:
            strength, centre = pull
            grads = jax.tree.map(lambda g, v, c: g + strength * (v - c), grads, params, centre)
        if penalty is not None:
            grads = jax.tree.map(jnp.add, grads, jax.grad(penalty)(params, batch))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, total + value

    start = (params, optimizer.init(params), jnp.zeros(()))
    params, _, total = data.fold(step, start)
    return params, total / jnp.maximum(data.num_steps(), 1)


def local_update(
    params: PyTree,
    data: ClientData,
    task: Task,
    local_optimizer: LocalChoice,
    hparams: Hyperparameters,
    round_: jax.Array,
    pull: Pull | None = None,
) -> tuple[PyTree, jax.Array]:
    """Run `local_steps` and return the update v − w and the mean loss.

    With SGD on a linear task and no pull but to w, the update is factored where that is cheaper
    (see `kernels.linear_steps`): the same up to rounding.
    """
    steps, size, linear = data.minibatches.steps, data.minibatches.size, task.linear
    plain = local_optimizer == "sgd" and (pull is None or pull.centre is params)
    if linear is None or steps is None or not plain or not is_cheaper(params, steps, size):
        v, loss = local_steps(params, data, task, local_optimizer, hparams, round_, pull)
        return jax.tree.map(jnp.subtract, v, params), loss
    eta, mu = jnp.asarray(hparams.learning_rate), 0.0 if pull is None else pull.strength
    update, total = linear_update(params, data.fold, steps, size, linear, eta, mu)
    return update, total / jnp.maximum(data.num_steps(), 1)
