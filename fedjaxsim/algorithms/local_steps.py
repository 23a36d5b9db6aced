"""Local training: a client's minibatch steps with an optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from fedjaxsim import checks
from fedjaxsim.algorithms.optimizers import LocalChoice, as_local, evaluated, step_with
from fedjaxsim.data.minibatches import Batch, ClientData
from fedjaxsim.hyperparameters import Declarations, Default, Hyperparameter, Hyperparameters
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


LAM_BY_ROWS = dataclasses.replace(
    PULL,
    default=Default.RATIO,
    per_client=False,
    help="λ of slopes, which a client divides by its training rows; best is σ²/τ², the variance of "
    "errors divided by the variance of slopes between clients.",
)
LAM_INTERCEPT = dataclasses.replace(
    LAM_BY_ROWS,
    name="lam_intercept",
    help="The same for intercepts: σ²/τ₀² with their variance, (1 − ICC)/ICC.",
)
PullBy = Literal["equal", "rows"]


def pull_records(pull: PullBy = "equal", **_: object) -> Declarations:
    """Return the hyperparameters of a client's pull, for `reads`."""
    return (PULL,) if pull == "equal" else (LAM_BY_ROWS, LAM_INTERCEPT)


class Pull(NamedTuple):
    """The penalty (strength/2)·‖v − centre‖² on top of the loss, centre like the params.

    A `proximal` pull has a strength for each leaf and follows each step of plain SGD exactly, so
    the strength does not bound the step.

    Example:
      >>> fjs.Pull(0.5, {"w": np.zeros(2)}).strength
      0.5
    """

    strength: Any
    centre: PyTree
    proximal: bool = False


def pull_of(by: PullBy, hparams: Hyperparameters, centre: PyTree, data: ClientData) -> Pull:
    """Return a client's pull to `centre`; if `by` rows, as a mixed model shrinks its n rows."""
    if by == "equal":
        return Pull(hparams.lam, centre)
    rows = jnp.maximum(data.count, 1)

    def strength(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        lam = hparams.lam_intercept if name == "bias" else hparams.lam
        return (lam / rows).astype(leaf.dtype)

    return Pull(jax.tree_util.tree_map_with_path(strength, centre), centre, proximal=True)


def pull_to_shared(by: PullBy) -> Callable[..., Pull]:
    """Return `Algorithm.personal_pull` of personal models pulled to a `SharedModel`."""

    def pull(shared, personal, data, hparams, client_id):
        return pull_of(by, hparams, shared.params, data)

    return pull


def no_pull(shared: PyTree, personal: PyTree, *_: Any) -> Pull:
    """Return the pull of clients whose personal state descends their loss alone."""
    return Pull(0.0, personal)


def check_pull(by: PullBy, *optimizers: LocalChoice | None) -> None:
    """Check the choice of a pull; pulls by rows know the step of plain SGD alone."""
    checks.one_of(get_args(PullBy), pull=by)
    if by == "rows" and any(optimizer not in ("sgd", None) for optimizer in optimizers):
        raise ValueError("pull 'rows' needs local optimizer 'sgd' with a constant learning rate")


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

    Example:
      >>> def client(shared, personal, data, hparams, context):  # `task` as in `Simulation`
      ...     after = fjs.local_steps(shared, data, task, "sgd", hparams, context.round)
      ...     return personal, jax.tree.map(jnp.subtract, after, shared), {}
    """
    optimizer = as_local(local_optimizer)(hparams, round_)
    gradient = task.gradient if gradient is None else gradient

    def step(carry, batch):
        params, state = carry
        grads = gradient(params, batch)
        if pull is not None and not pull.proximal:
            strength, centre, _ = pull
            grads = jax.tree.map(lambda g, v, c: g + strength * (v - c), grads, params, centre)
        if penalty is not None:
            grads = jax.tree.map(jnp.add, grads, jax.grad(penalty)(params, batch))
        updates, state = step_with(optimizer, grads, state, params)
        moved = optax.apply_updates(params, updates)
        if pull is not None and pull.proximal:
            eta = hparams.learning_rate
            moved = jax.tree.map(
                lambda v, s, c: (v + eta * s * c) / (1 + eta * s), moved, pull.strength, pull.centre
            )
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

    Example:
      >>> def client(shared, personal, data, hparams, context):
      ...     mean = fjs.mean_over_rows(lambda batch: batch.mean(batch.fields["x"]), data)
      ...     return personal, mean, {}
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
