"""Algorithms that the package does not have, as a user's own file."""

import jax
import jax.numpy as jnp

import fedjaxsim as fjs


@fjs.reads(
    fjs.Hyperparameter("inner_learning_rate", 0.05, "step of θ", scale="log"),
    fjs.Hyperparameter("learning_rate", 0.1, "η, the step of w", scale="log"),
    fjs.Hyperparameter("lam", 1.0, "λ, the weight of the proximal term", scale="log"),
)
def pfedme(task: fjs.Task, *, inner_steps: int = 3) -> fjs.Algorithm:
    """pFedMe (Dinh, Tran, Nguyen; NeurIPS 2020): θ is the proximal point of a client's loss at w.

    Args:
      task: model and loss.
      inner_steps: steps towards θ on every minibatch.
    """

    def client(shared, personal, data, hparams, context):
        def step(carry, batch):
            w, theta = carry
            for _ in range(inner_steps):
                gradient = task.gradient(theta, batch)
                theta = jax.tree.map(
                    lambda t, g, a: t - hparams.inner_learning_rate * (g + hparams.lam * (t - a)),
                    theta,
                    gradient,
                    w,
                )
            pull = hparams.learning_rate * hparams.lam
            return jax.tree.map(lambda a, t: a - pull * (a - t), w, theta), theta

        w, theta = data.fold(step, (shared, personal))
        return theta, jax.tree.map(jnp.subtract, w, shared), {}

    def init(key, hparams):
        w = task.init(key)
        return w, w

    return fjs.Algorithm(
        init,
        client,
        lambda shared, release, hparams, round_: jax.tree.map(jnp.add, shared, release),
        lambda shared, personal, hparams, client_id: personal,
        task,
    )


def mixed(alpha, v, w):
    return jax.tree.map(lambda a, b: alpha * a + (1 - alpha) * b, v, w)


@fjs.reads(
    fjs.Hyperparameter("learning_rate", 0.1, scale="log"),
    fjs.Hyperparameter(
        "initial_mixing", 0.5, "α of every client at first", (0.0, 1.0), allowed="lie in [0, 1]"
    ),
    fjs.Hyperparameter("mixing_learning_rate", 0.1, "step of α", scale="log"),
)
def apfl(task: fjs.Task) -> fjs.Algorithm:
    """APFL (Deng, Kamani, Mahdavi; 2020): clients learn how much of w their model has."""

    def client(shared, personal, data, hparams, context):
        def moved(params, gradient):
            return jax.tree.map(lambda a, g: a - hparams.learning_rate * g, params, gradient)

        def step(carry, batch):
            w, v, alpha = carry
            at = task.gradient(mixed(alpha, v, w), batch)
            apart = jax.tree.map(lambda g, a, b: jnp.sum(g * (a - b)), at, v, w)
            slope = sum(jax.tree.leaves(apart))
            direction = jax.tree.map(lambda g: alpha * g, at)
            alpha = jnp.clip(alpha - hparams.mixing_learning_rate * slope, 0.0, 1.0)
            gradient = task.gradient(w, batch)
            return moved(w, gradient), moved(v, direction), alpha

        w, v, alpha = data.fold(step, (shared, personal["v"], personal["alpha"]))
        return {"v": v, "alpha": alpha}, jax.tree.map(jnp.subtract, w, shared), {}

    def init(key, hparams):
        w = task.init(key)
        return w, {"v": w, "alpha": hparams.initial_mixing}

    return fjs.Algorithm(
        init,
        client,
        lambda shared, release, hparams, round_: jax.tree.map(jnp.add, shared, release),
        lambda shared, own, hparams, client_id: mixed(own["alpha"], own["v"], shared),
        task,
    )


@fjs.reads(fjs.Hyperparameter("mu", 0.1))
def forgets(task):
    """FedAvg, which reads more than is declared here."""
    return fjs.fedavg(task)


@fjs.reads(fjs.Hyperparameter("rounds", 0.1))
def clashes(task):
    return fjs.fedavg(task)
