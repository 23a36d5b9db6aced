"""SCAFFOLD (Karimireddy et al.; ICML 2020): local steps corrected by control variates."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, NoiseAddsUp, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.shared_model import (
    SharedModel,
    from_one_model,
    moved,
    publish,
    server_step,
    sum_outgrows_mean,
)
from fedjaxsim.data.minibatches import ClientData
from fedjaxsim.hyperparameters import Hyperparameter, Hyperparameters, reads
from fedjaxsim.tasks.task import Task

PyTree = Any
Message = Literal["steps", "update"]
_ADDS_UP = NoiseAddsUp("SCAFFOLD", 'message="steps"', sum_outgrows_mean)


TYPICAL_BATCHES = Hyperparameter(
    "typical_batches",
    default=2.0,
    range=(1e-3, 1e6),
    allowed="lie in [0.001, 1e6]",
    scale="log",
    help="Minibatches in one epoch of a typical client, a public guess, which SCAFFOLD reads if "
    "clients take epochs: it sends control variates as that many steps an epoch.",
)


class Shared(NamedTuple):
    """The public server state: x with its optimizer's state, and d = −bηc."""

    model: SharedModel
    drift: PyTree


class Changes(NamedTuple):
    """Message of a client whose number of steps is its own: changes of its y and of its d_i."""

    update: PyTree
    drift: PyTree


@reads(optimizers.LEARNING_RATE, optimizers.server_records, TYPICAL_BATCHES)
def scaffold(
    task: Task, *, message: Message = "update", server_optimizer: optimizers.ServerChoice = "sgd"
) -> Algorithm:
    """SCAFFOLD: client i corrects its drift by c − c_i; one model for all (Algorithm 1, option II).

    With control variates as b local steps, d = −bηc and d_i = −bηc_i, client i of the cohort takes
    its K_i local steps from y = x (line 10), and then replaces d_i (line 12):

        y ← y − η ∇ℓ_i(y) + (d − d_i)/b,    d_i⁺ = d_i − d + (b/K_i) (y − x)

    From the released means of both changes the server computes (lines 16 and 17; p is the share of
    clients in S)

        x ← x + mean(y − x),    d ← d + p mean(d_i⁺ − d_i).

    b is public: the minibatches' steps if given; else their epochs times
    `hparams.typical_batches`. If all clients take b steps, mean(d_i⁺ − d_i) is mean(y − x) − d, so
    that y − x is the whole message. Otherwise the message is both changes, (y − x, d_i⁺ − d_i).
    One clip bounds both: at b = K_i they are about equally long, so that the same clip keeps
    about 1/√2 of each, and both get the noise of one.

    The message "steps" is d_i⁺ alone: the client's mean gradient as b local steps. It holds no
    earlier noise but by its gradients, and costs what FedAvg's costs. From its released mean R

        x ← x + R,    d ← d + p (R − d).

    If all clients take b steps, without noise and at p = 1, that is the paper's algorithm. For
    unequal K_i it has the same fixed points and another path: b above most K_i overshoots, and b
    far below them is slow. Clients predict with x. If clients have their own learning
    rates η_i, d is the mean of −bη_ic_i, so that x settles where Σ η_i ∇ℓ_i = 0.

    Noise adds up in the update: at p = 1, c − (mean of c_i) holds the sum of all noise. c_i follows
    from the unclipped message, so with clipping or noise c is no longer exactly the mean of c_i. A
    run says which message forgets noise once the sum is the larger one, after two rounds at p = 1.

    Args:
      message: Message of a client: the paper's "update", in which noise adds up, or "steps", its
        mean gradient as a number of steps.

    Example:
      >>> algorithm = fjs.scaffold(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'typical_batches']
    """
    checks.one_of(get_args(Message), message=message)
    server_optimizer = optimizers.as_server(server_optimizer)
    of_model = server_step(server_optimizer, statistics=task.track is not None)

    def start(key, hparams, x, own_model):
        zero = jax.tree.map(jnp.zeros_like, x)
        return Shared(publish(x, server_optimizer, hparams), zero), zero

    def client(shared, personal, data, hparams, context):
        x, d, d_i = shared.model.params, shared.drift, personal
        steps, b = data.num_steps(), _public_steps(data, hparams)
        correction = jax.tree.map(jnp.subtract, d, d_i)

        def step(y, batch):
            stepped = moved(y, -hparams.learning_rate, task.gradient(y, batch))
            return task.tracked(y, moved(stepped, 1 / b, correction), batch)

        y = data.fold(step, x)
        update = jax.tree.map(jnp.subtract, y, x)
        # A client whose minibatches are consumed keeps d_i and sends 0.
        active = jnp.where(steps > 0, 1.0, 0.0)
        taken = jnp.maximum(steps, 1).astype(jnp.result_type(b))
        change = moved(jax.tree.map(jnp.negative, d), b / taken, update)
        change = jax.tree.map(lambda leaf: (active * leaf).astype(leaf.dtype), change)
        d_after = jax.tree.map(jnp.add, d_i, change)
        if message == "steps":
            sent = jax.tree.map(lambda leaf: jnp.where(steps > 0, leaf, 0), d_after)
        else:
            sent = update if data.takes_equal_steps else Changes(update, change)
        return d_after, sent, {}

    def server(shared, release, hparams, round_):
        if isinstance(release, Changes):
            update, change = release
        else:
            update, change = release, jax.tree.map(jnp.subtract, release, shared.drift)
        model = of_model(shared.model, update, hparams, round_)
        return Shared(model, moved(shared.drift, hparams.sampling_rate, change))

    return Algorithm(
        from_one_model(task, start),
        client,
        server,
        lambda shared, personal, hparams, client_id: shared.model.params,
        task,
        warm_start=WarmStart(start, lambda shared: shared.model.params),
        noise_adds_up=_ADDS_UP if message == "update" else None,
        curvature=optimizers.curvature(),
        typical_message=optimizers.small_update if message == "update" else None,
        averages_statistics=message == "update",
    )


def _public_steps(data: ClientData, hparams: Hyperparameters) -> jax.Array:
    """Return b, the steps that control variates are sent as, ()."""
    steps, epochs = data.minibatches.steps, data.minibatches.epochs
    return jnp.asarray(steps, float) if epochs is None else epochs * hparams.typical_batches
