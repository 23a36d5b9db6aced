"""Local and server optimizers, by name or from optax."""

import functools
from collections.abc import Callable
from typing import Literal

import optax

from fedjaxsim.algorithm import LocalOptimizer, ServerOptimizer
from fedjaxsim.hyperparameters import Hyperparameter

Optax = Callable[..., optax.GradientTransformation]
LocalName = Literal["sgd", "momentum", "adam"]
ServerName = Literal["sgd", "momentum", "adam", "adagrad", "yogi"]
LocalChoice = LocalOptimizer | LocalName
ServerChoice = ServerOptimizer | ServerName

LEARNING_RATE = Hyperparameter(
    "learning_rate",
    default=0.1,
    scale="log",
    symbol="η",
    label="learning rate",
    help="η, the local learning rate; a schedule over rounds multiplies it.",
)
SERVER_LEARNING_RATE = Hyperparameter(
    "server_learning_rate",
    default=1.0,
    scale="log",
    symbol="server η",
    help="Server's step along the released mean update; 1 with sgd adds the update as it is.",
)
_BY_NAME: dict[str, Optax] = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
    "adagrad": optax.adagrad,
    "yogi": optax.yogi,
}


def local(
    optimizer: Optax | LocalName = "sgd", schedule: optax.Schedule | None = None
) -> LocalOptimizer:
    """Make a local optimizer with learning rate `hparams.learning_rate · schedule(round)`.

    Args:
      optimizer: a name, or any optax factory that takes `learning_rate`, e.g. `optax.adam`.
      schedule: an optax schedule over *rounds*, used as a factor: `optax.cosine_decay_schedule(
        1.0, rounds)` decays η from `hparams.learning_rate` to 0. None keeps η constant.

    Raises:
      ValueError: if the name is unknown.
    """
    make = _find(optimizer)

    def build(hparams, round_):
        factor = 1.0 if schedule is None else schedule(round_)
        return make(learning_rate=hparams.learning_rate * factor)

    return build


def server(optimizer: Optax | ServerName = "sgd") -> ServerOptimizer:
    """Make a server optimizer with learning rate `hparams.server_learning_rate`.

    The server treats minus the released mean update as a gradient (Reddi et al. 2021): SGD with
    rate 1 adds the release, and `optax.adam` gives FedAdam.

    Args:
      optimizer: a name, or any optax factory that takes `learning_rate`.

    Raises:
      ValueError: if the name is unknown.
    """
    make = _find(optimizer)
    return lambda hparams: make(learning_rate=hparams.server_learning_rate)


def as_local(optimizer: LocalChoice) -> LocalOptimizer:
    """Return the local optimizer of a name, and any other as it is."""
    return optimizer if callable(optimizer) else local(optimizer)


def as_server(optimizer: ServerChoice) -> ServerOptimizer:
    """Return the server optimizer of a name, and any other as it is."""
    return optimizer if callable(optimizer) else server(optimizer)


def _find(optimizer: Optax | str) -> Optax:
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer not in _BY_NAME:
        raise ValueError(f"optimizer must be one of {', '.join(_BY_NAME)}, got {optimizer!r}")
    return _BY_NAME[optimizer]
