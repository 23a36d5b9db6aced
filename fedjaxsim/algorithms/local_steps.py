"""Local training: a client's minibatch steps with an optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from fedjaxsim.algorithms.optimizers import LocalChoice, as_local, evaluated, step_with
from fedjaxsim.data.minibatches import Batch, ClientData
from fedjaxsim.hyperparameters import Hyperparameter, Hyperparameters
from fedjaxsim.kernels.linear_steps import is_cheaper, linear_update
from fedjaxsim.tasks.task import Task

PyTree = Any
PULL = Hyperparameter(
    "lam",
    default=0.1,
    scale="log",
    help="λ, the weight of the pull of a client's model towards the shared one.",
    per_client=True,
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
    gradient: Callable[[PyTree, Batch], PyTree] | None = None,
    epochs: int | None = None,
) -> PyTree:
    """Take this round's local steps from w on a client's own rows; return the last v.

    The optimizer's state starts anew; a schedule-free optimizer returns its average. `pull` and
    `penalty`, `(params, batch) -> ()`, are added to the loss, `gradient`, `(params, batch) ->
    gradient`, is in place of the task's, and `epochs` in place of the minibatches' own.
    """
    optimizer = as_local(local_optimizer)(hparams, round_)
    gradient = task.gradient if gradient is None else gradient

    def step(carry, batch):
        params, state = carry
        grads = gradient(params, batch)
        if pull is not None:
            strength, centre = pull
            grads = jax.tree.map(lambda g, v, c: g + strength * (v - c), grads, params, centre)
        if penalty is not None:
            grads = jax.tree.map(jnp.add, grads, jax.grad(penalty)(params, batch))
        updates, state = step_with(optimizer, grads, state, params)
        moved = optax.apply_updates(params, updates)
        return task.tracked(params, moved, batch), state

    return evaluated(*data.fold(step, (params, optimizer.init(params)), epochs))


def local_update(
    params: PyTree,
    data: ClientData,
    task: Task,
    local_optimizer: LocalChoice,
    hparams: Hyperparameters,
    round_: jax.Array,
    pull: Pull | None = None,
) -> PyTree:
    """Run `local_steps` and return the update v − w.

    With SGD on a linear task and no pull but to w, the update is factored where that is cheaper
    (see `kernels.linear_steps`): the same up to rounding.
    """
    steps, size, linear = data.minibatches.steps, data.minibatches.size, task.linear
    plain = local_optimizer == "sgd" and (pull is None or pull.centre is params)
    plain = plain and task.examples is None  # the kernel reads rows
    if linear is None or steps is None or not plain or not is_cheaper(params, steps, size):
        v = local_steps(params, data, task, local_optimizer, hparams, round_, pull)
        return jax.tree.map(jnp.subtract, v, params)
    eta, mu = jnp.asarray(hparams.learning_rate), 0.0 if pull is None else pull.strength
    return linear_update(params, data.fold, steps, size, linear, eta, mu)


def mean_over_rows(function: Callable[[Batch], PyTree], data: ClientData) -> PyTree:
    """Compute the mean over all of a client's rows of a mean over a batch, `(batch) -> pytree`.

    Raises:
      ValueError: if minibatches are made afresh, so that clients have no rows.
    """
    if data.generates:
        raise ValueError(
            "this algorithm makes a pass over all rows of a client, but this population makes "
            "minibatches afresh and has none"
        )

    def add(total, batch):
        rows = jnp.sum(batch.weight)
        return jax.tree.map(lambda t, v: t + rows.astype(v.dtype) * v, total, function(batch))

    shapes = jax.eval_shape(function, data.batch_shapes())
    total = data.full_pass(add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
    rows = jnp.maximum(data.count, 1)
    return jax.tree.map(lambda leaf: leaf / rows.astype(leaf.dtype), total)
