"""MOON (Li, He, Song; CVPR 2021): local steps whose representations stay near the shared model's.

fedjaxsim run --algorithm experiments/gallery/moon.py:moon --model mlp --data digits
"""

import jax
import jax.numpy as jnp

import fedjaxsim as fjs

MU = fjs.Hyperparameter("mu", 1.0, "μ, the weight of the contrastive loss.")
TEMPERATURE = fjs.Hyperparameter("temperature", 0.5, "τ of the contrastive loss.", scale="log")


def similarity(a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute the cosines of rows (b, r), as PyTorch does: each norm is at least 10⁻⁸."""
    norms = [jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(v), axis=1), 1e-16)) for v in (a, b)]
    return jnp.sum(a * b, axis=1) / (norms[0] * norms[1])


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE, MU, TEMPERATURE)
def moon(task: fjs.Task) -> fjs.Algorithm:
    """Run FedAvg on ℓ(v) − μ log(e^{s(z, z_w)/τ} / (e^{s(z, z_w)/τ} + e^{s(z, z_old)/τ})).

    z are the representations of the steps' model v, of the shared w and of the client's own last
    model; s is the cosine.

    Args:
      task: model and loss; the model names its output layer.
    """
    model = task.model
    if model is None or model.representation is None:
        raise ValueError("moon needs a softmax classification whose model names its output layer")
    represent = model.representation

    def client(shared, personal, data, hparams, context):
        w = shared.params

        def contrast(v, batch):
            x = batch.fields["x"]
            z, z_w, z_old = (represent(params, x) for params in (v, w, personal))
            near, far = similarity(z, z_w), similarity(z, z_old)
            return hparams.mu * batch.mean(jax.nn.softplus((far - near) / hparams.temperature))

        v = fjs.local_steps(w, data, task, "sgd", hparams, context.round, penalty=contrast)
        return v, jax.tree.map(jnp.subtract, v, w), {}

    return fjs.shared_model.with_personal(
        fjs.fedavg(task), client, predict=fjs.shared_model.predict_with_shared
    )
