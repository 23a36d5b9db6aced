"""FedProto (Tan et al.; AAAI 2022): clients share the mean representation of each class.

fedjaxsim run --algorithm experiments/gallery/fedproto.py:fedproto --model mlp --data digits
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fedjaxsim as fjs

LAM = fjs.Hyperparameter("lam", 1.0, "λ, the weight of the distance to prototypes.")


class Predictor(NamedTuple):
    """A client's own model, and the prototypes (c, r) of classes with any row, (c,)."""

    model: Any
    prototypes: jax.Array
    present: jax.Array


@fjs.reads(fjs.optimizers.LEARNING_RATE, LAM)
def fedproto(task: fjs.Task) -> fjs.Algorithm:
    """Step on ℓ(w_k) + λ (1/r) ‖z − C̄_y‖², and predict the class of the nearest prototype C̄.

    A client sends the sums of its representations z by class, and the numbers of their rows; C̄ is
    the quotient of their releases (equations 3 and 6), so both are bounded and noised together.

    Args:
      task: model and loss; the model names its output layer.
    """
    model = task.model
    if model is None or model.representation is None:
        raise ValueError("fedproto needs a softmax classification that names its output layer")
    represent, classes = model.representation, len(task.labels[0])

    def outputs(own, x):
        apart = represent(own.model, x)[:, None] - own.prototypes
        return jnp.where(own.present, -jnp.mean(jnp.square(apart), axis=-1), -jnp.inf)

    def prototypes(shared):
        totals, counts = shared["sums"], shared["counts"]
        present = counts > 0
        return totals / jnp.where(present, counts, 1)[:, None], present

    def client(shared, personal, data, hparams, context):
        centres, present = prototypes(shared)

        def distance(w, batch):
            y = batch.fields["y"].astype(jnp.int32)
            squares = jnp.square(represent(w, batch.fields["x"]) - centres[y])
            near = jnp.where(present[y], jnp.mean(squares, axis=-1), 0)
            return hparams.lam * batch.mean(near)

        w = fjs.local_steps(personal, data, task, "sgd", hparams, context.round, penalty=distance)

        def add(sent, batch):
            of_rows = jax.nn.one_hot(batch.fields["y"], classes) * batch.weight[:, None]
            z = represent(w, batch.fields["x"])
            return {"sums": sent["sums"] + of_rows.T @ z, "counts": sent["counts"] + of_rows.sum(0)}

        return w, data.full_pass(add, jax.tree.map(jnp.zeros_like, shared)), {}

    def init(key, hparams, fields):
        w = task.init(key)
        z = jax.eval_shape(represent, w, fields["x"])
        sums = jnp.zeros((classes, z.shape[1]), z.dtype)
        return {"sums": sums, "counts": jnp.zeros(classes)}, w

    return fjs.Algorithm(
        init,
        client,
        lambda shared, release, hparams, round_: release,
        lambda shared, w, hparams, client_id: Predictor(w, *prototypes(shared)),
        task.with_outputs(outputs),
    )
