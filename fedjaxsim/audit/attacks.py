"""Canary clients, and attacks on the releases of a run with canaries.

An attack observes each release and scores, at the end, how likely each canary sent its message.
`audit/canaries.py` turns the scores into a lower bound on ε.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels.products import dense, unsealed
from fedjaxsim.simulation import Simulation

PyTree = Any

OVERSHOOT = 10.0
"""Norm of a canary's message over the clip norm: a missing clip cannot be missed."""
_EXACT = jax.lax.Precision.HIGHEST


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
        `noise.noise_tests`. None if the releases of the mechanism are no such sums.
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
        return jnp.matmul(directions, flat, precision=_EXACT)

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


class _Shared(NamedTuple):
    """The server state, with the adversary's notes on it."""

    inner: PyTree
    directions: jax.Array
    observed: PyTree


class _Personal(NamedTuple):
    """A client's state, its canary's coin () bool, and its rounds (T,) bool."""

    inner: PyTree
    sends: jax.Array
    took_part: jax.Array


def with_canaries(
    algorithm: Algorithm,
    ids: np.ndarray,
    directions: np.ndarray,
    tape: PyTree,
    rounds: int,
    attack: Attack,
) -> Algorithm:
    """Return the algorithm with the clients `ids` (n,) as canaries, and an adversary taking notes.

    A canary trains like every client, but sends 10·C·d or zero, according to its coin; the
    directions d, (n, p), are orthonormal. The other clients' messages lose their components along
    them: DP must hold whatever others send. `tape` has the shapes of the notes that
    `attack.observe` takes of one release.
    """

    @functools.wraps(algorithm.init)
    def init(key, *others):
        shared, personal = algorithm.init(key, *others)
        notes = jax.tree.map(lambda leaf: jnp.zeros((rounds, *leaf.shape), leaf.dtype), tape)
        return (
            _Shared(shared, jnp.asarray(directions, dtype=float), notes),
            _Personal(personal, jnp.array(False), jnp.zeros(rounds, bool)),
        )

    def client(shared, personal, data, hparams, context):
        inner, message, metrics = algorithm.client(
            shared.inner, personal.inner, data, hparams, context
        )
        flat, unravel = ravel_pytree(dense(unsealed(message)))
        basis = shared.directions.astype(flat.dtype)
        is_mine = jnp.asarray(ids) == context.client_id
        norm = canary_norm(hparams).astype(flat.dtype)
        crafted = jnp.where(personal.sends, norm, 0) * basis[jnp.argmax(is_mine)]
        along = jnp.matmul(basis, flat, precision=_EXACT)
        others = flat - jnp.matmul(along, basis, precision=_EXACT)
        sent = unravel(jnp.where(jnp.any(is_mine), crafted, others))
        took_part = personal.took_part.at[context.round].set(True)
        return _Personal(inner, personal.sends, took_part), sent, metrics

    def server(shared, release, hparams, round_):
        notes = attack.observe(release, shared.directions)
        observed = jax.tree.map(
            lambda tape, note: tape.at[round_].set(note), shared.observed, notes
        )
        inner = algorithm.server(shared.inner, release, hparams, round_)
        return _Shared(inner, shared.directions, observed)

    def predict(shared, personal, hparams, client_id):
        return algorithm.predict(shared.inner, personal.inner, hparams, client_id)

    def predict_with_data(shared, personal, *others):
        assert algorithm.predict_with_data is not None
        return algorithm.predict_with_data(shared.inner, personal.inner, *others)

    return algorithm._replace(
        init=init,
        client=client,
        server=server,
        predict=predict,
        predict_with_data=algorithm.predict_with_data and predict_with_data,
        warm_start=WarmStart(),
    )
