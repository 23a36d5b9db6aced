"""FedBABU (Oh, Kim, Yun; ICLR 2022): the body is learned together, the head only at the end.

fedjaxsim run --algorithm experiments/gallery/fedbabu.py:fedbabu --model mlp --data digits
"""

import jax
import jax.numpy as jnp

import fedjaxsim as fjs

TUNING_RATE = fjs.Hyperparameter(
    "tuning_rate", 0.1, "Learning rate of the head and body at the end.", scale="log"
)


@fjs.reads(fjs.optimizers.LEARNING_RATE, TUNING_RATE)
def fedbabu(task: fjs.Task) -> fjs.Algorithm:
    """Run FedAvg on all layers but the output layer, which stays as it started (Algorithm 1).

    A client predicts with the model after as many steps of all layers on its own rows as a round
    has; they never leave it.

    Args:
      task: model and loss; the model names its output layer.
    """
    head = task.output_layer
    if head is None:
        raise ValueError("fedbabu needs a model that names its output layer, such as mlp")

    def client(shared, personal, data, hparams, context):
        def gradient(w, batch):
            found = task.gradient(w, batch)
            return found | {head: jax.tree.map(jnp.zeros_like, found[head])}

        v = fjs.local_steps(shared, data, task, "sgd", hparams, context.round, gradient=gradient)
        return (
            personal,
            {k: jax.tree.map(jnp.subtract, v[k], shared[k]) for k in v if k != head},
            {},
        )

    def server(w, release, hparams, round_):
        return w | jax.tree.map(jnp.add, {name: w[name] for name in release}, release)

    def predict_with_data(shared, personal, data, hparams, client_id):
        def step(w, batch):
            found = task.gradient(w, batch)
            return jax.tree.map(lambda a, g: a - hparams.tuning_rate * g, w, found)

        return data.fold(step, shared)

    return fjs.Algorithm(
        lambda key, hparams: (task.init(key), ()),
        client,
        server,
        lambda w, personal, hparams, client_id: w,
        task,
        predict_with_data=predict_with_data,
    )
