"""Privacy levels by group of clients: one release, in which each group is bounded by its own norm.

fedjaxsim run --algorithm experiments/gallery/privacy_levels.py:privacy_levels --data digits

The run's ε is that of clients with share 1. A client of share s is bounded by sC under noise zC, as
by a noise multiplier z/s: `reports` says what that costs. Shares are public, and must not follow
from private rows.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

import fedjaxsim as fjs

[CLIP] = (record for record in fjs.gaussian().hyperparameters if record.name == "clip")
SHARE = fjs.Hyperparameter(
    "clip_share", 1.0, "Share of the clip norm that bounds a client's message.",
    range=(1e-6, 1.0), allowed="lie in [1e-6, 1]", per_client=True,
)  # fmt: skip


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE, CLIP, SHARE)
def privacy_levels(task: fjs.Task) -> fjs.Algorithm:
    """Run FedAvg whose client k clips its update at s_k C, s_k = `hparams.clip_share`.

    Clients of a small share move the model less: the price of their smaller ε.

    Args:
      task: model and loss.
    """

    def client(shared, personal, data, hparams, context):
        v = fjs.local_steps(shared.params, data, task, "sgd", hparams, context.round)
        update = jax.tree.map(jnp.subtract, v, shared.params)
        bound = hparams.clip_share * hparams.clip * (1 - 1e-6)  # rounding stays below it
        factor = jnp.minimum(1, bound / jnp.maximum(optax.tree.norm(update), 1e-30))
        return personal, jax.tree.map(lambda leaf: factor * leaf, update), {}

    return fjs.fedavg(task)._replace(client=client, averages_statistics=False)


def reports(
    simulation: fjs.Simulation,
    hparams: fjs.Hyperparameters,
    shares: Iterable[float],
    *,
    rounds: int,
    delta: float,
) -> dict[float, fjs.privacy.Report]:
    """Compute the guarantee of so many rounds for the clients of each share.

    Messages are bounded by the mechanism too, so that it must be `fjs.gaussian()`.
    """
    z = hparams.noise_multiplier
    return {
        share: fjs.privacy.report(
            [simulation.planned(hparams.replace(noise_multiplier=z / share), 0, rounds)],
            delta,
            assumed=simulation.public,
        )
        for share in shares
    }
