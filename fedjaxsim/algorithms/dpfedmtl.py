"""DPFedMTL (Wu, Chen, Wang 2020): a shared trunk and a personal head per client (Algorithm 1).

FedPer, FedRep and FedBN are it with other personal layers and orders of local steps; the parameters
of all three are PFLlib's step by step.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjaxsim.algorithm import Algorithm, Context, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.layers import Selection, either, merge, paths_of, split
from fedjaxsim.algorithms.local_steps import local_steps, no_pull
from fedjaxsim.algorithms.shared_model import (
    SharedModel,
    from_one_model,
    publish,
    server_step,
)
from fedjaxsim.checks import Name, SettingError
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
Head = Annotated[
    Selection,
    "Layers or parameters that stay with their client, as Dense_1; by default the output layer of "
    "the task's model. Running statistics always stay.",
]


class Shared(NamedTuple):
    """The public server state: the trunk w_{M+1}, and the head that all clients started with.

    That is independent of data; both are a whole model, from which another algorithm may start.
    """

    trunk: SharedModel
    head: PyTree


@reads(optimizers.local_records, optimizers.server_records)
def dpfedmtl(
    task: Task,
    *,
    head: Head = None,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """DPFedMTL: client i predicts with the shared trunk w_{M+1} and its own head w_i.

    Client i of the cohort copies the trunk and takes H local steps of both (lines "Local Update"),

        w_{M+1,i} ← w_{M+1,i} − η ∂ℓ_i/∂w_{M+1},    w_i ← w_i − η ∂ℓ_i/∂w_i

    It keeps w_i and sends the update of its copy of the trunk, which the mechanism clips and noises
    once, whatever H is; the server adds the mean to the trunk (equation 6). The head is in no
    message and costs nothing.

    The paper draws a cohort at every step and averages every H, without saying what a client does
    that is drawn in between. Here one cohort takes the H steps between two averages, so T steps
    are T/H rounds. Stages: this algorithm publishes the trunk with the initial head, which no data
    have reached. From others it takes the trunk of the published model and each client's head; a
    client's own trunk is dropped, since it would reach the server without a mechanism.

    Theorem 5.3 does not hold as stated; a stronger statement does, which `test_dpfedmtl_theory.py`
    tests. With one client a round, α_i = 1/M and H = 1:

    * Assumption 5.1 is about f, whose curvature along a head is 1/M of f_i's curvature, but
      Algorithm 1 steps along the gradient of f_i. With η = 1/(λL) and that L it can diverge: for
      f_i = 2|w_i − b_i|² + ½|u − u*|² and M = 5, every step triples the head's error. L must be the
      smoothness ℓ of every f_i.
    * With Assumption 5.5, read as mean ‖∂_u f_i‖² ≤ λ‖∂_u f‖² (so λ ≥ 1), and η = 1/(λℓ):
      E f(w^T) − f* − β ≤ (1 − c/(λℓ))^T (f(w⁰) − f* − β) with β = d(Sσ)²/(2λc) and c the convexity
      of f. The rate has no M (c is at most ℓ/M), and β needs no bound B on gradients, which no
      strongly convex f has on the whole space. The paper's rate and larger β follow for ℓ ≥ 1/4.
    * Assumption 5.5 holds if all clients want one trunk. Otherwise its left side is infinite at the
      optimum, and with a fixed step the loss stays above f* without any noise.

    Raises:
      ValueError: if no head is given and the model names no output layer, or if the head or the
        trunk would be empty.

    Example:
      >>> algorithm = fjs.dpfedmtl(task, head="bias")  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate']
    """
    return _algorithm(task, head, local_optimizer, server_optimizer)


@reads(optimizers.local_records, optimizers.server_records, CLIP_NORM, NOISE_MULTIPLIER)
def dpfedmtl_as_published(
    task: Task,
    *,
    head: Head = None,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """`dpfedmtl` with the paper's noise: in every local step of every client, and no ε.

    The gradient of the trunk is clipped at C = `hparams.clip` and gets noise (equation 3),

        clip(∂ℓ_i/∂w_{M+1}, C) + N(0, (σS)² I),    S = 2CK/M = 2Cp

    with σ = `hparams.noise_multiplier` and p = `context.sampling_rate`; the gradient of the head is
    plain. The mechanism is `plain_mean`, the average over the participants (equation 6).

    There is no ε. Lemma 4.1 takes 2CK/M for the sensitivity of the average over K clients, which is
    2C/K: it divides by the sampling rate p, and Lemma 4.3 then amplifies by p once more. The
    remaining noise on the sum is z = 2σK^1.5/M. The σ of §6.1, √(2 ln(1.25/δ))/ε, is for a single
    step and ε < 1.

    Example:
      >>> algorithm = fjs.dpfedmtl_as_published(task, head="bias")  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'clip', 'noise_multiplier']
    """
    return _algorithm(task, head, local_optimizer, server_optimizer, noised=True)


@reads(optimizers.local_records, optimizers.server_records)
def fedper(
    task: Task, *, head: Head = None, local_optimizer: optimizers.LocalChoice = "sgd"
) -> Algorithm:
    """FedPer (Arivazhagan et al. 2019): `dpfedmtl`, whose head and trunk step together.

    Example:
      >>> algorithm = fjs.fedper(task, head="bias")  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate']
    """
    return dpfedmtl(task, head=head, local_optimizer=local_optimizer)


@reads(optimizers.local_records, optimizers.server_records)
def fedrep(
    task: Task,
    *,
    head: Head = None,
    head_epochs: int | None = None,
    local_optimizer: optimizers.LocalChoice = "sgd",
) -> Algorithm:
    """FedRep (Collins et al. 2021): `dpfedmtl` whose head steps first, then the trunk.

    The head takes its steps with the published trunk, then the trunk with the new head, on the same
    minibatches.

    Args:
      head_epochs: τ, epochs of the head's steps; by default as many steps as the trunk's.

    Example:
      >>> algorithm = fjs.fedrep(task, head="bias")  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate']
    """
    return _algorithm(task, head, local_optimizer, "sgd", head_first=True, head_epochs=head_epochs)


@reads(optimizers.local_records, optimizers.server_records)
def fedbn(
    task: Task, *, head: Head = None, local_optimizer: optimizers.LocalChoice = "sgd"
) -> Algorithm:
    """FedBN (Li et al. 2021): `dpfedmtl` whose normalization layers are personal.

    All parameters step together. Clients keep scales and offsets, and the running statistics of
    BatchNorm, which local steps update (see `models.from_flax`).

    Args:
      head: Layers or parameters that stay with their client; by default all whose path contains
        "norm", and layers with running statistics.

    Raises:
      ValueError: if no head is given and the model has no normalization layers.

    Example:
      >>> algorithm = fjs.fedbn(fjs.tasks.squared(fjs.models.mlp((3,), 1, (4,), layer_norm=True)))
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate']
    """
    paths = paths_of(jax.eval_shape(task.init, jax.random.key(0)))
    layer = {path: path.removeprefix(f"{STATISTICS}/").rpartition("/")[0] for path in paths}
    of_statistics = [path for path in paths if path.startswith(f"{STATISTICS}/")]
    tracked = [f"{layer[path]}/" for path in of_statistics if task.track is not None]
    normal = [
        path
        for path in paths
        if "norm" in path.lower()
        or any(tracked_layer.startswith(f"{layer[path]}/") for tracked_layer in tracked)
    ]
    if head is None and not normal:
        raise SettingError(
            "fedbn needs a model with normalization layers, such as mlp with ",
            Name("layer_norm"),
            f", or head; the parameters are {', '.join(paths)}",
        )
    return dpfedmtl(task, head=normal if head is None else head, local_optimizer=local_optimizer)


def _algorithm(
    task: Task,
    head: Selection,
    local_optimizer: optimizers.LocalChoice,
    server_optimizer: optimizers.ServerChoice,
    *,
    noised: bool = False,
    head_first: bool = False,
    head_epochs: int | None = None,
) -> Algorithm:
    selection = _require_two_parts(task, task.output_layer if head is None else head)
    make_local = optimizers.as_local(local_optimizer)
    server_optimizer = optimizers.as_server(server_optimizer)
    of_trunk = server_step(server_optimizer)

    def start(key, hparams, published, own_model):
        public_head, trunk = split(published, selection)
        own_head, _ = split(own_model, selection)
        return Shared(publish(trunk, server_optimizer, hparams), public_head), own_head

    def client(shared, personal, data, hparams, context):
        def optimizer(hparams, round_):
            plain = make_local(hparams, round_)
            return optax.chain(_noise(hparams, context), plain) if noised else plain

        def train(parts, *moving, epochs=None):
            """Take the local steps of the parts that move."""

            def model(moved):
                both = parts | moved
                return merge(both["head"], both["trunk"])

            def loss(moved, batch):
                return task.loss(model(moved), batch)

            def track(before, moved, batch):
                assert task.track is not None
                head, _ = split(task.track(model(before), model(moved), batch), selection)
                return moved | {"head": head}

            # Statistics belong to the head, and move when it does.
            tracks = task.track is not None and "head" in moving
            full_task = task._replace(loss=loss, linear=None, track=track if tracks else None)
            start = {name: parts[name] for name in moving}
            return parts | local_steps(
                start, data, full_task, optimizer, hparams, context.round, epochs=epochs
            )

        parts = {"head": personal, "trunk": shared.trunk.params}
        if head_first:
            parts = train(parts, "head", epochs=head_epochs)
            parts = train(parts, "trunk")
        else:
            parts = train(parts, "head", "trunk")
        update = jax.tree.map(jnp.subtract, parts["trunk"], shared.trunk.params)
        return parts["head"], update, {}

    def server(shared, release, hparams, round_):
        return shared._replace(trunk=of_trunk(shared.trunk, release, hparams, round_))

    def trunk_of(shared):
        return optimizers.evaluated(*shared.trunk)

    def predict(shared, personal, hparams, client_id):
        return merge(personal, trunk_of(shared))

    def published(shared):
        return merge(shared.head, trunk_of(shared))

    return Algorithm(
        from_one_model(task, start),
        client,
        server,
        predict,
        task,
        warm_start=WarmStart(start, published),
        curvature=optimizers.curvature(local_optimizer),
        typical_message=optimizers.small_update,
        personal_pull=None if noised else no_pull,
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
        clipped = clip_by_global_norm(widened(updates["trunk"]), clip_norm).messages
        noise = noise_like(threefry.fold_in(context.key, state), clipped, scale)
        noised = jax.tree.map(
            lambda g, c, n: (c + n).astype(g.dtype), updates["trunk"], clipped, noise
        )
        return updates | {"trunk": noised}, state + 1

    return optax.GradientTransformation(init, update)
