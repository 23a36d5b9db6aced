"""GPFL (Zhang et al.; ICCV 2023): shared embeddings of the classes beside personal features.

fedjaxsim run --algorithm experiments/gallery/gpfl.py:gpfl --model mlp --data digits

Layers before the output, the valve and the embeddings of the classes are one message behind one
clip. A client's shares of the classes, which are private, only reach its own predictions and steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fedjaxsim as fjs

LAM = fjs.Hyperparameter("lam", 1e-3, "λ, weight of the distance from embeddings.", scale="log")
DECAY = fjs.Hyperparameter("decay", 0.0, "μ, weight decay of the valve and the embeddings.")


class Shared(NamedTuple):
    """The public state: body of the model, conditional valve, and embeddings (c, r) of classes."""

    body: Any
    valve: Any
    embeddings: jax.Array


class Conditioned(NamedTuple):
    """Parameters of a client's predictions: model with its own head, scale and shift (r,)."""

    model: Any
    scale: jax.Array
    shift: jax.Array


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE, LAM, DECAY)
def gpfl(task: fjs.Task) -> fjs.Algorithm:
    """Step on ℓ(head(f_p), y) + ℓ_e(f_g, y) + λ ‖f_g − e_y‖ of the rows, in all of its parts.

    f = ReLU((1 + γ(q)) z + β(q)) are features z through the conditional valve: f_g at the mean g of
    the embeddings, f_p at their mean p by the client's shares of the classes. γ and β are each a
    dense layer, ReLU and layer normalization. ℓ_e is the cross-entropy of cosines of f_g with the
    embeddings, and e are the embeddings as received. Heads stay with their clients. Distances are
    means over rows; the authors' code takes the norm of a whole minibatch.

    Args:
      task: model and loss; the model names its output layer, with a bias.
    """
    model, head = task.model, task.output_layer
    if model is None or model.representation is None or head is None or task.on_model is None:
        raise ValueError("gpfl needs a softmax classification that names its output layer")
    represent, classes = model.representation, len(task.labels[0])

    def through(z, scale, shift):
        return jax.nn.relu(z * (1 + scale) + shift)

    def outputs(conditioned, x):
        z = represent(conditioned.model, x)
        layer = conditioned.model[head]
        return through(z, conditioned.scale, conditioned.shift) @ layer["kernel"] + layer["bias"]

    def part(layer, condition):
        out = jax.nn.relu(condition @ layer["kernel"] + layer["bias"])
        normal = (out - jnp.mean(out)) * jax.lax.rsqrt(jnp.var(out) + 1e-5)
        return normal * layer["gain"] + layer["offset"]

    def conditioned_by(valve, condition):
        return part(valve["scale"], condition), part(valve["shift"], condition)

    judged = task.on_model(fjs.Model(model.init, outputs))

    def shares_of(data):
        def count(total, batch):
            of_rows = jax.nn.one_hot(batch.fields["y"], classes)
            return total + jnp.sum(of_rows * batch.weight[:, None], axis=0)

        return data.full_pass(count, jnp.zeros(classes)) / data.count

    def client(shared, own_head, data, hparams, context):
        received = shared.embeddings
        personal_mean, mean = shares_of(data) @ received, jnp.mean(received, axis=0)

        def loss(parts, batch):
            (body, valve, embeddings), own = parts
            x, y = batch.fields["x"], batch.fields["y"].astype(jnp.int32)
            w = body | {head: own}
            own_loss = judged.loss(Conditioned(w, *conditioned_by(valve, personal_mean)), batch)
            shared_features = through(represent(w, x), *conditioned_by(valve, mean))
            cosines = _unit(shared_features) @ _unit(embeddings).T
            of_classes = optax.softmax_cross_entropy_with_integer_labels(cosines, y)
            apart = optax.safe_norm(shared_features - received[y], 1e-6, axis=1)
            decayed = optax.tree.norm((valve, embeddings), squared=True)
            of_rows = batch.mean(of_classes + hparams.lam * apart)
            return own_loss + of_rows + hparams.decay / 2 * decayed

        def step(parts, batch):
            slope = jax.grad(loss)(parts, batch)
            return fjs.shared_model.moved(parts, -hparams.learning_rate, slope)

        moved, own = data.fold(step, (shared, own_head))
        return own, jax.tree.map(jnp.subtract, moved, shared), {}

    def server(shared, release, hparams, round_):
        return fjs.shared_model.moved(shared, hparams.server_learning_rate, release)

    def predict_with_data(shared, own, data, hparams, client_id):
        condition = shares_of(data) @ shared.embeddings
        return Conditioned(shared.body | {head: own}, *conditioned_by(shared.valve, condition))

    def predict(shared, own, hparams, client_id):
        condition = jnp.mean(shared.embeddings, axis=0)  # of a client without rows
        return Conditioned(shared.body | {head: own}, *conditioned_by(shared.valve, condition))

    def init(key, hparams, fields):
        w = task.init(key)
        r = jax.eval_shape(represent, w, fields["x"]).shape[1]
        keys = [jax.random.fold_in(key, place) for place in range(3)]
        dense = jax.nn.initializers.lecun_normal()
        layers = [
            {"kernel": dense(k, (r, r)), "bias": jnp.zeros(r), "gain": jnp.ones(r),
             "offset": jnp.zeros(r)}
            for k in keys[:2]
        ]  # fmt: skip
        valve = {"scale": layers[0], "shift": layers[1]}
        body = {name: layer for name, layer in w.items() if name != head}
        return Shared(body, valve, jax.random.normal(keys[2], (classes, r))), w[head]

    return fjs.Algorithm(init, client, server, predict, judged, predict_with_data=predict_with_data)


def _unit(rows):
    return rows / optax.safe_norm(rows, 1e-6, axis=1)[:, None]
