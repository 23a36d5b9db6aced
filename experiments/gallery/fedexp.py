"""FedExP (Jhunjhunwala, Wang, Joshi; ICLR 2023), and with noise DP-FedEXP (Takakura et al. 2025).

fedjaxsim run --algorithm experiments/gallery/fedexp.py:fedexp --data digits --epsilon 8
"""

import jax
import jax.numpy as jnp
import optax

import fedjaxsim as fjs

DAMPING = fjs.Hyperparameter("damping", 1e-3, "ϵ in the divisor of the server's step.")


@fjs.reads(fjs.optimizers.LEARNING_RATE, DAMPING)
def fedexp(task: fjs.Task) -> fjs.Algorithm:
    """Step at the server by max(1, mean ‖Δ_i‖² / (2 (‖Δ̄‖² + ϵ))) (equation 4).

    ‖Δ_i‖² depends on a client's rows, so it is part of the message: one mechanism bounds and noises
    it with the update Δ_i, and ε covers the step size. Predictions are those of the mean of the
    last two models, as the paper's.

    Args:
      task: model and loss.
    """

    def client(shared, personal, data, hparams, context):
        w = shared[0]
        v = fjs.local_steps(w, data, task, "sgd", hparams, context.round)
        update = jax.tree.map(jnp.subtract, v, w)
        return personal, {"update": update, "square": optax.tree.norm(update) ** 2}, {}

    def server(shared, release, hparams, round_):
        w = shared[0]
        squared = optax.tree.norm(release["update"]) ** 2
        rate = jnp.maximum(1, release["square"] / (2 * (squared + hparams.damping)))
        return jax.tree.map(lambda a, r: a + rate * r, w, release["update"]), w

    def init(key, hparams):
        w = task.init(key)
        return (w, w), ()

    def predict(shared, personal, hparams, client_id):
        return jax.tree.map(lambda new, old: (new + old) / 2, *shared)

    return fjs.Algorithm(init, client, server, predict, task)
