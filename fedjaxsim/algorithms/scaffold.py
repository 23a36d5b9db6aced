"""SCAFFOLD (Karimireddy et al.; ICML 2020): local steps corrected by control variates."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.shared_model import (
    SharedModel,
    from_one_model,
    moved,
    publish,
    server_step,
)
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task

PyTree = Any
Message = Literal["steps", "update"]


class Shared(NamedTuple):
    """The public server state: x with its optimizer's state, and d = −Kηc."""

    model: SharedModel
    drift: PyTree


@reads(optimizers.LEARNING_RATE, optimizers.server_records)
def scaffold(
    task: Task, *, message: Message = "update", server_optimizer: optimizers.ServerChoice = "sgd"
) -> Algorithm:
    """SCAFFOLD: client i corrects its drift by c − c_i; one model for all (Algorithm 1, option II).

    With control variates as updates, d = −Kηc and d_i = −Kηc_i, client i of the cohort takes K
    local steps from y = x (line 10), and then replaces d_i (line 12):

        y ← y − η ∇ℓ_i(y) + (d − d_i)/K,    d_i⁺ = d_i − d + (y − x)

    From the released mean R of the messages the server computes (lines 16 and 17; p is the share
    of clients in S)

        x ← x + R,    d ← d + p (R − d).

    The message is y − x, or by name the "steps" d_i⁺, which hold no earlier noise but by their
    gradients; without noise and at p = 1 both are the same. Clients predict with x.

    Args:
      message: Message of a client: the paper's "update", y − x, in which noise adds up, or "steps",
        its steps without their correction.
    """
    checks.one_of(get_args(Message), message=message)
    server_optimizer = optimizers.as_server(server_optimizer)
    of_model = server_step(server_optimizer, statistics=task.track is not None)

    def start(hparams, x, own):
        zero = jax.tree.map(jnp.zeros_like, x)
        return Shared(publish(x, server_optimizer, hparams), zero), zero

    def client(shared, personal, data, hparams, context):
        x, d, d_i = shared.model.params, shared.drift, personal
        steps, divisor = data.num_steps(), jnp.maximum(data.num_steps(), 1)
        correction = jax.tree.map(jnp.subtract, d, d_i)

        def step(y, batch):
            stepped = moved(y, -hparams.learning_rate, task.gradient(y, batch))
            return task.tracked(y, moved(stepped, 1 / divisor.astype(float), correction), batch)

        y = data.fold(step, x)
        update = jax.tree.map(jnp.subtract, y, x)
        # A client whose minibatches are consumed keeps d_i and sends 0.
        new = moved(d_i, jnp.where(steps > 0, 1.0, 0.0), jax.tree.map(jnp.subtract, update, d))
        if message == "steps":
            update = jax.tree.map(lambda leaf: jnp.where(steps > 0, leaf, 0), new)
        return new, update, {}

    def server(shared, release, hparams, round_):
        change = jax.tree.map(jnp.subtract, release, shared.drift)
        model = of_model(shared.model, release, hparams, round_)
        return Shared(model, moved(shared.drift, hparams.sampling_rate, change))

    return Algorithm(
        from_one_model(task, start),
        client,
        server,
        lambda shared, personal, hparams, client_id: shared.model.params,
        task,
        warm_start=WarmStart(start, lambda shared: shared.model.params),
        noise_adds_up='message="steps"' if message == "update" else None,
        curvature=optimizers.curvature(),
        averages_statistics=message == "update",
    )
