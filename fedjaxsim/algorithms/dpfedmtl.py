"""DPFedMTL (Wu, Chen, Wang 2020): a shared trunk and a personal head per client (Algorithm 1)."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, Context, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.layers import Selection, either, merge, paths_of, split
from fedjaxsim.algorithms.local_steps import local_steps
from fedjaxsim.algorithms.shared_model import (
    SharedModel,
    from_one_model,
    publish,
    server_step,
)
from fedjaxsim.hyperparameters import Hyperparameters, reads
from fedjaxsim.kernels import threefry
from fedjaxsim.models.model import STATISTICS
from fedjaxsim.privacy.mechanisms import (
    CLIP_NORM,
    NOISE_MULTIPLIER,
    noise_like,
    noise_scale,
    round_value,
)
from fedjaxsim.privacy.messages import clip_by_global_norm, widened
from fedjaxsim.tasks.task import Task

PyTree = Any
Order = Literal["together", "head-first"]
_ORDERS = {"together": (("head", "trunk"),), "head-first": (("head",), ("trunk",))}
"""Sets of parts that move together, one set after the other."""


class Shared(NamedTuple):
    """The public server state.

    Attributes:
      trunk: w_{M+1}, the layers that all clients share.
      head: the head that all clients started with, independent of data; with the trunk it is a
        whole model, from which another algorithm may start.
    """

    trunk: SharedModel
    head: PyTree


@reads(optimizers.local_records, optimizers.server_records)
def dpfedmtl(
    task: Task,
    *,
    head: Selection = None,
    order: Order = "together",
    head_epochs: int | None = None,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """DPFedMTL: client i predicts with the shared trunk w_{M+1} and its own head w_i.

    Client i of the cohort copies the trunk and takes H local steps (lines "Local Update"), with
    order "together" of both parts at once,

        w_{M+1,i} ← w_{M+1,i} − η ∂ℓ_i/∂w_{M+1},    w_i ← w_i − η ∂ℓ_i/∂w_i

    which is FedPer (Arivazhagan et al. 2019); with "head-first", H steps of the head with the
    published trunk, then H steps of the trunk with the new head, on the same minibatches, which is
    FedRep (Collins et al. 2021). It keeps w_i and sends the update of its copy of the trunk. The
    mechanism clips and noises the update once, whatever H is, and the server adds the mean to the
    trunk (equation 6). Without noise it is the paper's FedMTL.

    The paper draws a cohort at every step and averages every H steps; here one cohort takes the H
    steps between two averages. A stage that starts from another system's state takes the trunk from
    the published model, and each client's head from its own model.

    Args:
      task: model and loss.
      head: Layers or parameters that stay with their client, as Dense_1; by default the output
        layer of the task's model. See `layers.Selection`. Running statistics always stay.
      order: Order of the local steps: of head and trunk "together", or all of the head's first.
      head_epochs: Epochs of the head's steps, FedRep's τ, with order "head-first"; by default as
        many steps as of the trunk.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
      server_optimizer: Optimizer of the server, applied to the trunk's released mean update.

    Raises:
      ValueError: if the order is unknown or lacks the epochs, if no head is given and the model
        names no output layer, or if the head or the trunk would be empty.
    """
    if head_epochs is not None and order != "head-first":
        raise ValueError(f"head_epochs need order 'head-first', got {order!r}")
    return _algorithm(
        task, head, order, local_optimizer, server_optimizer, noised=False, head_epochs=head_epochs
    )


@reads(optimizers.local_records, optimizers.server_records, CLIP_NORM, NOISE_MULTIPLIER)
def dpfedmtl_as_published(
    task: Task,
    *,
    head: Selection = None,
    order: Order = "together",
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """`dpfedmtl` with the paper's noise: in every local step of every client, and no ε.

    The gradient of the trunk is clipped at C = `hparams.clip` and gets noise (equation 3),

        clip(∂ℓ_i/∂w_{M+1}, C) + N(0, (σS)² I),    S = 2CK/M = 2Cp

    with σ = `hparams.noise_multiplier` and p = `context.sampling_rate`; the gradient of the head is
    plain. The local optimizer gets the sum. The mechanism is `plain_mean`, the average over the
    participants (equation 6).

    There is no ε: Lemma 4.1 takes 2CK/M for the sensitivity of the average, which is 2C/K; this
    divides by the sampling rate, and Lemma 4.3 amplifies by it once more. The noise depends on
    client, round and step and, unlike a mechanism's, is the same for all settings under one seed.

    Args:
      task: model and loss.
      head: Layers or parameters that stay with their client, as in `dpfedmtl`.
      order: Order of the local steps, as in `dpfedmtl`.
      local_optimizer: Optimizer of the clients, as in `dpfedmtl`.
      server_optimizer: Optimizer of the server, as in `dpfedmtl`.

    Raises:
      ValueError: see `dpfedmtl`.
    """
    return _algorithm(task, head, order, local_optimizer, server_optimizer, noised=True)


def _algorithm(
    task: Task,
    head: Selection,
    order: Order,
    local_optimizer: optimizers.LocalChoice,
    server_optimizer: optimizers.ServerChoice,
    *,
    noised: bool,
    head_epochs: int | None = None,
) -> Algorithm:
    checks.one_of(get_args(Order), order=order)
    selection = _require_two_parts(task, task.output_layer if head is None else head)
    make_local = optimizers.as_local(local_optimizer)
    server_optimizer = optimizers.as_server(server_optimizer)
    of_trunk = server_step(server_optimizer)

    def start(hparams, published, own):
        public_head, trunk = split(published, selection)
        own_head, _ = split(own, selection)
        return Shared(publish(trunk, server_optimizer, hparams), public_head), own_head

    def client(shared, personal, data, hparams, context):
        parts = {"head": personal, "trunk": shared.trunk.params}

        def optimizer(hparams, round_):
            plain = make_local(hparams, round_)
            return optax.chain(_noise(hparams, context), plain) if noised else plain

        for moving in _ORDERS[order]:

            def model(moved, parts=parts):
                both = parts | moved
                return merge(both["head"], both["trunk"])

            def loss(moved, batch, model=model):
                return task.loss(model(moved), batch)

            def track(before, moved, batch, model=model):
                assert task.track is not None
                head, _ = split(task.track(model(before), model(moved), batch), selection)
                return moved | {"head": head}

            begun = {name: parts[name] for name in moving}
            # Statistics belong to the head, and move when it does.
            tracks = task.track is not None and "head" in moving
            whole = task._replace(loss=loss, linear=None, track=track if tracks else None)
            epochs = head_epochs if moving == ("head",) else None
            moved = local_steps(
                begun, data, whole, optimizer, hparams, context.round, epochs=epochs
            )
            parts = parts | moved
        update = jax.tree.map(jnp.subtract, parts["trunk"], shared.trunk.params)
        return parts["head"], update, {}

    def server(shared, release, hparams, round_):
        return shared._replace(trunk=of_trunk(shared.trunk, release, hparams, round_))

    def predict(shared, personal, hparams, client_id):
        return merge(personal, shared.trunk.params)

    def published(shared):
        return merge(shared.head, shared.trunk.params)

    return Algorithm(
        from_one_model(task, start),
        client,
        server,
        predict,
        task,
        warm_start=WarmStart(start, published),
        curvature=optimizers.curvature(local_optimizer),
    )


def _require_two_parts(task: Task, head: Selection) -> Selection:
    """Return the head, or raise ValueError if it leaves no trunk."""
    params = jax.eval_shape(task.init, jax.random.key(0))
    paths = paths_of(params)
    if head is None:
        raise ValueError(
            "the task's model names no output layer, so head must name the parameters that stay "
            f"with their client, such as {paths[-1]!r}, of {paths}"
        )
    if task.track is not None:
        head = either(head, STATISTICS)
    _, trunk = split(params, head)
    if not jax.tree.leaves(trunk):
        raise ValueError(
            "head selects all parameters and leaves none for the shared trunk (use local(task) for "
            f"that): {paths}"
        )
    return head


def _noise(hparams: Hyperparameters, context: Context) -> optax.GradientTransformation:
    """Clip the trunk's gradient and add noise, one draw per step; the state counts steps."""
    sigma = round_value(jnp.asarray(hparams.noise_multiplier), context.round)
    clip_norm = jnp.asarray(hparams.clip)
    scale = noise_scale(sigma, clip_norm) * 2 * context.sampling_rate

    def init(params):
        return jnp.zeros((), jnp.int32)

    def update(updates, state, params=None):
        if "trunk" not in updates:
            return updates, state
        clipped = clip_by_global_norm(widened(updates["trunk"]), clip_norm).message
        noise = noise_like(threefry.fold_in(context.key, state), clipped, scale)
        noised = jax.tree.map(
            lambda g, c, n: (c + n).astype(g.dtype), updates["trunk"], clipped, noise
        )
        return updates | {"trunk": noised}, state + 1

    return optax.GradientTransformation(init, update)
