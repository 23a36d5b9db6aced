"""Factories that turn optax optimizers into the local and server optimizers of an algorithm."""

from collections.abc import Callable

import optax

from fedjaxsim.algorithm import LocalOptimizer, ServerOptimizer


def local(
    optimizer: Callable[..., optax.GradientTransformation] = optax.sgd,
    schedule: optax.Schedule | None = None,
) -> LocalOptimizer:
    """A local optimizer whose learning rate is `hparams.learning_rate · schedule(round)`.

    Args:
      optimizer: any optax factory that takes `learning_rate`, e.g. `optax.adam`.
      schedule: an optax schedule over *rounds*, used as a factor: `optax.cosine_decay_schedule(
        1.0, rounds)` decays η from `hparams.learning_rate` to 0. None keeps η constant.
    """

    def build(hparams, round_):
        factor = 1.0 if schedule is None else schedule(round_)
        return optimizer(learning_rate=hparams.learning_rate * factor)

    return build


def server(
    optimizer: Callable[..., optax.GradientTransformation] = optax.sgd,
) -> ServerOptimizer:
    """A server optimizer with learning rate `hparams.server_learning_rate`.

    The server treats minus the released mean update as a gradient (Reddi et al. 2021), so that
    plain SGD with rate 1 adds the release, and `optax.adam` gives FedAdam.
    """
    return lambda hparams: optimizer(learning_rate=hparams.server_learning_rate)
