"""FedSpeed (Sun, Shen, Huang, Ding, Tao; ICLR 2023): a corrected proximal term, gradients uphill.

fedjaxsim run --algorithm experiments/gallery/fedspeed.py:fedspeed --data digits

One message behind one clip, so ε is FedAvg's at the same noise. The server keeps no sum of
releases; a client's ĝ follows its unclipped message.
"""

import jax
import jax.numpy as jnp

import fedjaxsim as fjs

PROXIMITY = fjs.Hyperparameter(
    "proximity", 10.0, "λ of FedSpeed: 1/λ weighs the proximal term.", range=(1e-6, 1e6),
    allowed="lie in [1e-6, 1e6]", scale="log",
)  # fmt: skip
RHO = fjs.Hyperparameter("rho", 0.1, "ρ, the step uphill along the gradient.")
MERGE = fjs.Hyperparameter(
    "merge", 0.9, "α, the weight of the gradient uphill.", range=(0.0, 1.0), allowed="lie in [0, 1]"
)


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE, PROXIMITY, RHO, MERGE)
def fedspeed(task: fjs.Task) -> fjs.Algorithm:
    """Step along (1 − α) g₁ + α g₂ − ĝ_i + (v − w)/λ (Algorithm 1).

    g₁ = ∇ℓ(v) and g₂ = ∇ℓ(v + ρ g₁) are of one minibatch. After the steps

        ĝ_i ← ĝ_i − (v − w)/λ

    and the client sends v − λĝ_i, less w. Clients predict with w.

    Args:
      task: model and loss.
    """
    moved = fjs.shared_model.moved

    def client(shared, personal, data, hparams, context):
        w, correction = shared.params, personal

        def gradient(v, batch):
            first = task.gradient(v, batch)
            second = task.gradient(moved(v, hparams.rho, first), batch)
            merged = jax.tree.map(
                lambda a, b: (1 - hparams.merge) * a + hparams.merge * b, first, second
            )
            offset = jax.tree.map(jnp.subtract, v, w)
            return moved(moved(merged, -1, correction), 1 / hparams.proximity, offset)

        v = fjs.local_steps(w, data, task, "sgd", hparams, context.round, gradient=gradient)
        update = jax.tree.map(jnp.subtract, v, w)
        correction = moved(correction, -1 / hparams.proximity, update)
        return correction, moved(update, -hparams.proximity, correction), {}

    shared_model = fjs.fedavg(task)._replace(averages_statistics=False)
    return fjs.shared_model.with_personal(
        shared_model,
        client,
        lambda hparams, model: jax.tree.map(jnp.zeros_like, model),
        fjs.shared_model.predict_with_shared,
    )
