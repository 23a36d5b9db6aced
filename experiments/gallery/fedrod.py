"""FedRoD (Chen, Chao; ICLR 2022): a balanced shared head, and a head of one's own beside it.

fedjaxsim run --algorithm experiments/gallery/fedrod.py:fedrod --model mlp --data digits
"""

import jax
import jax.numpy as jnp
import optax

import fedjaxsim as fjs


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE)
def fedrod(task: fjs.Task) -> fjs.Algorithm:
    """Run FedAvg by the balanced softmax; own heads learn what its outputs lack (eq. 5 to 8).

    A step moves the shared v by the loss of its outputs + log n_c, with the client's numbers n_c of
    rows by class, and the client's own head by the loss of both heads' outputs added, at the v
    before the step. Heads are linear, so a client predicts with their sum as one head.

    Args:
      task: model and loss; the model names its output layer.
    """
    model, head = task.model, task.output_layer
    if model is None or head is None:
        raise ValueError("fedrod needs a softmax classification that names its output layer")
    classes = len(task.labels[0])

    def both(w, own):
        return w | {head: jax.tree.map(jnp.add, w[head], own)}

    def client(shared, personal, data, hparams, context):
        def count(total, batch):
            of_rows = jax.nn.one_hot(batch.fields["y"], classes)
            return total + jnp.sum(of_rows * batch.weight[:, None], axis=0)

        log_counts = jnp.log(data.full_pass(count, jnp.zeros(classes)))

        def balanced(v, batch):
            outputs = model.apply(v, batch.fields["x"]) + log_counts
            labels = batch.fields["y"].astype(jnp.int32)
            losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
            return batch.mean(losses)

        def step(carry, batch):
            v, own = carry
            of_own = task.gradient(both(v, own), batch)[head]
            of_v = jax.grad(balanced)(v, batch)
            return jax.tree.map(lambda a, g: a - hparams.learning_rate * g, carry, (of_v, of_own))

        v, own = data.fold(step, (shared.params, personal))
        return own, jax.tree.map(jnp.subtract, v, shared.params), {}

    def state(hparams, w):
        return jax.tree.map(jnp.zeros_like, w[head])

    def predict(shared, own, hparams, client_id):
        return both(shared.params, own)

    shared_model = fjs.fedavg(task)._replace(averages_statistics=False)  # steps do not track them
    return fjs.shared_model.with_personal(shared_model, client, state, predict)
