"""FedDyn (Acar, Zhao, Matas, Mattina, Whatmough, Saligrama; ICLR 2021): dynamic regularization."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, NoiseAddsUp, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.local_steps import PULL, Pull, local_steps
from fedjaxsim.algorithms.shared_model import from_one_model, moved, sum_outgrows_mean
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task

PyTree = Any
Message = Literal["state", "update"]
_ADDS_UP = NoiseAddsUp("FedDyn", 'message="state"', sum_outgrows_mean)
_ALPHA = dataclasses.replace(PULL, default=0.1)


class Shared(NamedTuple):
    """The public server state: θ, from which clients start, and d = −h/α, the mean of all d_k."""

    params: PyTree
    drift: PyTree


@reads(optimizers.local_records, _ALPHA)
def feddyn(
    task: Task, *, message: Message = "update", local_optimizer: optimizers.LocalChoice = "sgd"
) -> Algorithm:
    """FedDyn: a linear term makes the clients' minima agree; one model for all (Algorithm 1).

    Client k of the cohort takes local steps from the server's θ on

        ℓ_k(v) − ⟨g_k, v⟩ + (α/2) ‖v − θ‖²,    α = `hparams.lam`,

    and then sets g_k ← g_k − α (v − θ). With d_k = −g_k/α, which starts at 0, the penalty is a pull
    towards θ − d_k, and d_k ← d_k + v − θ. From the mean R of v − θ the server adds p R to the
    mean d of all d_k (h = −αd in the paper; p is the share of clients in P), and then

        θ ← θ + R + d.

    Clients predict with θ − d = θ + h/α, the mean of the last cohort's models.

    The message "update" is the paper's v − θ. Its noise adds up: h − (mean of −g_k) holds p times
    the sum of all noise, and θ settles only where the mean gradient is α times that sum. So it
    diverges, the later the smaller α is. The message "state" is the new d_k, from which the server
    subtracts d to have R, so that d forgets earlier noise. At p = 1 and without noise both are the
    same algorithm. For p < 1 the cohort's states stand for all clients' states, which a small α
    makes worse: give α = 1.

    Args:
      message: Message of a client: the paper's "update", v − θ, in which noise adds up, or "state",
        the sum d_k of its updates.

    Example:
      >>> algorithm = fjs.feddyn(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'lam']
    """
    checks.one_of(get_args(Message), message=message)

    def start(key, hparams, theta, own_model):
        zero = jax.tree.map(jnp.zeros_like, theta)
        return Shared(theta, zero), zero

    def client(shared, personal, data, hparams, context):
        theta, d_k = shared.params, personal
        pull = Pull(hparams.lam, jax.tree.map(jnp.subtract, theta, d_k))
        v = local_steps(theta, data, task, local_optimizer, hparams, context.round, pull)
        update = jax.tree.map(jnp.subtract, v, theta)
        d_after = moved(d_k, 1, update)
        return d_after, d_after if message == "state" else update, {}

    def server(shared, release, hparams, round_):
        if message == "state":
            release = jax.tree.map(jnp.subtract, release, shared.drift)
        drift = moved(shared.drift, hparams.sampling_rate, release)
        return Shared(moved(moved(shared.params, 1, release), 1, drift), drift)

    def published(shared):
        return moved(shared.params, -1, shared.drift)

    return Algorithm(
        from_one_model(task, start),
        client,
        server,
        lambda shared, personal, hparams, client_id: published(shared),
        task,
        warm_start=WarmStart(start, published),
        noise_adds_up=_ADDS_UP if message == "update" else None,
        curvature=optimizers.curvature(local_optimizer, _ALPHA.name),
        typical_message=optimizers.small_update if message == "update" else None,
    )
