"""FedLESAM (Fan et al.; ICML 2024): sharpness-aware steps along the last global movement.

fedjaxsim run --algorithm experiments/gallery/fedlesam.py:fedlesam --data digits

Messages, releases and ε are FedAvg's. The authors' code divides by the sum of the norms of the
single arrays and takes the last round's movement for all clients.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fedjaxsim as fjs

RHO = fjs.Hyperparameter("rho", 0.05, "ρ, how far a step looks uphill.")


class Own(NamedTuple):
    """One client's state: the last shared model that it received, and whether it received one."""

    received: Any
    any: jax.Array


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE, RHO)
def fedlesam(task: fjs.Task) -> fjs.Algorithm:
    """Step along ∇ℓ(v + ρ (w_old − w)/‖w_old − w‖): one gradient a step (Algorithm 1).

    w_old is the shared model that the client received when it took part before; the first time it
    looks nowhere.

    Args:
      task: model and loss.
    """

    def client(shared, personal, data, hparams, context):
        w = shared.params
        uphill = jax.tree.map(jnp.subtract, personal.received, w)
        size = optax.tree.norm(uphill)
        scale = jnp.where(personal.any & (size > 0), hparams.rho / jnp.maximum(size, 1e-12), 0)

        def gradient(v, batch):
            return task.gradient(fjs.shared_model.moved(v, scale, uphill), batch)

        v = fjs.local_steps(w, data, task, "sgd", hparams, context.round, gradient=gradient)
        return Own(w, jnp.ones((), bool)), jax.tree.map(jnp.subtract, v, w), {}

    return fjs.shared_model.with_personal(
        fjs.fedavg(task),
        client,
        lambda hparams, model: Own(model, jnp.zeros((), bool)),
        fjs.shared_model.predict_with_shared,
    )
