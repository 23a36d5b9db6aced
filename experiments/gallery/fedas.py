"""FedAS (Yang, Huang, Ye; CVPR 2024): shared layers are aligned with a client before it trains.

fedjaxsim run --algorithm experiments/gallery/fedas.py:fedas --model mlp --data digits

The weights of clients depend on their data, and so are a part of the message: F_i (u_i − u) and F_i
are bounded and noised together, and the server divides one release by the other. ε is FedAvg's at
the same noise. The authors' code takes F_i over batches, where the paper has rows, as here.
"""

import jax
import jax.numpy as jnp
import optax

import fedjaxsim as fjs

ALIGNMENT_RATE = fjs.Hyperparameter(
    "alignment_rate", 0.01, "Learning rate of the alignment of shared layers.", scale="log"
)


@fjs.reads(fjs.optimizers.LEARNING_RATE, ALIGNMENT_RATE)
def fedas(task: fjs.Task) -> fjs.Algorithm:
    """Align the shared layers u, train them with the own head, and weigh clients by Tr F_i.

    Client i computes the mean representation of each class by its last own model, takes a step of u
    on each minibatch of the round towards them, by the sum over the minibatch's classes of the mean
    square distance (parameter alignment), and then its local steps of u and its head. Its weight is
    the trace of the empirical Fisher information of the result, the mean over its rows of ‖∇ℓ‖²
    (client synchronization). It keeps the whole model, with which it predicts.

    Args:
      task: model and loss; the model names its output layer.
    """
    model, head = task.model, task.output_layer
    if model is None or model.representation is None or head is None:
        raise ValueError("fedas needs a softmax classification that names its output layer")
    represent, classes = model.representation, len(task.labels[0])

    def by_class(batch):
        return jax.nn.one_hot(batch.fields["y"], classes) * batch.weight[:, None]

    def client(shared, personal, data, hparams, context):
        def add(carry, batch):
            sums, counts = carry
            rows = by_class(batch)
            z = represent(personal, batch.fields["x"])
            return sums + rows.T @ z, counts + rows.sum(axis=0)

        z = jax.eval_shape(represent, personal, data.batch_shapes().fields["x"])
        start = jnp.zeros((classes, z.shape[1]), z.dtype), jnp.zeros(classes)
        sums, counts = data.full_pass(add, start)
        means = sums / jnp.maximum(counts, 1)[:, None]

        def distance(v, batch):
            y, rows = batch.fields["y"].astype(jnp.int32), by_class(batch)
            squares = jnp.mean(jnp.square(represent(v, batch.fields["x"]) - means[y]), axis=1)
            return jnp.sum(rows.T @ squares / jnp.maximum(rows.sum(axis=0), 1))

        def align(v, batch):
            slope = jax.grad(distance)(v, batch)
            return fjs.shared_model.moved(v, -hparams.alignment_rate, slope)

        aligned = data.fold(align, shared | {head: personal[head]})
        v = fjs.local_steps(aligned, data, task, "sgd", hparams, context.round)

        def squares(fields):
            row = fjs.Batch(jax.tree.map(lambda value: value[None], fields), jnp.ones(1))
            return jnp.square(optax.tree.norm(jax.grad(task.loss)(v, row)))

        trace = fjs.mean_over_rows(lambda batch: batch.mean(jax.vmap(squares)(batch.fields)), data)
        update = {name: jax.tree.map(jnp.subtract, v[name], shared[name]) for name in shared}
        sent = jax.tree.map(lambda leaf: trace * leaf, update)
        return v, {"weighted": sent, "weight": trace}, {}

    def server(shared, release, hparams, round_):
        weight = release["weight"]
        inverse = jnp.where(weight > 0, 1 / jnp.maximum(weight, 1e-30), 0)
        return fjs.shared_model.moved(shared, inverse, release["weighted"])

    def init(key, hparams):
        w = task.init(key)
        return {name: part for name, part in w.items() if name != head}, w

    return fjs.Algorithm(init, client, server, lambda shared, own, hparams, client_id: own, task)
