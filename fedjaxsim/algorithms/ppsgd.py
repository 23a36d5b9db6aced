"""PP-SGD: personalized private SGD (Bietti, Wei, Dudík, Langford, Wu; ICML 2022)."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjaxsim.algorithm import Algorithm, Context, WarmStart
from fedjaxsim.algorithms.layers import Selection, merge, split
from fedjaxsim.algorithms.optimizers import LEARNING_RATE
from fedjaxsim.algorithms.shared_model import require_choice
from fedjaxsim.data.minibatches import ClientData, Minibatches
from fedjaxsim.hyperparameters import (
    LARGEST_FLOAT32,
    Hyperparameter,
    Hyperparameters,
    on_host,
    reads,
)
from fedjaxsim.tasks.task import Task

PyTree = Any
Parametrization = Literal["grid", "paper"]
Risk = Literal["average", "weighted"]
PERSONALIZATION = Hyperparameter(
    "personalization",
    default=1.0,
    range=(0.0, LARGEST_FLOAT32),
    also=(float("inf"),),
    allowed="be at least 0 (inf: global only)",
    scale="log",
    label="level of personalization",
    meanings={0.0: "local", float("inf"): "global"},
    help="Level of personalization: 0 is local only; the ratio of the global step to the local one "
    "(inf: global only), or the paper's α.",
)
_DIVISOR = (
    "M = Σ m_i, the divisor of the weighted objective, is taken as public; if the m_i are made of "
    "data, such as the clients' numbers of rows, the guarantee does not cover what M reveals."
)


# --- the objective --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """The risk that is minimized; made by `average` or `weighted`.

    Attributes:
      sizes: m_i of the weighted risk, () or (m,) integers; None for the average risk.
    """

    sizes: np.ndarray | None = None

    @property
    def public(self) -> tuple[str, ...]:
        """Sentences on public numbers that may be made of data; see `Algorithm`."""
        return () if self.sizes is None or self.sizes.ndim == 0 else (_DIVISOR,)

    @property
    def mean_size(self) -> float:
        """M/N, the mean weight of gradients: 1 for the average risk."""
        return 1.0 if self.sizes is None else float(self.sizes.mean())

    def check(self, minibatches: Minibatches, num_clients: int) -> None:
        """Raise ValueError unless there is one size, or one per client, of at most b."""
        if self.sizes is None:
            return
        if self.sizes.shape not in ((), (num_clients,)):
            raise ValueError(
                f"weighted needs one size, or one for each of the {num_clients} clients, "
                f"got shape {self.sizes.shape}"
            )
        if minibatches.steps is not None and self.sizes.max() > minibatches.size:
            raise ValueError(
                f"weighted takes the first m_i examples of a batch of {minibatches.size}, "
                f"got sizes up to {self.sizes.max()}"
            )


def average() -> Objective:
    """Return the mean of the clients' risks, (1/N) Σ_i f_i, with minibatch means (§5, B.6)."""
    return Objective()


def weighted(sizes: ArrayLike) -> Objective:
    """Return Σ_i (m_i/M) f_i with M = Σ_i m_i: gradients are sums over m_i examples (§5, eq. 11).

    The clip norm then bounds sums.

    Args:
      sizes: m_i ≥ 1, one for all clients or (m,): client i uses the first m_i examples of its
        minibatch, or all if it has fewer. Public and fixed before the run, since M is the server's
        divisor; a guarantee names it among its assumptions.

    Raises:
      ValueError: if a size is not a whole number of at least 1.
    """
    array = np.asarray(sizes)
    if array.ndim > 1 or array.size == 0 or array.dtype.kind not in "iu" or array.min() < 1:
        raise ValueError(f"sizes must be whole numbers of at least 1, () or (m,), got {sizes!r}")
    return Objective(array.astype(np.int32))


def noise_multiplier_from_paper(
    sigma: float, sampling_rate: float, num_clients: int, objective: Objective | None = None
) -> float:
    """Convert the σ of the paper to the z of this package.

    The paper adds noise of standard deviation σ_ζ = σC to the *average* of the clipped gradients,
    their sum divided by qN, or by qM in the weighted objective; z is the noise of the sum, so
    z = σ·qN or σ·qM. The noise multiplier of the authors' code is z already.

    Args:
      sigma: σ ≥ 0.
      sampling_rate: q in (0, 1].
      num_clients: N.
      objective: by default `average()`.
    """
    objective = average() if objective is None else objective
    return sigma * sampling_rate * num_clients * objective.mean_size


# --- step sizes -----------------------------------------------------------------------------------


class _StepSizes(NamedTuple):
    shared: Callable[[Hyperparameters], jax.Array]
    personal: Callable[[Hyperparameters, Context], jax.Array]


_GRID = _StepSizes(
    lambda hparams: jnp.multiply(hparams.learning_rate, jnp.minimum(hparams.personalization, 1.0)),
    # max(a, 1), because the derivative of min(1/a, 1) is unusable at a = 0.
    lambda hparams, context: jnp.divide(
        hparams.learning_rate, jnp.maximum(hparams.personalization, 1.0)
    ),
)
_PAPER = _StepSizes(
    lambda hparams: jnp.multiply(hparams.learning_rate, hparams.personalization),
    lambda hparams, context: jnp.divide(
        hparams.learning_rate, jnp.multiply(context.sampling_rate, context.num_clients)
    ),
)
_STEP_SIZES = {"grid": _GRID, "paper": _PAPER}


# --- iterates and their averages ------------------------------------------------------------------


class Average(NamedTuple):
    """The mean of the first iterates of a run.

    Attributes:
      mean: pytree, the mean of the iterates of the first `rounds` rounds.
      rounds: number of those rounds, () int32.
    """

    mean: PyTree
    rounds: jax.Array


class Iterate(NamedTuple):
    """Parameters that move from round to round: (W, w) at the server, θ_i at client i.

    Attributes:
      value: pytree, the parameters.
      average: the average of all values so far, if asked for; else None.
    """

    value: PyTree
    average: Average | None


def _first(value: PyTree, averaged: bool) -> Iterate:
    return Iterate(value, Average(value, jnp.zeros((), jnp.int32)) if averaged else None)


def _average_at(iterate: Iterate, rounds: jax.Array) -> PyTree:
    """Return the mean of z_0 … z_{rounds−1}, and z_0 for no rounds.

    The value counts for every round since the last move: a client that is not drawn keeps its θ_i.
    """
    assert iterate.average is not None
    new = (rounds - iterate.average.rounds).astype(float)
    share = new / jnp.maximum(rounds, 1)
    return jax.tree.map(
        lambda mean, value: mean + share.astype(mean.dtype) * (value - mean),
        iterate.average.mean,
        iterate.value,
    )


def _move(iterate: Iterate, value: PyTree, round_: jax.Array) -> Iterate:
    """Move to z_{round+1}."""
    if iterate.average is None:
        return Iterate(value, None)
    return Iterate(value, Average(_average_at(iterate, round_ + 1), round_ + 1))


# --- the algorithm --------------------------------------------------------------------------------


@reads(LEARNING_RATE, PERSONALIZATION)
def ppsgd(
    task: Task,
    *,
    parametrization: Parametrization = "grid",
    objective: Risk = "average",
    sizes: ArrayLike | None = None,
    personal: Selection = None,
    averaged: bool = False,
) -> Algorithm:
    """PP-SGD: client i predicts with w + θ_i, w public and noised, θ_i private (Algorithm 2).

    Client i of the cohort draws one minibatch (line 6), computes (line 7)

        g_w,i = ∇_w f_i(w + θ_i),    g_θ,i = ∇_θ f_i(w + θ_i)

    as sums or, for the average objective, means over the minibatch; g_θ,i is the part of g_w,i on
    the coordinates of θ_i. It updates (line 8)

        θ_i ← θ_i − η_θ g_θ,i

    and sends g_w,i (line 10), which the mechanism clips at C (line 9). The server updates

        w ← w − η_w (Σ_i clip(g_w,i) + N(0, (zC)² I)) / qN          (lines 12 and 13)

    where the weighted objective has qM in place of qN and also divides line 8 by M/N. In a network
    θ_i belongs to the output layer, and the layers W before it are shared: they are sent with w, in
    one message with one clip. At first θ_i = 0, w = 0, and W is random (line 2).

    Step sizes, of η = `hparams.learning_rate` and the level a or α = `hparams.personalization`:

        "grid":   η_w = η min(a, 1),  η_θ = η / max(a, 1): their ratio is a; a = ∞ is global only
        "paper":  η_w = αη,           η_θ = η / qN: their ratio is a = α·qN; α is finite

    with q the sampling rate. At level 0 clients learn alone: w and W do not change.

    Args:
      task: model and loss.
      parametrization: Rule that turns the level into two step sizes; "grid" is used in the paper's
        experiments.
      objective: Risk to minimize: the mean of the clients' risks, or weighted by `sizes`.
      sizes: m_i of the weighted risk, see `weighted`.
      personal: Parameters that are w + θ_i and start at 0: a top-level name, a predicate on
        paths such as "Dense_1/kernel", or None for the output layer of the task's model, or for all
        parameters of a model that names none, such as a linear one.
      averaged: Whether clients predict with the averaged iterate z̄_T = (1/T) Σ_{t<T} z_t of the
        theorems, which keeps a second copy of w, W and θ_i; or with the last one.

    Raises:
      ValueError: if the parametrization is unknown; before a run, if the level is infinite in the
        paper's one; when the algorithm is first traced, if there is not one minibatch per round
        (one epoch counts as one minibatch of all rows), or sizes do not suit the minibatches.
    """
    require_choice(parametrization, Parametrization, "parametrization")
    step_sizes = _STEP_SIZES[parametrization]
    if objective not in get_args(Risk) or (objective == "weighted") != (sizes is not None):
        raise ValueError(
            "objective must be 'average', or 'weighted' with sizes m_i, got "
            f"{objective!r} with sizes {sizes}"
        )
    risk = average() if sizes is None else weighted(sizes)
    selection = task.output_layer if personal is None else personal

    def add(w, theta):
        head, trunk = split(w, selection)
        return merge(jax.tree.map(jnp.add, head, theta), trunk)

    def init(key, hparams):
        del hparams
        head, trunk = split(task.init(key), selection)
        zero = jax.tree.map(jnp.zeros_like, head)
        return _first(merge(zero, trunk), averaged), _first(zero, averaged)

    def start(hparams, published, own):
        del hparams
        theta = jax.tree.map(jnp.subtract, split(own, selection)[0], split(published, selection)[0])
        return _first(published, averaged), _first(theta, averaged)

    def client(shared, personal, data, hparams, context):
        _require_one_minibatch(data.minibatches)
        risk.check(data.minibatches, context.num_clients)
        params = add(shared.value, personal.value)
        gradient, loss = _gradient(task, params, data, risk, context.client_id)
        own, _ = split(gradient, selection)
        rate = step_sizes.personal(hparams, context) / risk.mean_size
        theta = _descend(personal.value, rate, own)
        return _move(personal, theta, context.round), gradient, {"loss": loss}

    def server(shared, release, hparams, round_):
        rate = step_sizes.shared(hparams) / risk.mean_size
        return _move(shared, _descend(shared.value, rate, release), round_)

    def predict(shared, personal, hparams, client_id):
        del hparams, client_id
        if shared.average is None:
            return add(shared.value, personal.value)
        rounds = shared.average.rounds
        return add(_average_at(shared, rounds), _average_at(personal, rounds))

    check = _require_finite if parametrization == "paper" else lambda hparams: None
    return Algorithm(
        init,
        client,
        server,
        predict,
        task,
        check=check,
        public=risk.public,
        warm_start=WarmStart(start, lambda shared: shared.value),
    )


def _descend(params: PyTree, rate: jax.Array, gradient: PyTree) -> PyTree:
    return jax.tree.map(lambda p, g: p - rate.astype(p.dtype) * g, params, gradient)


def _gradient(
    task: Task, params: PyTree, data: ClientData, objective: Objective, client_id: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Return the minibatch's gradient, a sum or mean by objective, and its mean loss, ().

    The batches of an epoch are one minibatch, as the parameters do not change between them.
    """
    size = None
    if objective.sizes is not None:
        sizes = jnp.asarray(objective.sizes)
        size = sizes if sizes.ndim == 0 else sizes[client_id]

    def add(carry, batch):
        gradient, total, count = carry
        if size is not None:
            position = count + jnp.arange(batch.weight.shape[0])
            batch = batch._replace(weight=jnp.where(position < size, batch.weight, 0))
        examples = jnp.sum(batch.weight)
        value, more = jax.value_and_grad(lambda w: examples * task.loss(w, batch))(params)
        gradient = jax.tree.map(jnp.add, gradient, more)
        return gradient, total + value, count + examples

    zero = jax.tree.map(jnp.zeros_like, params)
    gradient, total, count = data.fold(add, (zero, jnp.zeros(()), jnp.zeros(())))
    examples = jnp.maximum(count, 1.0)
    if objective.sizes is None:
        gradient = jax.tree.map(lambda g: g / examples.astype(g.dtype), gradient)
    return gradient, total / examples


def _require_one_minibatch(minibatches: Minibatches) -> None:
    if (minibatches.steps or minibatches.epochs) != 1:
        raise ValueError(
            "PP-SGD takes one minibatch a round (Algorithm 2): steps=1, or epochs=1 for all of a "
            f"client's rows, got {minibatches}"
        )


def _require_finite(hparams: Hyperparameters) -> None:
    level = on_host(hparams.personalization)
    if level is not None and not np.all(np.isfinite(level)):
        raise ValueError(
            "personalization must be finite in the paper's parametrization (use 'grid' for global "
            f"learning only), got {level}"
        )
