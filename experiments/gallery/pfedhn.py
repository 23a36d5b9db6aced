"""pFedHN (Shamsian, Navon, Fetaya, Chechik; ICML 2021): a shared hypernetwork makes every model.

fedjaxsim run --algorithm experiments/gallery/pfedhn.py:pfedhn --data digits

In the paper the server has the clients' embeddings and reads each update. Here the hypernetwork is
public, a client keeps its embedding, and sends the change of the hypernetwork: the same numbers,
but behind one clip and noise, so ε is that of FedAvg with as many parameters as the hypernetwork.
"""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import fedjaxsim as fjs

HYPER_RATE = fjs.Hyperparameter(
    "hyper_rate", 0.01, "α of pFedHN, the step of hypernetwork and embeddings.", scale="log"
)


@fjs.reads(fjs.optimizers.LEARNING_RATE, HYPER_RATE)
def pfedhn(task: fjs.Task, *, embedding: int = 8, hidden: int = 32) -> fjs.Algorithm:
    """Move φ and v_i so that θ_i = h(v_i; φ) follows the client's local steps (Algorithm 1).

    With Δθ = θ_i − θ̃_i, θ̃_i the model after the local steps from θ_i,

        φ ← φ − α mean_i (∂θ_i/∂φ)ᵀ Δθ,    v_i ← v_i − α (∂θ_i/∂v_i)ᵀ Δθ.

    h has one hidden layer of ReLUs. Its output layer starts at 0 beside the model of `task.init`,
    and clients predict with θ_i.

    Args:
      task: model and loss.
      embedding: Numbers of a client's embedding v_i, normal at first.
      hidden: Width of the hypernetwork.
    """

    def generated(phi, v):
        like = jax.eval_shape(task.init, jax.random.key(0))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        z = jax.nn.relu(v @ phi["in"] + phi["in_bias"])
        return ravel_pytree(zeros)[1](z @ phi["out"] + phi["out_bias"])

    def embedded(moved, client_id):
        """Return v_i: normal numbers of the client's index, and its own movement since."""
        key = jax.random.fold_in(jax.random.key(0), client_id)
        return jax.random.normal(key, moved.shape, moved.dtype) + moved

    def client(shared, personal, data, hparams, context):
        v = embedded(personal, context.client_id)
        theta, pull_back = jax.vjp(generated, shared, v)
        trained = fjs.local_steps(theta, data, task, "sgd", hparams, context.round)
        of_phi, of_v = pull_back(jax.tree.map(jnp.subtract, theta, trained))
        return personal - hparams.hyper_rate * of_v, jax.tree.map(jnp.negative, of_phi), {}

    def init(key, hparams):
        model, first = jax.random.split(key)
        flat, _ = ravel_pytree(task.init(model))
        phi = {
            "in": jnp.sqrt(2 / embedding) * jax.random.normal(first, (embedding, hidden)),
            "in_bias": jnp.zeros(hidden),
            "out": jnp.zeros((hidden, flat.size)),
            "out_bias": flat,
        }
        return jax.tree.map(lambda leaf: leaf.astype(flat.dtype), phi), jnp.zeros(embedding)

    return fjs.Algorithm(
        init,
        client,
        lambda phi, release, hparams, round_: fjs.shared_model.moved(
            phi, hparams.hyper_rate, release
        ),
        lambda phi, moved, hparams, client_id: generated(phi, embedded(moved, client_id)),
        task,
    )
