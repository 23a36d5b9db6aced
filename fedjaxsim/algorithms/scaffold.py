"""SCAFFOLD (Karimireddy et al.; ICML 2020): local steps corrected by control variates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


class Shared(NamedTuple):
    """The public server state.

    Attributes:
      model: the global model x and the server optimizer's state.
      control: the server's control variate c.
    """

    model: SharedModel
    control: PyTree


@reads(optimizers.LEARNING_RATE, optimizers.SERVER_LEARNING_RATE)
def scaffold(task: Task, *, server_optimizer: optimizers.ServerChoice = "sgd") -> Algorithm:
    """SCAFFOLD: client i corrects its drift by c − c_i; one model for all (Algorithm 1).

    Client i of the cohort takes K local steps from y = x (line 10), and then replaces its control
    variate c_i by the mean of the K gradients (line 12, option II):

        y ← y − η (∇ℓ_i(y) − c_i + c),    c_i⁺ = c_i − c + (x − y)/(Kη) = mean of ∇ℓ_i(y)

    It sends (y − x, c_i⁺ − c_i) in one message with one clip, as both depend on its data. The
    server adds the released mean of the first to x, and p times that of the second to c (lines 16
    and 17; p stands for |S|/N). Clients predict with x; c and all c_i start at 0.

    Args:
      task: model and loss.
      server_optimizer: Optimizer of the server, applied to the released mean update of x.
    """
    server_optimizer = optimizers.as_server(server_optimizer)
    of_model = server_step(server_optimizer)

    def start(hparams, x, own):
        del own
        zero = jax.tree.map(jnp.zeros_like, x)
        return Shared(publish(x, server_optimizer, hparams), zero), zero

    def client(shared, personal, data, hparams, context):
        del context
        x, c, c_i = shared.model.params, shared.control, personal
        correction = jax.tree.map(jnp.subtract, c, c_i)

        def step(carry, batch):
            y, total, loss = carry
            value, gradient = jax.value_and_grad(task.loss)(y, batch)
            total = jax.tree.map(jnp.add, total, gradient)
            corrected = jax.tree.map(jnp.add, gradient, correction)
            return moved(y, -hparams.learning_rate, corrected), total, loss + value

        zero = jax.tree.map(jnp.zeros_like, x)
        y, total, loss = data.fold(step, (x, zero, jnp.zeros(())))
        steps = data.num_steps()
        # A client whose minibatches are consumed keeps c_i.
        new = jax.tree.map(
            lambda old, sum_: jnp.where(
                steps > 0, sum_ / jnp.maximum(steps, 1).astype(sum_.dtype), old
            ),
            c_i,
            total,
        )
        message = tuple(jax.tree.map(jnp.subtract, *pair) for pair in ((y, x), (new, c_i)))
        return new, message, {"loss": loss / jnp.maximum(steps, 1)}

    def server(shared, release, hparams, round_):
        of_x, of_c = release
        model = of_model(shared.model, of_x, hparams, round_)
        return Shared(model, moved(shared.control, hparams.sampling_rate, of_c))

    return Algorithm(
        from_one_model(task, start),
        client,
        server,
        lambda shared, personal, hparams, client_id: shared.model.params,
        task,
        warm_start=WarmStart(start, lambda shared: shared.model.params),
    )
