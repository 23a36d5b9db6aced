"""FedBuff (Nguyen et al.; AISTATS 2022): the server steps after K arrivals, some of them late.

fedjaxsim run --algorithm experiments/gallery/fedbuff.py:fedbuff --data digits --mean-delay 2

A round is one of the server's steps, and its cohort the K clients who arrive. With M clients at
work at once the server steps M/K times while a client works, so the mean delay is M/K. If work
takes s seconds on average, T steps take T K s/M seconds; as many synchronous rounds of M clients
take T times the slowest client's time. `fedjaxsim compare --over seconds` draws both.

Delays come from a public law, and a late message is a function of an earlier release. So ε is the
sampler's: proven for arrivals that are independent coins (`poisson`), and without amplification for
exactly K of them (`fixed_size`). If delays follow from a client's rows, or slow clients arrive less
often than the sampler says, no ε holds.
"""

from typing import Literal

import jax
import jax.numpy as jnp

import fedjaxsim as fjs

MEAN_DELAY = fjs.Hyperparameter(
    "mean_delay", 1.0, "Mean number of the server's steps while a client works.", scale="log"
)


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE, MEAN_DELAY)
def fedbuff(
    task: fjs.Task, *, delays: Literal["geometric", "constant"] = "geometric", longest: int = 10
) -> fjs.Algorithm:
    """Step by the mean of Δ_i/√(1 + τ_i), where Δ_i starts from the model of τ_i steps ago.

    This is the paper's Algorithm 1 with its staleness weights (section 5). Delays τ are at most
    those since the first round.

    Args:
      task: model and loss.
      delays: Law of the delays, geometric or the mean for everybody.
      longest: Longest delay; the server keeps as many models, and one more.
    """

    def client(models, personal, data, hparams, context):
        mean, most = hparams.mean_delay, jnp.minimum(longest, context.round)
        delay = jnp.round(mean)
        if delays == "geometric":  # P(τ ≥ k) = (mean/(1 + mean))^k
            coin = jax.random.uniform(context.key, minval=jnp.finfo(float).tiny)
            delay = jnp.floor(jnp.log(coin) / jnp.log(mean / (1 + mean)))
        delay = jnp.minimum(delay, most).astype(jnp.int32)
        w = jax.tree.map(lambda leaf: leaf[delay], models)
        v = fjs.local_steps(w, data, task, "sgd", hparams, context.round - delay)
        weight = jax.lax.rsqrt(1.0 + delay)
        return personal, jax.tree.map(lambda a, b: weight * (a - b), v, w), {}

    def server(models, release, hparams, round_):
        def step(leaf, change):
            new = leaf[0] + hparams.server_learning_rate * change
            return jnp.concatenate([new[None], leaf[:-1]])

        return jax.tree.map(step, models, release)

    def init(key, hparams):
        w = task.init(key)
        return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], 1 + longest, axis=0), w), ()

    def newest(models):
        return jax.tree.map(lambda leaf: leaf[0], models)

    return fjs.Algorithm(
        init,
        client,
        server,
        lambda models, personal, hparams, client_id: newest(models),
        task,
        warm_start=fjs.WarmStart(published=newest),
        at_work=lambda hparams: hparams.mean_delay,
    )
