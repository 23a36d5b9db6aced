"""FedDBE (Zhang et al.; NeurIPS 2023): a client's bias in its representations stays with it.

fedjaxsim run --algorithm experiments/gallery/feddbe.py:feddbe --model mlp --data digits

The mean of all clients' representations is a second part of the first round's message, behind the
same clip and noise: T rounds cost what T rounds of FedAvg cost. The paper weighs clients by rows,
which are private; here each counts once, over the expected cohort.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fedjaxsim as fjs

KAPPA = fjs.Hyperparameter("kappa", 1.0, "κ, the weight of the distance between means.")
MEAN_RATE = fjs.Hyperparameter(
    "mean_rate", 1.0, "μ of FedDBE, the weight of the newest minibatch in a client's mean.",
    range=(0.0, 1.0), allowed="lie in [0, 1]",
)  # fmt: skip


class Shared(NamedTuple):
    """The public state: the model, and the mean representation of all clients, (r,)."""

    model: Any
    centre: jax.Array


class Biased(NamedTuple):
    """Parameters of a client's predictions: the shared model, and its bias, (r,)."""

    model: Any
    bias: jax.Array


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE, KAPPA, MEAN_RATE)
def feddbe(task: fjs.Task) -> fjs.Algorithm:
    """Step on ℓ(head(z + b_i)) + κ ½ mean_j (m_j − c_j)², in the model and in b_i (eq. 5 to 8).

    z are representations, m ← (1 − μ) m + μ mean(z) over the round's minibatches, from 0 and
    without derivatives of earlier ones, and c is the mean of the clients' last m of round 0, whose
    steps are FedAvg's. b_i starts at 0 and stays with its client, which predicts with it.

    Args:
      task: model and loss; the model names its output layer, with a bias.
    """
    model, head = task.model, task.output_layer
    if model is None or model.representation is None or head is None:
        raise ValueError("feddbe needs a softmax classification that names its output layer")
    represent = model.representation

    def shifted(biased):
        """Return the model whose output layer adds its kernel's product with the bias."""
        w, layer = biased.model, biased.model[head]
        return w | {head: layer | {"bias": layer["bias"] + biased.bias @ layer["kernel"]}}

    def client(shared, personal, data, hparams, context):
        later = context.round > 0

        def step(carry, batch):
            (v, bias), last = carry

            def loss(biased):
                z = represent(biased.model, batch.fields["x"])
                weight = (batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)).astype(z.dtype)
                mean = (1 - hparams.mean_rate) * last + hparams.mean_rate * (weight @ z)
                apart = jnp.mean(jnp.square(mean - shared.centre)) / 2
                used = Biased(biased.model, jnp.where(later, biased.bias, 0))
                pull = jnp.where(later, hparams.kappa * apart, 0)
                return task.loss(shifted(used), batch) + pull, mean

            slope, mean = jax.grad(loss, has_aux=True)(Biased(v, bias))
            return fjs.shared_model.moved(Biased(v, bias), -hparams.learning_rate, slope), mean

        w = shared.model.params
        start = Biased(w, personal), jnp.zeros_like(shared.centre)
        biased, mean = data.fold(step, start)
        sent = Shared(jax.tree.map(jnp.subtract, biased.model, w), jnp.where(later, 0, mean))
        return biased.bias, sent, {}

    server_step = fjs.fedavg(task).server

    def server(shared, release, hparams, round_):
        w = server_step(shared.model, release.model, hparams, round_)
        return Shared(w, jnp.where(round_ == 0, release.centre, shared.centre))

    def init(key, hparams, fields):
        shared, _ = fjs.fedavg(task).init(key, hparams)
        z = jax.eval_shape(represent, shared.params, fields["x"])
        zeros = jnp.zeros(z.shape[1], z.dtype)
        return Shared(shared, zeros), zeros

    return fjs.Algorithm(
        init,
        client,
        server,
        lambda shared, bias, hparams, client_id: shifted(Biased(shared.model.params, bias)),
        task,
    )
