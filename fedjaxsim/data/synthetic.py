"""Synthetic problems with known true parameters, and random rows for measurements.

Seeds are non-negative integers.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.data.population import Population
from fedjaxsim.kernels import backend, threefry

_PERSONAL_FEATURES = 5
_BLOCKS = 5
_USED_FEATURES = 4
_SINE = np.array(
    [1.5707963, -0.64596409, 0.079692626, -0.0046817541, 0.00016044118, -3.5988432e-06], np.float32
)
"""sin(πv/2) = v (c₀ + c₁v² + … + c₅v¹⁰) for |v| ≤ 1, with an error below 3·10⁻⁷ in float32."""


def feature_variances(num_features: int) -> np.ndarray:
    """Return the diagonal of Σ = diag(1, 1/2, …, 1/d), (d,) float64."""
    return 1 / np.arange(1, num_features + 1)


def synthetic_regression(
    num_clients: int = 1000,
    num_features: int = 100,
    num_rows: int = 20,
    *,
    offset_scale: float = 0.1,
    label_noise: float = 0.01,
    seed: int = 0,
) -> tuple[Population, np.ndarray]:
    """Draw linear regressions that differ between clients in their last five coefficients.

    The problem of PP-SGD, section 6: θ₀ ~ N(0, 10² I) is shared; client i has θ_i* = θ₀ plus, on
    its last five coordinates, N(0, s²); x ~ N(0, Σ) with Σ = diag(1, 1/2, …, 1/d) and
    y = ⟨x, θ_i*⟩ + N(0, τ²). A model θ has the excess loss ½ ‖θ − θ_i*‖²_Σ at client i.

    Args:
      num_clients: Number m of clients.
      num_features: Number d of features, at least 5.
      num_rows: n, rows of each client.
      offset_scale: s; 0.1 as in the authors' code, 0.01 in the paper's text.
      label_noise: τ, the standard deviation of labels.

    Returns:
      The population, x (m·n, d) and y (m·n,) float32, and θ* of each client, (m, d) float64.
    """
    theta, rng = _true_parameters(
        num_clients, num_features, num_rows, offset_scale, label_noise, seed
    )
    deviations = np.sqrt(feature_variances(num_features))
    x = rng.normal(0, deviations, (num_clients, num_rows, num_features))
    y = np.einsum("mnd,md->mn", x, theta) + rng.normal(0, label_noise, (num_clients, num_rows))
    return _of_regressions(x, y, num_rows), theta


@dataclasses.dataclass(frozen=True)
class RegressionStream:
    """The fresh minibatches of `regression_stream`; `label_noise` is the standard deviation τ."""

    label_noise: float

    def __call__(
        self, key: jax.Array, row: dict[str, jax.Array], size: int
    ) -> dict[str, jax.Array]:
        """Draw b fresh examples: x (b, d) and y (b,), from row["theta"], θ_i* (d,)."""
        x_key, y_key = jax.random.split(key)
        theta = row["theta"]
        deviations = jnp.asarray(np.sqrt(feature_variances(theta.shape[0])), theta.dtype)
        x = normal(x_key, (size, theta.shape[0])).astype(theta.dtype) * deviations
        return {"x": x, "y": x @ theta + self.label_noise * normal(y_key, (size,))}


def regression_stream(
    num_clients: int = 1000,
    num_features: int = 100,
    *,
    offset_scale: float = 0.1,
    label_noise: float = 0.01,
    seed: int = 0,
) -> Population:
    """Make the problem of `synthetic_regression` with fresh examples in every minibatch.

    This is the online setting of PP-SGD's theory and of its Figure 1a. A client owns no examples
    but its θ_i*, in the field "theta": in one training row, from which its minibatches are made,
    and in one test row, at which `known_regression` computes the excess risk in closed form.

    Args:
      num_clients: Number m of clients.
      num_features: Number d of features, at least 5.
      offset_scale: s; 0.1 as in the authors' code, 0.01 in the paper's text.
      label_noise: τ, the standard deviation of labels.
    """
    theta, _ = _true_parameters(num_clients, num_features, 1, offset_scale, label_noise, seed)
    fields = {"theta": np.repeat(theta, 2, axis=0).astype(np.float32)}
    counts = np.tile([1, 0, 1], (num_clients, 1))
    return Population.from_flat(fields, counts, generate=RegressionStream(label_noise))


def low_rank_regression(
    num_clients: int = 320, num_features: int = 30, num_rows: int = 30, *, seed: int = 0
) -> tuple[Population, np.ndarray]:
    """Draw linear regressions whose coefficients W (d, m) have a low rank: MP-MTL, section 5.4.

    Rows x ~ N(0, I) are scaled to norm 1, y = ⟨x, w_i⟩ + N(0, 1), and W ~ MVN(0, I, Σ) with five
    consecutive groups of clients; within a group Σ_ij = 10² in the same half and −10² between
    halves. So W has rank 5 and a mean close to 0. (The paper shows its Σ only in a picture.)

    Args:
      num_clients: Number m of clients.
      num_features: Number d of features.
      num_rows: n, training rows of each client, which has 9n test rows.

    Returns:
      The population, x (·, d) and y (·,) float32, and W, (d, m) float64.
    """
    checks.count(num_clients=num_clients, num_features=num_features)
    checks.count(0, seed=seed)
    rng = np.random.default_rng(seed)
    halves = np.arange(num_clients) * 2 * _BLOCKS // num_clients
    w = rng.normal(0, 10, (num_features, _BLOCKS))[:, halves // 2] * (1 - 2 * (halves % 2))
    return _related(w, num_rows, rng), w


def group_sparse_regression(
    num_clients: int = 320, num_features: int = 30, num_rows: int = 30, *, seed: int = 0
) -> tuple[Population, np.ndarray]:
    """Draw the regressions of `low_rank_regression` with coefficients W that are group-sparse.

    The first four features have coefficients uniform in ±[1, 50]; all other rows of W are 0.

    Args:
      num_clients: Number m of clients.
      num_features: Number d of features, at least 4.
      num_rows: n, training rows of each client, which has 9n test rows.

    Returns:
      See `low_rank_regression`.
    """
    checks.count(num_clients=num_clients)
    checks.count(_USED_FEATURES, num_features=num_features)
    checks.count(0, seed=seed)
    rng, used = np.random.default_rng(seed), (_USED_FEATURES, num_clients)
    w = np.zeros((num_features, num_clients))
    w[:_USED_FEATURES] = rng.uniform(1, 50, used) * rng.choice([-1, 1], used)
    return _related(w, num_rows, rng), w


def _related(w: np.ndarray, num_rows: int, rng: np.random.Generator) -> Population:
    """Draw n training and 9n test rows of each client with the coefficients w (d, m)."""
    checks.count(num_rows=num_rows)
    x = rng.normal(size=(w.shape[1], 10 * num_rows, w.shape[0]))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    y = np.einsum("mnd,dm->mn", x, w) + rng.normal(size=x.shape[:2])
    return _of_regressions(x, y, num_rows)


def _of_regressions(x: np.ndarray, y: np.ndarray, num_rows: int) -> Population:
    """Make a population of x (m, n, d) and y (m, n), with `num_rows` training rows per client."""
    m, n, d = x.shape
    fields = {"x": x.reshape(-1, d).astype(np.float32), "y": y.reshape(-1).astype(np.float32)}
    return Population.from_flat(fields, np.tile([num_rows, 0, n - num_rows], (m, 1)))


def _true_parameters(
    num_clients: int,
    num_features: int,
    num_rows: int,
    offset_scale: float,
    label_noise: float,
    seed: int,
) -> tuple[np.ndarray, np.random.Generator]:
    """Draw θ* of each client, (m, d) float64; also return the generator."""
    checks.count(num_clients=num_clients, num_rows=num_rows)
    checks.count(_PERSONAL_FEATURES, num_features=num_features)
    checks.non_negative(offset_scale=offset_scale, label_noise=label_noise)
    checks.count(0, seed=seed)
    rng = np.random.default_rng(seed)
    theta = np.tile(rng.normal(0, 10, num_features), (num_clients, 1))
    theta[:, -_PERSONAL_FEATURES:] += rng.normal(0, offset_scale, (num_clients, _PERSONAL_FEATURES))
    return theta, rng


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw independent N(0, 1) float32 numbers, up to 5.7 in size; `jax.random.normal` in float64.

    Fresh data cost most of such a problem's time. Box and Muller (1958) use both words of Threefry
    and half the arithmetic of inverting the distribution function: several times faster on a CPU.
    For data only: noise that protects clients comes from `privacy/noise.py`.
    """
    if jnp.zeros(()).dtype != jnp.float32 or math.prod(shape) >= 2**32:
        return jax.random.normal(key, shape)
    size = math.prod(shape)

    def draw(first: jax.Array | int, count: int) -> jax.Array:
        index = first + jax.lax.iota(jnp.uint32, count)
        word, other = threefry.words(jax.random.key_data(key), jnp.zeros_like(index), index)
        radius = jnp.sqrt(-2.0 * jnp.log(2.0 - _from_one_to_two(word)))
        # Sines have the same distribution over half a circle as over the whole circle.
        return radius * _sine_of_right_angles(2.0 * _from_one_to_two(other) - 3.0)

    if backend.platform() != "cpu":
        return draw(0, size).reshape(shape)
    return threefry.in_halves(draw, size, jnp.float32)[:size].reshape(shape)


def _from_one_to_two(word: jax.Array) -> jax.Array:
    """Return a uniform number in [1, 2): the upper bits of a word become a float's mantissa."""
    mantissa = (word >> np.uint32(9)) | np.uint32(0x3F800000)
    return jax.lax.bitcast_convert_type(mantissa, jnp.float32)


def _sine_of_right_angles(v: jax.Array) -> jax.Array:
    """Compute sin(πv/2) for |v| ≤ 1."""
    square = v * v
    value = _SINE[-1]
    for coefficient in _SINE[-2::-1]:
        value = value * square + coefficient
    return v * value


def random_rows(
    num_clients: int = 100,
    shape: Sequence[int] = (784,),
    rows: Sequence[int] = (20,),
    labels: int = 10,
    tokens: int = 0,
    seed: int = 0,
) -> Population:
    """Draw standard normal features, or tokens, with labels that do not depend on them.

    Args:
      num_clients: Number of clients.
      shape: Shape of one example, as 784 or 28,28.
      rows: Rows of a client, or the least and the most, as 5,69; most clients have few.
      labels: Number of different labels.
      tokens: Number of different tokens; an example is then a row of tokens, each with a label.
        0 for real numbers.

    Returns:
      All rows for training: x (N, ...) float32 and y (N,) int32, or x (N, L) and y (N, L) int32.
    """
    checks.count(0, seed=seed)
    checks.count(clients=num_clients)
    checks.count(2, labels=labels)
    checks.count(0, tokens=tokens)
    checks.in_range("[1, inf)", shape=np.array(shape or 0), rows=np.array(rows or 0))
    if len(rows) > 2 or rows[0] > rows[-1]:
        raise ValueError(f"rows must be one number, or the least and the most, got {list(rows)}")
    rng = np.random.default_rng(seed)
    counts = np.full(num_clients, rows[0])
    if len(rows) == 2:
        shares = (np.arange(num_clients) + 0.5) / num_clients
        counts += rng.permutation(np.floor((rows[1] - rows[0] + 1) * shares**1.5).astype(int))
    total = int(counts.sum())
    if tokens:
        x = rng.integers(0, tokens, (total, *shape), dtype=np.int32)
        y = rng.integers(0, labels, (total, *shape), dtype=np.int32)
    else:
        x = rng.standard_normal((total, *shape), dtype=np.float32)
        y = rng.integers(0, labels, total, dtype=np.int32)
    return Population.from_flat({"x": x, "y": y}, counts)
