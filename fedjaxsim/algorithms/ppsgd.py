"""PP-SGD: personalized private SGD (Bietti, Wei, Dudík, Langford, Wu; ICML 2022)."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms.layers import Selection, merge, split
from fedjaxsim.algorithms.local_steps import no_pull
from fedjaxsim.algorithms.optimizers import COMMON_LEARNING_RATE, small_gradient
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
    help="Level of personalization: 0 is local only; the ratio of the global step to the local one "
    "(inf: global only), or the paper's α.",
)
_DIVISOR = (
    "M = Σ m_i, the divisor of the weighted objective, is taken as public; if the m_i are made of "
    "data, such as the clients' numbers of rows, the guarantee does not cover what M reveals."
)


class Iterate(NamedTuple):
    """Parameters that move from round to round: (W, w) at the server, θ_i at client i.

    `mean` is the mean over the first `rounds` rounds; both are None if no mean is asked for.
    """

    value: PyTree
    mean: PyTree = None
    rounds: jax.Array | None = None

    def mean_over(self, rounds: jax.Array) -> PyTree:
        """Return the mean of z_0 … z_{rounds−1}, and z_0 for no rounds.

        The value counts for every round since the last move: a client that is not drawn keeps θ_i.
        """
        assert self.rounds is not None
        new_rounds = (rounds - self.rounds).astype(float)
        share = new_rounds / jnp.maximum(rounds, 1)
        return jax.tree.map(
            lambda mean, value: mean + share.astype(mean.dtype) * (value - mean),
            self.mean,
            self.value,
        )

    def descend(self, rate: jax.Array, gradient: PyTree, round_: jax.Array) -> "Iterate":
        """Return z_{round+1} = z_round − rate · gradient."""
        value = jax.tree.map(lambda p, g: p - rate.astype(p.dtype) * g, self.value, gradient)
        if self.rounds is None:
            return Iterate(value)
        return Iterate(value, self.mean_over(round_ + 1), round_ + 1)


@reads(COMMON_LEARNING_RATE, PERSONALIZATION)
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
    θ_i belongs to the output layer; the layers before it are shared and sent with w.

    Step sizes, of η = `hparams.learning_rate` and the level a or α = `hparams.personalization`:

        "grid":   η_w = η min(a, 1),  η_θ = η / max(a, 1): their ratio is a; a = ∞ is global only
        "paper":  η_w = αη,           η_θ = η / qN: their ratio is a = α·qN; α is finite

    with q the sampling rate. At level 0 clients learn alone. Both rules describe the same runs.

    Privacy: only g_w,i goes through the mechanism. θ_i moves by the unclipped gradient and is its
    client's own, so the joint-DP report holds at any level. At level 0 it is far from tight: every
    release is charged, though none reaches a client. For a linear model `local(task)` with
    `no_release()` computes the same θ_i at ε = 0. Theorems 4.1 and 5.1 are about replacing a
    client's data; the authors' accountant is for add or remove, the smaller number.

    The paper's text, the authors' code (github.com/albietz/ppsgd) and this function differ:

    * Noise: σC on the *average* of clipped gradients; zC on their sum in the code and here, so that
      σ = z/(qN). The σ of the figures are values of z.
    * Cohort: Bernoulli(q), in section 6 a fixed Q; in the code a fixed size, charged as if it were
      Poisson; here Poisson, divided by qN.
    * Excess risk of the synthetic problem: the mean of ‖w + θ_i − θ_i*‖²_Σ, here too, which is
      twice the excess of ½(·)²; divided by d = 100 in the code.
    * Client offsets of that problem: N(0, 0.01²); in the code N(0, 0.1²), here `offset_scale=0.1`
      (`experiments/ppsgd` has both).
    * One-versus-all: squared loss; in the code and here ½ Σ over outputs, of one-hot labels − 0.1.
    * CNN: the code's loss is a mean over outputs without ½, and here ½ Σ, so its C = 0.1 is 0.5
      for 10 outputs. The code multiplies η_θ by the cohort's size (its `alpha` is a·Q) and starts
      with a random w; here neither, and w starts at 0.

    Theorem 5.2 needs a larger smoothness constant. Its L_{m,α} has m_max/M, but the proof (B.5)
    arrives at L·max(α + α m_max/(qM), m_max/(qM)), because a client that is drawn with probability
    q moves 1/q times as far. With q = 1 they agree. Theorem B.4 needs 1/(qN) for 1/N in the same
    way. `test_ppsgd_theory.py` tests Lemma 4.6 and Theorems 4.5 and 5.2 with the proof's constant.

    Args:
      parametrization: Rule that turns the level into two step sizes; "grid" is used in the paper's
        experiments.
      objective: Risk to minimize: the mean of the clients' risks, or weighted by `sizes`.
      sizes: m_i ≥ 1 of the weighted risk, one for all clients or (m,): client i uses the first m_i
        examples of its minibatch, or all if it has fewer. Public and fixed before the run, since M
        divides the releases; a guarantee names it among its assumptions.
      personal: Parameters that are w + θ_i and start at 0: a top-level name, a predicate on
        paths such as "Dense_1/kernel", or None for the output layer of the task's model, or for all
        parameters of a model that names none, such as a linear one.
      averaged: Whether clients predict with the averaged iterate z̄_T = (1/T) Σ_{t<T} z_t of the
        theorems, which keeps a second copy of w, W and θ_i; or with the last one.

    Raises:
      ValueError: if sizes are not whole numbers of at least 1, or do not suit the minibatches; when
        first traced, if there is not one minibatch per round (or one epoch, as one minibatch).

    Example:
      >>> algorithm = fjs.ppsgd(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'personalization']
    """
    checks.one_of(get_args(Parametrization), parametrization=parametrization)
    checks.one_of(get_args(Risk), objective=objective)
    m_i = _whole_numbers(objective, sizes)
    # M/N, the mean weight of gradients.
    mean_size = 1.0 if m_i is None else float(m_i.mean())
    selection = task.output_layer if personal is None else personal

    def first(value):
        return Iterate(value, value, jnp.zeros((), jnp.int32)) if averaged else Iterate(value)

    def add(w, theta):
        head, trunk = split(w, selection)
        return merge(jax.tree.map(jnp.add, head, theta), trunk)

    def init(key, hparams):
        head, trunk = split(task.init(key), selection)
        zero = jax.tree.map(jnp.zeros_like, head)
        return first(merge(zero, trunk)), first(zero)

    def start(key, hparams, published, own_model):
        theta = jax.tree.map(
            jnp.subtract, split(own_model, selection)[0], split(published, selection)[0]
        )
        return first(published), first(theta)

    def client(shared, personal, data, hparams, context):
        _check_minibatches(m_i, data.minibatches, context.num_clients)
        params = add(shared.value, personal.value)
        g_w = _gradient(task, params, data, m_i, context.client_id)
        g_theta, _ = split(g_w, selection)
        cohort = jnp.multiply(context.sampling_rate, context.num_clients)
        _, rate = _rates(parametrization, hparams, cohort)
        return personal.descend(rate / mean_size, g_theta, context.round), g_w, {}

    def server(shared, release, hparams, round_):
        rate, _ = _rates(parametrization, hparams, cohort=1.0)
        return shared.descend(rate / mean_size, release, round_)

    def predict(shared, personal, hparams, client_id):
        if not averaged:
            return add(shared.value, personal.value)
        return add(shared.mean_over(shared.rounds), personal.mean_over(shared.rounds))

    def curvature(bound, hparams):
        # w and θ_i move by one gradient: w + θ_i by η times the sum of both factors.
        level = hparams.personalization
        if parametrization == "paper":
            return bound * (1 + level)
        return bound * (jnp.minimum(level, 1) + 1 / jnp.maximum(level, 1))

    def check(hparams):
        level = on_host(hparams.personalization)
        if parametrization == "paper" and level is not None and not np.all(np.isfinite(level)):
            raise ValueError(
                "personalization must be finite in the paper's parametrization (use 'grid' for "
                f"global learning only), got {level}"
            )

    return Algorithm(
        init,
        client,
        server,
        predict,
        task,
        check=check,
        public=() if m_i is None or m_i.ndim == 0 else (_DIVISOR,),
        warm_start=WarmStart(start, lambda shared: shared.value),
        curvature=curvature,
        typical_message=small_gradient,
        personal_pull=no_pull,
    )


def _whole_numbers(objective: Risk, sizes: ArrayLike | None) -> np.ndarray | None:
    """Return the m_i, () or (m,) int32; None for the average risk."""
    if (objective == "weighted") != (sizes is not None):
        raise ValueError(
            "objective must be 'average', or 'weighted' with sizes m_i, got "
            f"{objective!r} with sizes {sizes}"
        )
    if sizes is None:
        return None
    array = np.asarray(sizes)
    if array.ndim > 1 or array.size == 0 or array.dtype.kind not in "iu" or array.min() < 1:
        raise ValueError(f"sizes must be whole numbers of at least 1, () or (m,), got {sizes!r}")
    return array.astype(np.int32)


def _check_minibatches(
    sizes: np.ndarray | None, minibatches: Minibatches, num_clients: int
) -> None:
    """Raise ValueError unless a round has one minibatch, of at least m_i examples."""
    if (minibatches.steps or minibatches.epochs) != 1:
        raise ValueError(
            "PP-SGD takes one minibatch a round (Algorithm 2): steps=1, or epochs=1 for all of a "
            f"client's rows, got {minibatches}"
        )
    if sizes is None:
        return
    if sizes.shape not in ((), (num_clients,)):
        raise ValueError(
            f"sizes must be one number, or one for each of the {num_clients} clients, got shape "
            f"{sizes.shape}"
        )
    if minibatches.steps is not None and sizes.max() > minibatches.size:
        raise ValueError(
            f"sizes must be at most {minibatches.size}: a client takes the first m_i examples of "
            f"a batch, got sizes up to {sizes.max()}"
        )


def _rates(
    parametrization: Parametrization, hparams: Hyperparameters, cohort: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Return η_w and η_θ of the average objective; `cohort` is qN."""
    eta, level = hparams.learning_rate, hparams.personalization
    if parametrization == "paper":
        return jnp.multiply(eta, level), jnp.divide(eta, cohort)
    # max(a, 1), because the derivative of min(1/a, 1) is unusable at a = 0.
    return jnp.multiply(eta, jnp.minimum(level, 1.0)), jnp.divide(eta, jnp.maximum(level, 1.0))


def _gradient(
    task: Task, params: PyTree, data: ClientData, sizes: np.ndarray | None, client_id: jax.Array
) -> PyTree:
    """Return the minibatch's gradient, a sum over m_i examples or a mean.

    The batches of an epoch are one minibatch, as the parameters do not change between them.
    """
    size = None if sizes is None else jnp.asarray(sizes)
    if size is not None and size.ndim:
        size = size[client_id]

    def add(carry, batch):
        gradient, count = carry
        if size is not None:
            position = count + jnp.arange(batch.weight.shape[0])
            batch = batch._replace(weight=jnp.where(position < size, batch.weight, 0))
        more = task.gradient(params, batch)
        gradient = jax.tree.map(lambda s, g: s + batch.examples.astype(g.dtype) * g, gradient, more)
        return gradient, count + batch.examples

    zero = jax.tree.map(jnp.zeros_like, params)
    gradient, count = data.fold(add, (zero, jnp.zeros(())))
    if sizes is None:
        count = jnp.maximum(count, 1.0)
        gradient = jax.tree.map(lambda g: g / count.astype(g.dtype), gradient)
    return gradient
