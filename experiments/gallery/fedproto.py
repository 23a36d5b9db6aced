"""FedProto (Tan et al.; AAAI 2022): clients share the mean representation of each class.

fedjaxsim run --algorithm experiments/gallery/fedproto.py:fedproto --model mlp --data digits
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fedjaxsim as fjs
from fedjaxsim.algorithms.local_steps import local_steps
from fedjaxsim.algorithms.optimizers import LEARNING_RATE

LAM = fjs.Hyperparameter("lam", 1.0, "λ, the weight of the distance to prototypes.", symbol="λ")


class Predictor(NamedTuple):
    """A client's own model, and the prototypes (c, r) of classes with any row, (c,)."""

    model: Any
    prototypes: jax.Array
    present: jax.Array


@fjs.reads(LEARNING_RATE, LAM)
def fedproto(task: fjs.Task) -> fjs.Algorithm:
    """Step on ℓ(w_k) + λ (1/r) ‖z − C̄_y‖², and predict the class of the nearest prototype C̄.

    A client sends the sums of its representations z by class, and the numbers of their rows; C̄ is
    the quotient of their releases (equations 3 and 6), so both are bounded and noised together.

    Args:
      task: model and loss; the model names its output layer.
    """
    model, on_model = task.model, task.on_model
    if model is None or on_model is None or model.output_layer is None:
        raise ValueError("fedproto needs a softmax classification that names its output layer")
    represent, classes = model.representation, len(task.labels[0])
    assert represent is not None

    def apply(params, x):
        if not isinstance(params, Predictor):
            return model.apply(params, x)
        apart = represent(params.model, x)[:, None] - params.prototypes
        return jnp.where(params.present, -jnp.mean(jnp.square(apart), axis=-1), -jnp.inf)

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

        w = local_steps(personal, data, task, "sgd", hparams, context.round, penalty=distance)

        def add(sent, batch):
            of_rows = jax.nn.one_hot(batch.fields["y"], classes) * batch.weight[:, None]
            z = represent(w, batch.fields["x"])
            return {"sums": sent["sums"] + of_rows.T @ z, "counts": sent["counts"] + of_rows.sum(0)}

        return w, data.full_pass(add, jax.tree.map(jnp.zeros_like, shared)), {}

    def init(key, hparams):
        w = task.init(key)
        width = w[model.output_layer]["kernel"].shape[0]
        return {"sums": jnp.zeros((classes, width)), "counts": jnp.zeros(classes)}, w

    return fjs.Algorithm(
        init,
        client,
        lambda shared, release, hparams, round_: release,
        lambda shared, w, hparams, client_id: Predictor(w, *prototypes(shared)),
        on_model(model._replace(apply=apply, features=None, representation=None, dense=None)),
    )
