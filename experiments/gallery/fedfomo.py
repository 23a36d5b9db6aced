"""FedFomo (Zhang, Sapra, Fidler, Yeung, Alvarez; ICLR 2021): clients choose whose models to follow.

fedjaxsim run --algorithm experiments/gallery/fedfomo.py:fedfomo --mechanism every-row --data digits

The server publishes every client's model, so each row is clipped and noised alone: ε covers a
client's published model, too, and the noise meets one client's signal instead of a cohort's sum.
The memory is that of m models, and a client computes the loss of all of them.
"""

import jax
import jax.numpy as jnp

import fedjaxsim as fjs


@fjs.reads(fjs.optimizers.LEARNING_RATE)
def fedfomo(task: fjs.Task, *, num_clients: int) -> fjs.Algorithm:
    """Move to Σ_n w_n (θ_n − θ_i) from the client's own θ_i, and then take local steps (eq. 3).

    w_n is max(0, L_i(θ_i) − L_i(θ_n))/‖θ_n − θ_i‖ of the published θ_n, divided by the sum over n;
    L_i is the mean loss of all the client's training rows, for the paper's validation rows. The
    client keeps θ_i, predicts with it, and sends its difference to its published row.

    Args:
      task: model and loss.
      num_clients: m.
    """

    def norm(tree):
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))

    def client(shared, personal, data, hparams, context):
        theta = personal
        apart = jax.tree.map(jnp.subtract, shared, theta)
        sizes = jax.vmap(norm)(apart)
        of_all = jax.vmap(task.loss, (0, None))
        own, others = fjs.mean_over_rows(
            lambda batch: (task.loss(theta, batch), of_all(shared, batch)), data
        )
        gains = jnp.where(sizes > 0, jnp.maximum(own - others, 0) / jnp.maximum(sizes, 1e-30), 0)
        weights = gains / jnp.maximum(jnp.sum(gains), 1e-30)
        start = jax.tree.map(lambda t, d: t + jnp.tensordot(weights, d, 1), theta, apart)
        theta = fjs.local_steps(start, data, task, "sgd", hparams, context.round)
        row = jax.tree.map(lambda leaf: leaf[context.client_id], shared)
        return theta, jax.tree.map(jnp.subtract, theta, row), {}

    def init(key, hparams):
        w = task.init(key)
        rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), w)
        return rows, w

    return fjs.Algorithm(
        init,
        client,
        lambda rows, release, hparams, round_: jax.tree.map(jnp.add, rows, release),
        lambda rows, theta, hparams, client_id: theta,
        task,
    )
