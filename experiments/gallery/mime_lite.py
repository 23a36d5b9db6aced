"""MimeLite (Karimireddy et al.; NeurIPS 2021): clients step with the server's momentum.

fedjaxsim run --algorithm experiments/gallery/mime_lite.py:mime_lite --data digits
"""

import jax
import jax.numpy as jnp

import fedjaxsim as fjs

BETA = fjs.Hyperparameter(
    "beta", 0.9, "β of the server's momentum.", (0.0, 1.0), allowed="lie in [0, 1]"
)


@fjs.reads(fjs.optimizers.LEARNING_RATE, BETA)
def mime_lite(task: fjs.Task) -> fjs.Algorithm:
    """Step y ← y − η ((1 − β) ∇ℓ_i(y) + β m) with m fixed in a round (Algorithm 1, MimeLite).

    A client sends y − x and the gradient of all its rows at x, from whose mean G the server makes
    m ← (1 − β) G + β m. Both are one message, which is bounded and noised as a whole.

    Args:
      task: model and loss.
    """

    def mixed(gradient, m, beta):
        return jax.tree.map(lambda g, old: (1 - beta) * g + beta * old, gradient, m)

    def client(shared, personal, data, hparams, context):
        x, m = shared

        def step(y, batch):
            direction = mixed(task.gradient(y, batch), m, hparams.beta)
            return jax.tree.map(lambda a, d: a - hparams.learning_rate * d, y, direction)

        update = jax.tree.map(jnp.subtract, data.fold(step, x), x)
        gradient = fjs.mean_over_rows(lambda batch: jax.grad(task.loss)(x, batch), data)
        return personal, {"update": update, "gradient": gradient}, {}

    def server(shared, release, hparams, round_):
        x, m = shared
        return (
            jax.tree.map(jnp.add, x, release["update"]),
            mixed(release["gradient"], m, hparams.beta),
        )

    def init(key, hparams):
        x = task.init(key)
        return (x, jax.tree.map(jnp.zeros_like, x)), ()

    return fjs.Algorithm(init, client, server, lambda shared, *_: shared[0], task)
