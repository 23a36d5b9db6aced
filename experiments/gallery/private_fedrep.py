"""Private FedRep (Snedeker, Zhou, Bassily; ICML 2025): one shared subspace of linear regressions.

fedjaxsim run --algorithm experiments/gallery/private_fedrep.py:private_fedrep --rank 5
  --data synthetic-low-rank --loss squared --model linear --sampling full --epsilon 8 --clip 1

Every client's coefficients are U v_i, with U (d, k) shared and v_i its own. One clipped and noised
mean of gradients is a round's only release, and QR of it costs nothing. The paper begins with a
private spectral estimate of U, which is one more release; here U begins at random. The paper takes
other rows for v_i than for the gradient, which its error bounds need and its privacy does not: here
both take all of a client's rows.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

import fedjaxsim as fjs


@fjs.reads(fjs.optimizers.SERVER_LEARNING_RATE)
def private_fedrep(task: fjs.Task, *, rank: Annotated[int, range(1, 1001)] = 3) -> fjs.Algorithm:
    """Solve for v_i given U, send the gradient of U given v_i; U ← QR(U − η mean) (Algorithm 1).

    v_i is the least-squares solution of smallest norm. Nothing of a client's stays: with its rows
    it predicts by the v_i of the last U.

    Args:
      task: linear regression with squared loss.
      rank: k, dimension of the subspace.
    """

    def rows_of(w, batch):
        """Return the rows (b, d) of a minibatch, with a constant if the model has a bias."""
        x = batch.fields["x"]
        return jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1) if "bias" in w else x

    def vector(w):
        parts = [w["kernel"][0], w["bias"]] if "bias" in w else [w["kernel"][0]]
        return jnp.concatenate(parts)

    like = jax.eval_shape(task.init, jax.random.key(0))
    if not {*like} <= {"kernel", "bias"} or like["kernel"].shape[0] != 1:
        raise ValueError("private_fedrep needs a linear model with one output")
    dimension = jax.eval_shape(vector, like).shape[0]

    def solved(u, data):
        def add(sums, batch):
            z = rows_of(like, batch) @ u
            weighted = z * batch.weight[:, None].astype(z.dtype)
            return sums[0] + weighted.T @ z, sums[1] + weighted.T @ batch.fields["y"]

        gram, moment = data.full_pass(add, (jnp.zeros((rank, rank)), jnp.zeros(rank)))
        return jnp.linalg.pinv(gram, hermitian=True) @ moment

    def client(u, personal, data, hparams, context):
        v = solved(u, data)

        def add(total, batch):
            x = rows_of(like, batch)
            residual = (x @ (u @ v) - batch.fields["y"]) * batch.weight.astype(x.dtype)
            return total + 2 * jnp.outer(residual @ x, v)

        return personal, -data.full_pass(add, jnp.zeros_like(u)) / data.count, {}

    def orthonormal(u):
        q, r = jnp.linalg.qr(u)
        return q * jnp.where(jnp.diag(r) < 0, -1, 1)

    def params_of(w):
        if "bias" in like:
            return {"kernel": w[None, :-1], "bias": w[-1:]}
        return {"kernel": w[None]}

    def predict_with_data(u, personal, data, hparams, client_id):
        return params_of(u @ solved(u, data))

    return fjs.Algorithm(
        lambda key, hparams: (orthonormal(jax.random.normal(key, (dimension, rank))), ()),
        client,
        lambda u, release, hparams, round_: orthonormal(u + hparams.server_learning_rate * release),
        lambda u, personal, hparams, client_id: params_of(jnp.zeros(dimension)),
        task,
        predict_with_data=predict_with_data,
    )
