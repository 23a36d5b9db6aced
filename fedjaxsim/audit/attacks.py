"""Canary clients, attacks on the releases of a run with canaries, and tests of their noise.

An attack observes each release and scores, at the end, how likely each canary sent its message.
`audit/canaries.py` turns the scores into a lower bound on ε.

Such bounds need thousands of canaries to find noise that is half of what is charged. But the
adversary of an audit knows which messages are in a release, so the rest is noise, which a sound
mechanism draws independently with a known deviation. Less of it, in any combination of rounds or of
directions, breaks the guarantee, and a sum of many squares shows it (`noise_tests`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjaxsim.algorithm import Algorithm, Context, WarmStart
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import threefry
from fedjaxsim.kernels.products import dense, unsealed
from fedjaxsim.simulation import Simulation

PyTree = Any

OVERSHOOT = 10.0
"""Norm of a canary's message over the clip norm: a missing clip cannot be missed."""
EXACT = jax.lax.Precision.HIGHEST
_POWER = 0.95
"""Probability with which noise below `NoiseTest.found_below` is found."""


class Evidence(NamedTuple):
    """The knowledge of an adversary after one run.

    Attributes:
      observed: results of `Attack.observe` on the releases, leaves (T, ...) float64.
      took_part: (m, T) bool, the cohorts. In the joint-DP view the adversary of a client knows all
        rows but the client's.
      ids: (n,) the canaries' clients.
      directions: (n, p) orthonormal: the canaries' messages.
      hparams: the stated z, C, and so on.
      sampling_rate: p, as charged.
      num_clients: m.
    """

    observed: PyTree
    took_part: np.ndarray
    ids: np.ndarray
    directions: np.ndarray
    hparams: Hyperparameters
    sampling_rate: float
    num_clients: int


class Attack(NamedTuple):
    """A test of whether each canary sent its message.

    Attributes:
      observe: `(release, directions (n, p)) -> pytree`: the notes on each round's release.
      score: `(evidence) -> (n,)`, higher if the canary more likely sent. The stated confidence
        needs scores that are independent between the canaries of a run when the guarantee holds;
        otherwise use one canary per run.
      signal: `(evidence) -> (T, n)`: each round's release along each direction: 1 if the canary's
        message is in it, plus independent noise of deviation z, all times one unknown number; see
        `noise_tests`. None if the releases of the mechanism are no such sums.
    """

    observe: Callable[[PyTree, jax.Array], PyTree]
    score: Callable[[Evidence], np.ndarray]
    signal: Callable[[Evidence], np.ndarray] | None = None


def likelihood_ratio() -> Attack:
    """Build the most powerful attack on a sampled Gaussian sum, given the releases.

    With x_t = ⟨release_t, d⟩ p m / C, which is N(0, z²) plus 1 if a canary of direction d sent, the
    score is the log of the likelihood ratio for a client drawn with probability p,

        Σ_t log(1 − p + p exp(x_t/z² − 1/(2z²))),

    and Σ_t x_t/z² up to a constant for full participation (Neyman and Pearson). Without noise it is
    Σ_t x_t. The scores of a run are independent: orthonormal directions see independent Gaussian
    noise, other clients' messages are orthogonal to them, and clients are drawn independently.
    """

    def observe(release, directions):
        flat, _ = ravel_pytree(release)
        if flat.size != directions.shape[1]:
            raise ValueError(
                f"releases must have the {directions.shape[1]} numbers of a message for this "
                f"attack, got {flat.size}; give an attack for this mechanism"
            )
        return jnp.matmul(directions, flat, precision=EXACT)

    def signal(evidence):
        unit = float(np.asarray(evidence.hparams.get("clip", math.inf)))
        clients = evidence.sampling_rate * evidence.num_clients
        return evidence.observed * clients / (unit if math.isfinite(unit) else 1.0)

    def score(evidence):
        p, x = evidence.sampling_rate, signal(evidence)
        z = noise_of(evidence.hparams, len(x))[:, None]
        if np.any(z == 0):
            return x.sum(axis=0)
        present = (x - 0.5) / z**2 + math.log(p)
        absent = math.log1p(-p) if p < 1 else -math.inf
        return np.logaddexp(present, absent).sum(axis=0)

    return Attack(observe, score, signal)


def noise_of(hparams: Hyperparameters, rounds: int) -> np.ndarray:
    """Return the noise multiplier of each round, (T,) float64; zeros without noise."""
    z = np.asarray(hparams.get("noise_multiplier", 0.0), np.float64)
    return np.broadcast_to(z[:rounds] if z.ndim else z, rounds)


def shapes_of(simulation: Simulation, hparams: Hyperparameters) -> tuple[PyTree, int, PyTree]:
    """Return the shapes of a message, the number of its parameters, and the shapes of a release."""
    key, arrays = jax.random.key(0, impl="threefry2x32"), hparams.as_arrays()
    message, mechanism = simulation.message_shapes(key, arrays), simulation.mechanism

    def release():
        zero, state = mechanism.zero(message, simulation.num_clients), mechanism.init(arrays)
        return mechanism.release(zero, jnp.ones(()), key, state, arrays, jnp.int32(0)).value

    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(message))
    return message, size, jax.eval_shape(release)


def canary_norm(hparams: Hyperparameters) -> jax.Array:
    """Return the norm of a canary's message, (): 10·C, or 1 without clipping."""
    clip_norm = jnp.asarray(hparams.get("clip", jnp.inf))
    return jnp.where(jnp.isfinite(clip_norm), OVERSHOOT * clip_norm, 1.0)


class Directions(NamedTuple):
    """Orthonormal directions of n canaries: each has random signs on coordinates of its own.

    `owner`, (p,) int32, and `sign`, (p,) int8, are of each coordinate; `size` (n,) counts them.
    """

    owner: jax.Array
    sign: jax.Array
    size: jax.Array

    @classmethod
    def draw(cls, canaries: int, size: int) -> "Directions":
        """Draw the directions of `canaries` clients among `size` ≥ `canaries` coordinates."""
        # They may be public, and are the same in every run.
        order, signs = threefry.split(jax.random.key(0, impl="threefry2x32"))
        owner = jax.random.permutation(order, size).astype(jnp.int32) % canaries
        sign = 1 - 2 * (threefry.bits(signs, (size,)) & 1).astype(jnp.int8)
        return cls(owner, sign, jnp.bincount(owner, length=canaries).astype(jnp.int32))

    def along(self, observed: np.ndarray) -> np.ndarray:
        """Return the inner product of each direction with `observed`, (p,), as (n,) float64."""
        owner, sign, size = map(np.asarray, self)
        return np.bincount(owner, observed * sign, len(size)) / np.sqrt(size)

    def dense(self) -> np.ndarray:
        """Return the directions, (n, p) float64."""
        owner, sign, size = map(np.asarray, self)
        return np.where(np.arange(len(size))[:, None] == owner, sign, 0) / np.sqrt(size)[:, None]


class Watched(NamedTuple):
    """A server state, and an adversary's notes beside it."""

    inner: PyTree
    notes: Any


def watched(
    algorithm: Algorithm,
    begin: Callable[[jax.Array], Any],
    send: Callable[[Any, jax.Array, Hyperparameters, Context], jax.Array],
    note: Callable[[Any, PyTree, jax.Array], Any],
) -> Algorithm:
    """Return the algorithm with canaries, and an adversary that takes notes of each release.

    `begin(key)` makes the notes, `note(notes, release, round)` adds to them, and `send(notes,
    message, hparams, context)` returns what a client sends in place of its message (p,).
    """

    @functools.wraps(algorithm.init)
    def init(key, *others):
        shared, personal = algorithm.init(key, *others)
        return Watched(shared, begin(key)), personal

    def client(shared, personal, data, hparams, context):
        personal, message, metrics = algorithm.client(
            shared.inner, personal, data, hparams, context
        )
        flat, unravel = ravel_pytree(dense(unsealed(message)))
        sent = send(shared.notes, flat, hparams, context)
        return personal, unravel(sent.astype(flat.dtype)), metrics

    def server(shared, release, hparams, round_):
        inner = algorithm.server(shared.inner, release, hparams, round_)
        return Watched(inner, note(shared.notes, release, round_))

    def predict(shared, *others):
        return algorithm.predict(shared.inner, *others)

    def predict_with_data(shared, *others):
        assert algorithm.predict_with_data is not None
        return algorithm.predict_with_data(shared.inner, *others)

    return algorithm._replace(
        init=init,
        client=client,
        server=server,
        predict=predict,
        predict_with_data=algorithm.predict_with_data and predict_with_data,
        warm_start=WarmStart(),
    )


@dataclasses.dataclass(frozen=True)
class NoiseTest:
    """A test of the noise in one part of all releases.

    Standard deviations are over the charged one, relative to a canary's message. `factor` is the
    smallest found in the part; one below `refuted_below` refutes the mechanism, at the audit's
    confidence; a mechanism at `found_below` or less is refuted with probability 0.95.
    """

    part: str
    factor: float
    refuted_below: float
    found_below: float

    @property
    def violated(self) -> bool:
        """Return whether there is less noise than charged."""
        return self.factor < self.refuted_below

    def __str__(self) -> str:
        """Return the result, and what could have been found."""
        return (
            f"noise in {self.part}: {self.factor:.3g} of the charged (refuted below "
            f"{self.refuted_below:.3g}; {self.found_below:.3g} is found with probability {_POWER})"
        )


def noise_tests(
    signal: np.ndarray, present: np.ndarray, noise_multiplier: np.ndarray, confidence: float
) -> tuple[NoiseTest, ...]:
    """Test the noise of R runs of T rounds along n directions, in each part that is large enough.

    `signal`, (R, T, n), is k · (present + z g), with one unknown scale k > 0, such as a public
    divisor, z > 0 (T,), and, in a sound mechanism, independent g ~ N(0, 1); `present` tells whether
    the canary's message is in the release. A sound mechanism passes all tests with probability
    `confidence`.
    """
    from scipy import stats

    runs, rounds, n = signal.shape
    level = (1 - confidence) / 6  # of the scale, and of at most five tests
    z = np.asarray(noise_multiplier, np.float64)[:, None]
    count = int(present.sum())
    scale = float(signal[present].mean()) if count else 0.0
    # The mean message is known up to its own noise, and with it all other deviations.
    error = math.sqrt(float(np.mean((present * z)[present] ** 2)) / count) if count else math.inf
    if scale <= 0 or 1.645 * error >= 1:
        return ()
    rest = (signal / scale - present) / z
    surely = 1 + float(stats.norm.isf(level)) * error

    def test(part, factor, refuted, size):
        """`refuted` is the level's quantile of the factor; `size` its degrees of freedom."""
        likely = math.sqrt(stats.chi2.ppf(_POWER, size) / size)
        found = refuted / surely * (1 - 1.645 * error) / likely
        return NoiseTest(part, float(factor), float(refuted / surely), float(found))

    def of_squares(part, squares, size, tests=1):
        """Test the smallest of the sums of `size` squares."""
        refuted = math.sqrt(stats.chi2.ppf(level / tests, size) / size)
        return test(part, math.sqrt(np.min(squares) / size), refuted, size)

    def of_combinations(part, rows):
        """Test the smallest eigenvalue of a covariance, rows (N, d) (Davidson and Szarek 2001)."""
        size, d = rows.shape
        # Up to d degrees of freedom go with the estimated message.
        least = math.sqrt(max(size - d, 0)) - math.sqrt(d) - math.sqrt(-2 * math.log(level))
        if least <= 0:
            return []
        smallest = max(float(np.linalg.eigvalsh(rows.T @ rows / size)[0]), 0.0)
        return [test(part, math.sqrt(smallest), least / math.sqrt(size), size)]

    squares = rest**2
    found = [of_squares("all rounds", squares.sum(), rest.size - 1)]
    if runs * n > 1:
        found.append(of_squares("one round", squares.sum((0, 2)), runs * n - 1, rounds))
    if runs > 1:
        apart = (rest - rest.mean(axis=0)) ** 2
        found.append(of_squares("differences of runs", apart.sum(), (runs - 1) * rounds * n - 1))
    if rounds > 1:
        found += of_combinations(
            "a combination of rounds", rest.transpose(0, 2, 1).reshape(-1, rounds)
        )
    if n > 1:
        found += of_combinations("a combination of directions", rest.reshape(-1, n))
    return tuple(found)
