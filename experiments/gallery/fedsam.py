"""FedSAM (Qu et al.; ICML 2022): FedAvg whose clients step by sharpness-aware gradients.

fedjaxsim run --algorithm experiments/gallery/fedsam.py:fedsam --data digits
"""

import jax
import jax.numpy as jnp
import optax

import fedjaxsim as fjs

RHO = fjs.Hyperparameter("rho", 0.05, "ρ, how far a step looks uphill.")


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE, RHO)
def fedsam(task: fjs.Task) -> fjs.Algorithm:
    """Step along ∇ℓ(v + ρ g/‖g‖) with g = ∇ℓ(v) of the same minibatch (Algorithm 1).

    Args:
      task: model and loss.
    """

    def client(shared, personal, data, hparams, context):
        def gradient(v, batch):
            g = task.gradient(v, batch)
            scale = hparams.rho / (optax.tree.norm(g) + 1e-12)
            return task.gradient(jax.tree.map(lambda a, b: a + scale * b, v, g), batch)

        w = shared.params
        v = fjs.local_steps(w, data, task, "sgd", hparams, context.round, gradient=gradient)
        return personal, jax.tree.map(jnp.subtract, v, w), {}

    return fjs.fedavg(task)._replace(client=client)
