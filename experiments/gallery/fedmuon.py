"""FedMuon (Liu, Shang, Zhou, Liu, Liu, Liu; arXiv 2510.27403, 2025): orthogonalized local steps.

fedjaxsim run --algorithm experiments/gallery/fedmuon.py:fedmuon --model mlp --data digits
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fedjaxsim as fjs

BETA = fjs.Hyperparameter("beta", 0.9, "β of the momentum.", (0.0, 1.0))
ALIGNMENT = fjs.Hyperparameter(
    "alignment", 0.5, "α, the part of the global direction in a local step.", (0.0, 1.0)
)


class Shared(NamedTuple):
    """The server's state: x, the last released mean update, and the momentum of the clients."""

    params: Any
    update: Any
    momentum: Any


def orthogonalized(matrix: jax.Array) -> jax.Array:
    """Return U Vᵀ of a matrix U S Vᵀ, over S > 0; vectors stay, and kernels are flattened."""
    if matrix.ndim < 2:
        return matrix
    u, s, v = jnp.linalg.svd(matrix.reshape(-1, matrix.shape[-1]), full_matrices=False)
    # A softmax's last layer has gradients whose columns add up to 0: their U Vᵀ is not unique.
    return ((u * (s > 1e-5 * s[0])) @ v).reshape(matrix.shape)


@fjs.reads(fjs.optimizers.LEARNING_RATE, BETA, ALIGNMENT)
def fedmuon(task: fjs.Task) -> fjs.Algorithm:
    """Take K local steps M ← βM + ∇ℓ_k(x),  x ← x − η ((1 − α) U Vᵀ + α Δ),  M = U S Vᵀ.

    M starts at the mean of the clients' last ones, and Δ is the last mean update over −ηK. Both are
    in one message, so one clip norm bounds both. Vectors, for which the paper takes AdamW, step
    along M.

    Args:
      task: model and loss.
    """
    moved = fjs.shared_model.moved

    def client(shared, personal, data, hparams, context):
        steps = data.num_steps().astype(float)
        rate = -hparams.alignment / (hparams.learning_rate * steps)

        def step(carry, batch):
            x, momentum = carry
            momentum = moved(task.gradient(x, batch), hparams.beta, momentum)
            own = jax.tree.map(lambda m: (1 - hparams.alignment) * orthogonalized(m), momentum)
            direction = moved(own, rate, shared.update)
            return moved(x, -hparams.learning_rate, direction), momentum

        x, momentum = data.fold(step, (shared.params, shared.momentum))
        return personal, (jax.tree.map(jnp.subtract, x, shared.params), momentum), {}

    def init(key, hparams):
        x = task.init(key)
        zero = jax.tree.map(jnp.zeros_like, x)
        return Shared(x, zero, zero), ()

    return fjs.Algorithm(
        init,
        client,
        lambda shared, release, hparams, round_: Shared(
            moved(shared.params, 1, release[0]), *release
        ),
        lambda shared, personal, hparams, client_id: shared.params,
        task,
    )
