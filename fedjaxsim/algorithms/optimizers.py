"""Local and server optimizers, named or from optax."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from fedjaxsim import checks
from fedjaxsim.algorithm import Curvature, LocalOptimizer, ServerOptimizer
from fedjaxsim.hyperparameters import Declarations, Default, Hyperparameter

PyTree = Any
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
    help="Weight of ½‖v‖² in the loss of every local step, as PyTorch's weight_decay.",
    per_client=True,
)
BETA_1, BETA_2, TAU = 0.9, 0.99, 1e-3
"""β₁, β₂ and τ of Reddi et al. (2021)."""
SecondMoment = Literal["adagrad", "adam", "yogi"]


class Moments(NamedTuple):
    """State of `adaptive`: m and v of Reddi et al. (2021), like the parameters."""

    first: PyTree
    second: PyTree


def adaptive(learning_rate: Any, second_moment: SecondMoment) -> optax.GradientTransformation:
    """Make the server optimizer of FedAdagrad, FedAdam or FedYogi (Reddi et al. 2021, Algorithm 2).

    With Δ the mean update, from m = 0 and v = τ², without a correction of their bias,

        m ← β₁ m + (1 − β₁) Δ,    x ← x + η m/(√v + τ)

        v ← v + Δ²                           (FedAdagrad, whose β₁ is 0)
        v ← β₂ v + (1 − β₂) Δ²               (FedAdam)
        v ← v − (1 − β₂) Δ² sign(v − Δ²)     (FedYogi)

    The optimizers of optax by these names start and correct their moments in other ways.
    """
    beta_1 = 0.0 if second_moment == "adagrad" else BETA_1

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Moments(zeros, jax.tree.map(lambda leaf: jnp.full_like(leaf, TAU**2), params))

    def next_second(v, g):
        square = jnp.square(g)
        if second_moment == "adagrad":
            return v + square
        if second_moment == "adam":
            return BETA_2 * v + (1 - BETA_2) * square
        return v - (1 - BETA_2) * square * jnp.sign(v - square)

    def update(updates, state, params=None):
        first = jax.tree.map(lambda m, g: beta_1 * m + (1 - beta_1) * g, state.first, updates)
        second = jax.tree.map(next_second, state.second, updates)

        def step(m, v):
            return (-learning_rate * m / (jnp.sqrt(v) + TAU)).astype(m.dtype)

        return jax.tree.map(step, first, second), Moments(first, second)

    return optax.GradientTransformation(init, update)


def fedadagrad(learning_rate: Any) -> optax.GradientTransformation:
    """Make FedAdagrad's server optimizer; see `adaptive`."""
    return adaptive(learning_rate, "adagrad")


def fedadam(learning_rate: Any) -> optax.GradientTransformation:
    """Make FedAdam's server optimizer; see `adaptive`."""
    return adaptive(learning_rate, "adam")


def fedyogi(learning_rate: Any) -> optax.GradientTransformation:
    """Make FedYogi's server optimizer; see `adaptive`."""
    return adaptive(learning_rate, "yogi")


_BY_NAME: dict[str, Optax] = {"sgd": optax.sgd, "momentum": optax.sgd, "adam": optax.adam}
_SERVER_BY_NAME = _BY_NAME | {"adagrad": fedadagrad, "yogi": fedyogi}
_TINY = 1e-30  # its root and the inverse of that are far from the ends of float32
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

    Example:
      >>> adam = fjs.fedavg(task, local_optimizer=fjs.optimizers.local(optax.adam))
      >>> [record.name for record in adam.hyperparameters]  # task as in `Simulation`
      ['learning_rate', 'server_learning_rate']
    """
    make, more = _found(optimizer, _BY_NAME, _LOCAL_RECORDS)

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
    rate 1 adds the release, and "adam" is `optax.adam`, which corrects the bias of its moments.
    "adagrad" and "yogi" are FedAdagrad and FedYogi as in their paper; see `adaptive`. "momentum"
    also reads `hparams.server_momentum`.
    """
    make, more = _found(optimizer, _SERVER_BY_NAME, _SERVER_RECORDS)

    def build(hparams):
        beta = {"momentum": hparams.server_momentum} if SERVER_MOMENTUM in more else {}
        return make(learning_rate=hparams.server_learning_rate, **beta)

    build.hyperparameters = (SERVER_LEARNING_RATE, *more)  # type: ignore[attr-defined]
    return build


def local_records(*, local_optimizer: LocalChoice = "sgd", **_: object) -> Declarations:
    """Return the hyperparameters that a local optimizer reads: η alone if it is your own."""
    return getattr(as_local(local_optimizer), "hyperparameters", (LEARNING_RATE,))


def server_records(*, server_optimizer: ServerChoice = "sgd", **_: object) -> Declarations:
    """Return the hyperparameters that a server optimizer reads: η alone if it is your own."""
    return getattr(as_server(server_optimizer), "hyperparameters", (SERVER_LEARNING_RATE,))


def as_local(optimizer: LocalChoice) -> LocalOptimizer:
    """Return the local optimizer of a name, and any other as it is."""
    _require_rate(optimizer, "local", "(hparams, round)")
    return optimizer if callable(optimizer) else local(optimizer)


def as_server(optimizer: ServerChoice) -> ServerOptimizer:
    """Return the server optimizer of a name, and any other as it is."""
    _require_rate(optimizer, "server", "(hparams)")
    return optimizer if callable(optimizer) else server(optimizer)


def _require_rate(optimizer: Any, kind: str, arguments: str) -> None:
    """Check that an optimizer is a name or made of hyperparameters, among them its rate."""
    if isinstance(optimizer, optax.GradientTransformation):
        got = "an optimizer of optax whose learning rate is fixed"
    elif "learning_rate" in _parameters(optimizer):
        got = f"optax's factory {optimizer.__name__}"
    elif callable(optimizer) or isinstance(optimizer, str):
        return
    else:
        got = repr(optimizer)
    raise ValueError(
        f"{kind}_optimizer must be a name, optimizers.{kind}(optax.adam), which reads its learning "
        f"rate from the hyperparameters, or a function {arguments} -> optimizer, got {got}"
    )


def _parameters(function: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters; none if it does not tell them."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def evaluated(params: PyTree, state: PyTree) -> PyTree:
    """Return the parameters to evaluate: a schedule-free optimizer's average x, else `params`.

    `optax.contrib.schedule_free` moves the y at which gradients are taken (Defazio et al. 2024).
    """

    def is_free(node):
        return isinstance(node, ScheduleFreeState)

    free = [node for node in jax.tree.leaves(state, is_leaf=is_free) if is_free(node)]
    return schedule_free_eval_params(free[0], params) if free else params


def curvature(optimizer: LocalChoice = "sgd", *penalties: str) -> Curvature | None:
    """Return the curvature that steps of SGD meet; None for other optimizers.

    `penalties` are names of the weights of quadratic penalties that the steps descend.
    """
    if not (optimizer == "sgd" or getattr(optimizer, "is_sgd", False)):
        return None
    return lambda bound, hparams: bound + sum(hparams.get(name) for name in penalties)


def small_update(curvature: float) -> float:
    """Return the norm of a small update: 0.1/√L.

    It changes no prediction of a bounded row by more than 0.1, if the loss has curvature 1 in the
    outputs: by a twentieth of the range of a target in [−1, 1]. The factor 0.1 was chosen on six
    public tables at ε = 1; larger norms were worse on five of them and no better on the sixth.
    """
    return 0.1 / math.sqrt(curvature)


def small_gradient(curvature: float) -> float:
    """Return the norm of the gradient with which a step of 1/L is a `small_update`: 0.1 √L."""
    return curvature * small_update(curvature)


def step_with(
    optimizer: optax.GradientTransformation, gradients: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """Return `optimizer.update(gradients, state, params)`, with derivatives where moments are 0.

    The root of a second moment has no derivative at 0, where a coordinate has never moved.
    Derivatives are therefore taken next to the state, with tiny numbers in place of its zeros:
    the limit from above.
    """

    def nudged(leaf):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return leaf
        return jnp.where(leaf == 0, jnp.asarray(_TINY, leaf.dtype), leaf)

    if not any(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(state)):
        return optimizer.update(gradients, state, params)
    # The learning rate in the optimizer's closure has a derivative, too.
    update, closed = jax.closure_convert(optimizer.update, gradients, state, params)

    @jax.custom_jvp
    def step(gradients, state, params, closed):
        return update(gradients, state, params, *closed)

    @step.defjvp
    def _(primals, tangents):
        gradients, state, params, closed = primals
        beside = gradients, jax.tree.map(nudged, state), params, closed
        _, change = jax.jvp(lambda g, s, p, c: update(g, s, p, *c), beside, tangents)
        return step(*primals), change

    return step(gradients, state, params, closed)


def _found(
    optimizer: Optax | str, by_name: dict[str, Optax], records: dict[str, Declarations]
) -> tuple[Optax, Declarations]:
    """Return the optax factory of a name, and what it reads besides a learning rate."""
    if not isinstance(optimizer, str):
        return optimizer, ()
    checks.one_of(by_name, optimizer=optimizer)
    return by_name[optimizer], records.get(optimizer, ())
