"""FedNova (Wang, Liu, Liang, Joshi, Poor; NeurIPS 2020): updates divided by their steps.

fedjaxsim run --algorithm experiments/gallery/fednova.py:fednova --data digits

A clip norm for each part keeps the number of steps from drowning the update: at ε = 8 on digits,
100 rounds have an accuracy of 0.91 by parts and 0.22 with one clip norm of 1 (seed 0). One norm
that is tuned does as well as parts (experiments/systems/clip-norms.toml).

fedjaxsim run --algorithm experiments/gallery/fednova.py:fednova --data digits --epsilon 8
  --mechanism per-part --parts update,steps --clip-update 0.1 --clip-steps 10 --share-steps 0.1
"""

import jax
import jax.numpy as jnp

import fedjaxsim as fjs


@fjs.reads(fjs.optimizers.LEARNING_RATE)
def fednova(task: fjs.Task) -> fjs.Algorithm:
    """Send (v_i − w)/τ_i after τ_i local steps of SGD, and τ_i itself.

    w ← w + τ̄ R, where R and τ̄ are the released means of both (equation 6, with τ_eff the mean of
    τ_i). Both are one message, which is bounded and noised as a whole.

    Args:
      task: model and loss.
    """

    def client(shared, personal, data, hparams, context):
        v = fjs.local_steps(shared, data, task, "sgd", hparams, context.round)
        steps = data.num_steps().astype(float)
        divisor = jnp.maximum(steps, 1)
        update = jax.tree.map(lambda a, b: (a - b) / divisor.astype(a.dtype), v, shared)
        return personal, {"update": update, "steps": steps}, {}

    def server(w, release, hparams, round_):
        return jax.tree.map(lambda a, r: a + release["steps"] * r, w, release["update"])

    return fjs.Algorithm(
        lambda key, hparams: (task.init(key), ()),
        client,
        server,
        lambda w, personal, hparams, client_id: w,
        task,
    )
