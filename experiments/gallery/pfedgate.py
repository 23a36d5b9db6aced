"""pFedGate (Chen, Yao, Gao, Ding, Li; ICML 2023): each client's gates choose blocks of one model.

fedjaxsim run --algorithm experiments/gallery/pfedgate.py:pfedgate --model mlp --data digits

Gates stay with their clients and a message is the change of the dense model, so ε is FedAvg's. The
cost is FedAvg's, too: clients here compute with zeros where the paper's save time and bytes. Which
blocks a client leaves out follows from its rows, so a message without them, or its length, would
have to be charged.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import fedjaxsim as fjs

GATE_RATE = fjs.Hyperparameter(
    "gate_rate", 0.1, "η_φ of pFedGate, the step of a client's gates.", scale="log"
)


class Gated(NamedTuple):
    """The shared model and a client's gating layer, {"kernel": (d, L), "bias": (L,)}."""

    model: Any
    gates: Any


@fjs.reads(fjs.optimizers.LEARNING_RATE, GATE_RATE)
def pfedgate(task: fjs.Task, *, keep: float = 0.5, blocks: int = 5) -> fjs.Algorithm:
    """Step θ and φ_i on the loss of θ ⊙ M, with M the gates of a minibatch (Algorithm 1).

    M' is the mean over rows of sigmoid(x φ_i), a number for each block of parameters. Of a
    minibatch the gates M are M' on the blocks of the largest M' per parameter that fit into
    `keep`·d, and 0 on the others; each array's first block stays. A row is predicted with its own
    gates. The paper normalizes x and scores.

    Args:
      task: classification by a model of one field "x".
      keep: s, the part of the parameters that a client computes with.
      blocks: Parts of consecutive numbers into which each array of parameters is cut.
    """
    model = task.model
    if model is None:
        raise ValueError("pfedgate needs a task of a model, such as softmax(model, 10)")
    apply, like = model.apply, jax.eval_shape(task.init, jax.random.key(0))
    ids, first = [], []
    for leaf in jax.tree.leaves(like):
        part = np.arange(leaf.size) // -(-leaf.size // blocks)
        first.append(sum(of_leaf.max() + 1 for of_leaf in ids))
        ids.append(part)
    ids = np.concatenate([part + start for part, start in zip(ids, first, strict=True)])
    sizes = np.bincount(ids)
    stays = np.isin(np.arange(len(sizes)), first)
    room = int(keep * len(ids)) - sizes[stays].sum()
    if room < 0:
        raise ValueError(f"keep must leave each array's first block, got {keep}")

    def gates(phi, x, weight):
        scores = jax.nn.sigmoid(x.reshape(x.shape[0], -1) @ phi["kernel"] + phi["bias"])
        scores = weight @ scores / jnp.maximum(jnp.sum(weight), 1)
        order = jnp.argsort(jnp.where(stays, -jnp.inf, -scores / sizes))

        def take(left, block):
            size, stays = block
            fits = stays | (size <= left)
            return left - jnp.where(fits & ~stays, size, 0), fits

        of_blocks = jnp.asarray(sizes)[order], jnp.asarray(stays)[order]
        _, fits = jax.lax.scan(take, room, of_blocks)
        return scores * jnp.zeros_like(scores).at[order].set(fits.astype(scores.dtype))

    def adapted(parts, x, weight):
        flat, unravel = ravel_pytree(parts.model)
        return unravel(flat * gates(parts.gates, x, weight)[ids])

    def outputs(parts, x):
        one = jnp.ones(1)
        return jax.vmap(lambda row: apply(adapted(parts, row[None], one), row[None])[0])(x)

    def client(shared, phi, data, hparams, context):
        def step(parts, batch):
            def loss(parts):
                return task.loss(adapted(parts, batch.fields["x"], batch.weight), batch)

            slope = jax.grad(loss)(parts)
            rates = Gated(hparams.learning_rate, hparams.gate_rate)
            return Gated(
                *(
                    jax.tree.map(lambda v, g, rate=rate: v - rate * g, part, of_part)
                    for rate, part, of_part in zip(rates, parts, slope, strict=True)
                )
            )

        theta, phi = data.fold(step, Gated(shared, phi))
        return phi, jax.tree.map(jnp.subtract, theta, shared), {}

    def init(key, hparams, fields):
        of_model, of_gates = jax.random.split(key)
        d = fields["x"].size
        kernel = jax.random.normal(of_gates, (d, len(sizes))) / jnp.sqrt(d)
        return task.init(of_model), {"kernel": kernel, "bias": jnp.zeros(len(sizes))}

    return fjs.Algorithm(
        init,
        client,
        lambda shared, release, hparams, round_: jax.tree.map(jnp.add, shared, release),
        lambda shared, phi, hparams, client_id: Gated(shared, phi),
        task.with_outputs(outputs),
        warm_start=fjs.WarmStart(published=lambda shared: shared),
    )
