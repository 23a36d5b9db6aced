"""Ditto whose clients learn their own λ_k from their own validation rows, at no cost in ε.

Rows with 1 in the population's field "held" are a client's validation rows; others train.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fedjaxsim as fjs

LAMBDA_RATE = fjs.Hyperparameter("lambda_rate", 0.3, "κ, the step of log λ_k.")


class Own(NamedTuple):
    """One client's state: its model v_k, and log λ_k, ()."""

    model: Any
    log_lam: jax.Array


def rows(batch: fjs.Batch, held: bool) -> fjs.Batch:
    """Return a batch whose mean is over validation rows, or over the others."""
    return batch._replace(weight=batch.weight * (batch.fields["held"] == held))


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE, fjs.PULL, LAMBDA_RATE)
def own_lambda(task: fjs.Task) -> fjs.Algorithm:
    """Step on ℓ_k(v_k) + (λ_k/2) ‖v_k − w‖², and then on log λ_k.

    Beside v_k the steps carry u = dv_k/d log λ_k, by forward mode; after them

        log λ_k ← log λ_k − κ ⟨∇ℓ_val(v_k), u⟩.

    λ_k starts at `hparams.lam` and stays with its client, whose message is FedAvg's.

    Args:
      task: model and loss.
    """

    def gradient(params, batch):
        return task.gradient(params, rows(batch, held=False))

    def client(shared, personal, data, hparams, context):
        w, lam = shared.params, jnp.exp(personal.log_lam)
        trained = fjs.local_steps(w, data, task, "sgd", hparams, context.round, gradient=gradient)

        def step(carry, batch):
            def one(v, log_lam):
                pull = jax.tree.map(lambda a, b: jnp.exp(log_lam) * (a - b), v, w)
                slope = jax.tree.map(jnp.add, jax.grad(task.loss)(v, rows(batch, held=False)), pull)
                return fjs.shared_model.moved(v, -hparams.learning_rate, slope)

            v, u = carry
            return jax.jvp(one, (v, personal.log_lam), (u, jnp.ones_like(lam)))

        v, u = data.fold(step, (personal.model, jax.tree.map(jnp.zeros_like, w)))

        def add(total, batch):
            of_rows = rows(batch, held=True)
            _, slope = jax.jvp(lambda v: task.loss(v, of_rows), (v,), (u,))
            weight = jnp.sum(of_rows.weight).astype(slope.dtype)
            return total[0] + weight * slope, total[1] + weight

        total, count = data.full_pass(add, (jnp.zeros_like(lam), jnp.zeros_like(lam)))
        own = Own(v, personal.log_lam - hparams.lambda_rate * total / jnp.maximum(count, 1))
        return own, jax.tree.map(jnp.subtract, trained, w), {"lambda": lam}

    return fjs.shared_model.with_personal(
        fjs.fedavg(task),
        client,
        lambda hparams, model: Own(model, jnp.log(jnp.asarray(hparams.lam, float))),
        lambda shared, personal, hparams, client_id: personal.model,
    )
