"""Standard errors of a published linear model, by source: clients, noise, cohorts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.special import stdtrit

from fedjaxsim import keys
from fedjaxsim.data.population import Population
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import products
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.mechanisms.record import EXACT
from fedjaxsim.privacy.messages import Messages
from fedjaxsim.tasks.in_source import TaskInSource

ColumnArrays = dict[str, np.ndarray]
_LEVEL = 0.95
SINGULAR = 1e-5
"""Share of the largest singular value below which a direction is not identified."""


class _Round(NamedTuple):
    """The linear form of a round around the published parameters w, (q,).

    Attributes:
      parts: (m, q), each client's part of the expected change of w.
      slope: (q, q), the derivative of the expected change at w.
      of_release: (q, q), the derivative of w after the round in the release.
    """

    parts: np.ndarray
    slope: np.ndarray
    of_release: np.ndarray


def standard_errors_of(
    program: Program,
    linear_round: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
    reported: TaskInSource,
    population: Population,
    state: SimulationState,
    hparams: Hyperparameters,
    noise_multipliers: np.ndarray,
) -> ColumnArrays:
    """Return the published model's coefficients with standard errors; see `Simulation`.

    `linear_round` is the program's, compiled. `noise_multipliers` are z of each round so far
    as the mechanism states it, (T,) or (1,).
    """
    algorithm, m = program.algorithm, program.num_clients
    published = algorithm.warm_start.published(state.shared)
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(state.shared))
    q = sum(np.size(leaf) for leaf in jax.tree.leaves(published))
    if not algorithm.sends_from_shared or size != q:
        raise ValueError(
            "standard errors need clients that send changes of one published model, and a server "
            "without momentum, as in fedavg, fedprox and ditto"
        )
    reported.require_linear(published, 1)
    deviations = noise_deviations(program, state, hparams, noise_multipliers)
    if m < 2:
        raise ValueError("standard errors need two clients or more")
    fields = jax.tree.map(jnp.asarray, dict(population.fields))
    rows = Rows.place(population, "train", fields, algorithm)
    with program.tracing():
        arrays = linear_round(state, hparams, rows)
    linear = _Round(*(np.asarray(part, np.float64) for part in arrays))
    centred = linear.parts - linear.parts.mean(axis=0)
    between = centred.T @ centred
    count = int(population.splits["train"].count.sum())
    few = m / (m - 1) * (count - 1) / max(1, count - q)
    inverse = np.linalg.pinv(linear.slope, rcond=SINGULAR)
    rate = float(program.sampling.answer_rate(program.sampling.rate(hparams)))
    unit = linear.of_release @ linear.of_release.T / (rate * m) ** 2
    contraction = np.eye(q) + linear.slope
    cohort = (1 - rate) / rate * between
    covariances = {
        "sampling": few * inverse @ between @ inverse.T,
        "noise": _accumulated(contraction, [scale**2 * unit for scale in deviations]),
        "cohorts": _accumulated(contraction, [cohort] * len(deviations)),
    }
    models = jax.tree.map(lambda leaf: leaf[None], published)
    covariances = {name: covariance[None] for name, covariance in covariances.items()}
    return error_table(models, reported, np.array([m - 1.0]), **covariances)


def noise_deviations(
    program: Program,
    state: SimulationState,
    hparams: Hyperparameters,
    noise_multipliers: np.ndarray,
) -> np.ndarray:
    """Return the noise's standard deviation in each round so far, (T,), in a sum of messages.

    Raises:
      ValueError: noise is not plain Gaussian noise of this stage alone.
    """
    of_stage = (state.key, keys.stream(state.key, keys.Stream.RELEASED))
    digests = {ledger.hex_digest(ledger.key_digest(key)) for key in of_stage}
    if any(drawn.digest not in digests for drawn in ledger.drawn(state.privacy)):
        raise ValueError(
            "standard errors know the noise of one stage, but this model began from an earlier one"
        )
    clip = np.asarray(hparams.get("clip", 0.0), np.float64)
    scales = noise_multipliers.astype(np.float64) * np.where(np.isfinite(clip), clip, 0.0)
    deviations = np.broadcast_to(scales, (int(state.round),))
    mechanism = program.mechanism
    public = mechanism.public
    plain = {"clip", "noise_multiplier"} == {record.name for record in mechanism.hyperparameters}
    plain = plain and mechanism.event.kind == "gaussian" and not jax.tree.leaves(state.mechanism)
    if not plain or EXACT in public or np.isnan(scales).any():
        raise ValueError(
            "standard errors are known for mechanism gaussian without exact sums, and per-layer"
        )
    if public and np.any(deviations):
        raise ValueError("standard errors with noise and weights need max-weight")
    return deviations


def _accumulated(contraction: np.ndarray, covariances: Sequence[np.ndarray]) -> np.ndarray:
    """Return the covariance after rounds that each contract it and add one, (q, q)."""
    total = np.zeros_like(contraction)
    for added in covariances:
        total = contraction @ total @ contraction.T + added
    return total


def error_table(
    models: Any, reported: TaskInSource, freedom: np.ndarray, **covariances: np.ndarray
) -> ColumnArrays:
    """Return k linear models' coefficients with errors in the source's units, (k·c·(1 + d),) each.

    Args:
      models: leaves (k, ...).
      reported: the task in the source's terms.
      freedom: degrees of freedom of Student's t, (k,); NaN or 0 for no interval.
      **covariances: of the models' parameters by source of error, (k, p, p) each.
    """
    slopes, intercepts = reported.linear(models)
    k, c, d = slopes.shape
    w, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], models))
    # The map to these units is affine: its value at 0, and at each unit vector.
    points = np.concatenate([np.zeros((1, w.size)), np.eye(w.size)])
    mapped = reported.linear(jax.vmap(unravel)(jnp.asarray(points, w.dtype)))
    estimate, values = (
        np.concatenate([of_ones[..., None], of_columns], axis=2).reshape(len(of_columns), -1)
        for of_columns, of_ones in ((slopes, intercepts), mapped)
    )
    unit = values[1:] - values[0]
    errors = {
        name: np.sqrt(np.maximum(0.0, np.einsum("ij,mik,kj->mj", unit, covariance, unit)))
        for name, covariance in covariances.items()
    }
    names = ["intercept", *reported.require_linear(models, 2)]
    table = {"coefficient": np.tile(np.array(names, object), k * c)}
    for header, outputs in reported.outputs(c).items():
        table[header] = np.tile(np.repeat(outputs, 1 + d), k)
    total = np.sqrt(sum(np.square(error) for error in errors.values()))
    quantile = stdtrit(np.where(freedom > 0, freedom, np.nan), (1 + _LEVEL) / 2)
    width = quantile[:, None] * total
    columns = {"estimate": estimate, **errors, "low": estimate - width, "high": estimate + width}
    return table | {name: column.reshape(-1) for name, column in columns.items()}


class ServerMaps(NamedTuple):
    """A server's step as functions of the raveled public state w, (q,), without noise.

    Attributes:
      after: `(w, release) -> (q,)`, the next state.
      part: `(w, message, client_id) -> (q,)`, the part of one of m clients in a step of all.
      release: `(message, client_id) -> pytree`, the release of it alone, divided by m.
    """

    after: Callable[[jax.Array, Any], jax.Array]
    part: Callable[[jax.Array, Any, jax.Array], jax.Array]
    release: Callable[[Any, jax.Array], Any]


def server_maps(program: Program, state: SimulationState, hparams: Hyperparameters) -> ServerMaps:
    """Return the functions at a state of the program."""
    algorithm, mechanism, m = program.algorithm, program.mechanism, program.num_clients
    _, unravel = ravel_pytree(state.shared)
    silent = hparams
    if "noise_multiplier" in hparams:
        silent = hparams.replace(noise_multiplier=jnp.zeros(()))
    key = keys.seed_key(0)

    def after(w, release):
        return ravel_pytree(algorithm.server(unravel(w), release, hparams, state.round))[0]

    def release(message, client_id):
        zero = mechanism.zero(products.shapes(message), m)
        alone = Messages(jax.tree.map(lambda leaf: leaf[None], message))
        here = jnp.ones(1, bool), client_id[None], state.mechanism, silent
        total = mechanism.add(zero, alone, *here)
        return mechanism.release(total, float(m), key, state.mechanism, silent, state.round).value

    def part(w, message, client_id):
        value = release(message, client_id)
        return after(w, value) - after(w, jax.tree.map(jnp.zeros_like, value))

    return ServerMaps(after, part, release)


def linear_round_of(program: Program) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Return `(state, hparams, rows) -> parts, slope, of_release`; see `_Round`."""
    algorithm, m = program.algorithm, program.num_clients

    def linear_round(state, hparams, rows):
        w, unravel = ravel_pytree(state.shared)  # the published parameters alone
        drawn = program.draw(state, hparams)
        maps = server_maps(program, state, hparams)

        def parts(w):
            begun = dataclasses.replace(state, shared=unravel(w))
            client = program.client(begun, hparams, rows, drawn)

            def of_client(states, client_id):
                _, message, _ = client(states, client_id)
                return maps.part(w, message, client_id)

            ids = jnp.arange(m, dtype=jnp.int32)
            return jax.lax.map(lambda of: of_client(*of), (state.of_clients, ids))

        back = ravel_pytree(algorithm.warm_start.published(state.shared))[1]
        changes = jax.jacfwd(lambda release: maps.after(w, back(release)))(jnp.zeros_like(w))
        slope = jax.jacfwd(lambda w: jnp.sum(parts(w), axis=0))(w)
        return parts(w), slope, changes

    return linear_round
