"""Local and server optimizers, by name or from optax."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

import optax

from fedjaxsim import checks
from fedjaxsim.algorithm import Curvature, LocalOptimizer, ServerOptimizer
from fedjaxsim.hyperparameters import Default, Hyperparameter, Records

Optax = Callable[..., optax.GradientTransformation]
LocalName = Literal["sgd", "momentum", "adam"]
ServerName = Literal["sgd", "momentum", "adam", "adagrad", "yogi"]
LocalChoice = Annotated[
    LocalOptimizer | LocalName, "Optimizer of the clients, a name or from `optimizers.local`."
]
ServerChoice = Annotated[
    ServerOptimizer | ServerName,
    "Optimizer of the server, applied to the released mean message; a name or from "
    "`optimizers.server`.",
]

LEARNING_RATE = Hyperparameter(
    "learning_rate",
    default=Default.STEP,
    scale="log",
    help="η, the local learning rate; a schedule over rounds multiplies it.",
    per_client=True,
)
COMMON_LEARNING_RATE = dataclasses.replace(LEARNING_RATE, per_client=False)
"""η of clients whose server reads it, too."""
SERVER_LEARNING_RATE = Hyperparameter(
    "server_learning_rate",
    default=1.0,
    scale="log",
    help="Server's step along the released mean update; 1 with sgd adds the update as it is.",
)
PERSONAL_LEARNING_RATE = dataclasses.replace(
    LEARNING_RATE,
    name="personal_learning_rate",
    help="η of the personal optimizer; a schedule over rounds multiplies it.",
)
MOMENTUM = Hyperparameter(
    "momentum",
    default=0.9,
    range=(0.0, 1.0),
    allowed="lie in [0, 1]",
    help="β, the momentum of the clients' optimizer; 0 is plain sgd.",
    per_client=True,
)
SERVER_MOMENTUM = dataclasses.replace(
    MOMENTUM,
    name="server_momentum",
    per_client=False,
    help="β, the momentum of the server's optimizer.",
)
WEIGHT_DECAY = Hyperparameter(
    "weight_decay",
    default=0.0,
    help="Weight of ½‖v‖² beside the loss of every local step, as PyTorch's weight_decay.",
    per_client=True,
)
_BY_NAME: dict[str, Optax] = {
    "sgd": optax.sgd,
    "momentum": optax.sgd,
    "adam": optax.adam,
    "adagrad": optax.adagrad,
    "yogi": optax.yogi,
}
# Plain sgd has no decay: it would fill the factored updates of `kernels.linear_steps`.
_LOCAL_RECORDS = {"momentum": (MOMENTUM, WEIGHT_DECAY), "adam": (WEIGHT_DECAY,)}
_SERVER_RECORDS = {"momentum": (SERVER_MOMENTUM,)}


def local(
    optimizer: Optax | LocalName = "sgd",
    schedule: optax.Schedule | None = None,
    rate: Hyperparameter = LEARNING_RATE,
) -> LocalOptimizer:
    """Make a local optimizer with learning rate `hparams.learning_rate · schedule(round)`.

    Args:
      optimizer: a name, or any optax factory that takes `learning_rate`, e.g. `optax.adam`.
        "momentum" also reads `hparams.momentum`, and it and "adam" `hparams.weight_decay`.
      schedule: an optax schedule over *rounds*, used as a factor: `optax.cosine_decay_schedule(
        1.0, rounds)` decays η from `hparams.learning_rate` to 0. None keeps η constant.
      rate: the hyperparameter that is η.
    """
    make, more = _found(optimizer, _LOCAL_RECORDS)

    def build(hparams, round_):
        factor = 1.0 if schedule is None else schedule(round_)
        beta = {"momentum": hparams.momentum} if MOMENTUM in more else {}
        made = make(learning_rate=getattr(hparams, rate.name) * factor, **beta)
        if WEIGHT_DECAY not in more:
            return made
        return optax.chain(optax.add_decayed_weights(hparams.weight_decay), made)

    build.hyperparameters = (rate, *more)  # type: ignore[attr-defined]
    build.is_sgd = optimizer == "sgd"  # type: ignore[attr-defined]
    return build


def server(optimizer: Optax | ServerName = "sgd") -> ServerOptimizer:
    """Make a server optimizer of rate `hparams.server_learning_rate`: a name, or an optax factory.

    The server treats minus the released mean update as a gradient (Reddi et al. 2021): SGD with
    rate 1 adds the release, and `optax.adam` gives FedAdam. "momentum" also reads
    `hparams.server_momentum`.
    """
    make, more = _found(optimizer, _SERVER_RECORDS)

    def build(hparams):
        beta = {"momentum": hparams.server_momentum} if SERVER_MOMENTUM in more else {}
        return make(learning_rate=hparams.server_learning_rate, **beta)

    build.hyperparameters = (SERVER_LEARNING_RATE, *more)  # type: ignore[attr-defined]
    return build


def local_records(*, local_optimizer: LocalChoice = "sgd", **_: object) -> Records:
    """Return the hyperparameters that a local optimizer reads; η alone of one's own."""
    return getattr(as_local(local_optimizer), "hyperparameters", (LEARNING_RATE,))


def server_records(*, server_optimizer: ServerChoice = "sgd", **_: object) -> Records:
    """Return the hyperparameters that a server optimizer reads; its η alone of one's own."""
    return getattr(as_server(server_optimizer), "hyperparameters", (SERVER_LEARNING_RATE,))


def as_local(optimizer: LocalChoice) -> LocalOptimizer:
    """Return the local optimizer of a name, and any other as it is."""
    return optimizer if callable(optimizer) else local(optimizer)


def as_server(optimizer: ServerChoice) -> ServerOptimizer:
    """Return the server optimizer of a name, and any other as it is."""
    return optimizer if callable(optimizer) else server(optimizer)


def curvature(optimizer: LocalChoice = "sgd", *penalties: str) -> Curvature | None:
    """Return the curvature that steps of SGD meet; None for other optimizers.

    `penalties` are names of the weights of quadratic penalties that the steps descend.
    """
    if not (optimizer == "sgd" or getattr(optimizer, "is_sgd", False)):
        return None
    return lambda bound, hparams: bound + sum(hparams.get(name) for name in penalties)


def _found(optimizer: Optax | str, records: dict[str, Records]) -> tuple[Optax, Records]:
    """Return the optax factory of a name, and what it reads besides a learning rate."""
    if not isinstance(optimizer, str):
        return optimizer, ()
    checks.one_of(_BY_NAME, optimizer=optimizer)
    return _BY_NAME[optimizer], records.get(optimizer, ())
