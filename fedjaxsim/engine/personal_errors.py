"""Standard errors of personal linear models: each client's own rows, and noise in its centre."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjaxsim import keys
from fedjaxsim.algorithms.local_steps import mean_over_rows
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.data.population import Population
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.standard_errors import (
    SINGULAR,
    ColumnArrays,
    error_table,
    noise_deviations,
    server_maps,
)
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters, client_values
from fedjaxsim.models.model import bind_weights
from fedjaxsim.tasks.in_source import TaskInSource

_logger = logging.getLogger(__name__)
_LEAST = 1e-2
"""Least degrees of freedom: with fewer, rows are as many as coefficients up to rounding."""
_MEAN = 1e-3
"""Share of a row's gradient by which the loss of a batch may differ from the mean of its rows."""


class _Fit(NamedTuple):
    """Statistics of clients' rows at their models θ, and of their personal states v, (m, ...).

    Attributes:
      hessian: (p, p), of the mean loss at θ.
      scores: (p, p), the mean of s sᵀ/(1 − h)² over the gradients s, and leverages h, of rows.
      gradient: (p,), the mean of s.
      unlike: (), how far gradients of batches are from the means of their rows'.
      strength, offset: (v,), of the pull, and of v from its centre.
      of_personal: (p, v), the derivative of θ in v.
      rows: (), their number.
    """

    hessian: np.ndarray
    scores: np.ndarray
    gradient: np.ndarray
    unlike: np.ndarray
    strength: np.ndarray
    offset: np.ndarray
    of_personal: np.ndarray
    rows: np.ndarray


class _Response(NamedTuple):
    """The linear form of a round around the public state w, (q,), and personal states v.

    Attributes:
      contraction: (q, q), the derivative in w of the expected next w.
      of_release: (q, q'), its derivative in the release.
      parts: (m, q), each client's part of the expected change of w.
      part_of_personal: (m, q, v), its derivative in v.
      of_personal, of_shared: (m, v, v) and (m, v, q), of the client's next v in v and in w.
      model_of_personal, model_of_shared: (m, p, v) and (m, p, q), of its model.
    """

    contraction: np.ndarray
    of_release: np.ndarray
    parts: np.ndarray
    part_of_personal: np.ndarray
    of_personal: np.ndarray
    of_shared: np.ndarray
    model_of_personal: np.ndarray
    model_of_shared: np.ndarray


class PersonalFunctions(NamedTuple):
    """Functions `(state, hparams, rows) -> arrays`, to be compiled."""

    fit: Callable[..., tuple[jax.Array, ...]]
    response: Callable[..., tuple[jax.Array, ...]]


def personal_errors_of(
    program: Program,
    functions: PersonalFunctions,
    reported: TaskInSource,
    population: Population,
    state: SimulationState,
    hparams: Hyperparameters,
    noise_multipliers: np.ndarray,
    models: Any,
) -> ColumnArrays:
    """Return the personal coefficients with standard errors; see `Simulation.standard_errors`.

    `models` are the clients', leaves (m, ...); `noise_multipliers` are z of each round so far as
    the mechanism states it, (T,) or (1,).
    """
    algorithm, m = program.algorithm, program.num_clients
    if algorithm.personal_pull is None:
        raise ValueError(
            "standard errors of personal models need clients that descend their own loss and a "
            "pull to a centre, as in local, ditto, pmtl, ppsgd and fedper"
        )
    reported.require_linear(models, 2)
    fields = jax.tree.map(jnp.asarray, dict(population.fields))
    rows = Rows.place(population, "train", fields, algorithm)
    with program.tracing(), jax.default_matmul_precision("float32"):
        arrays = functions.fit(state, hparams, rows)
    fit = _Fit(*(np.asarray(part, np.float64) for part in arrays))
    typical = np.sqrt(np.trace(fit.scores, axis1=1, axis2=2).sum())
    if fit.unlike.max(initial=0.0) > _MEAN * typical:
        raise ValueError(
            "standard errors of personal models need a loss that is a mean over rows: this one "
            "compares the rows of a minibatch, as cox does"
        )
    sampling, step, freedom = _sandwich(fit)
    noise = cohorts = np.zeros_like(sampling)
    if program.mechanism.event.releases:
        leaves = jax.tree.leaves(state.shared)
        if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
            raise ValueError(
                "standard errors know no server that counts rounds, as adam and averages do"
            )
        deviations = noise_deviations(program, state, hparams, noise_multipliers)
        rate = float(program.sampling.answer_rate(program.sampling.rate(hparams)))
        if len(deviations) and (np.any(deviations) or rate < 1):
            with program.tracing(), jax.default_matmul_precision("float32"):
                arrays = functions.response(state, hparams, rows)
            response = _Response(*(np.asarray(part, np.float64) for part in arrays))
            noise, cohorts = _propagated(response, deviations, rate)
    deviation = np.sqrt(np.diagonal(sampling + noise + cohorts, axis1=1, axis2=2))
    if far := int(np.any(np.abs(step) > deviation, axis=1).sum()):
        _logger.warning(
            "%d of %d personal models are more than a standard error from the optimum of their "
            "loss and pull, for which the sampling error holds: train longer, with larger batches, "
            "or with smaller steps",
            far,
            m,
        )
    table = error_table(models, reported, freedom, sampling=sampling, noise=noise, cohorts=cohorts)
    return {"client": np.repeat(population.names, len(table["estimate"]) // m)} | table


def _sandwich(fit: _Fit) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return covariances (m, p, p), steps to the optimum (m, p), and degrees of freedom (m,).

    In the personal state's coordinates the bread is (H + Λ)⁻¹; tr (H + Λ)⁻¹ H coefficients were
    fitted to the rows.
    """
    of_v = fit.of_personal
    to_v = of_v.swapaxes(1, 2)
    hessian = to_v @ fit.hessian @ of_v
    pull = fit.strength[:, :, None] * np.eye(of_v.shape[2])
    bread = np.linalg.pinv(hessian + pull, rcond=SINGULAR, hermitian=True)
    fitted = np.trace(bread @ hessian, axis1=1, axis2=2)
    freedom = fit.rows - fitted
    factor = np.where(freedom > _LEAST, 1 / np.maximum(fit.rows, 1), np.nan)
    meat = to_v @ fit.scores @ of_v
    covariance = factor[:, None, None] * (of_v @ bread @ meat @ bread @ to_v)
    gradient = np.einsum("mpv,mp->mv", of_v, fit.gradient) + fit.strength * fit.offset
    step = np.einsum("mpv,mvu,mu->mp", of_v, bread, gradient)
    return covariance, step, np.where(freedom > _LEAST, freedom, 0.0)


def _propagated(
    response: _Response, deviations: np.ndarray, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the covariances (m, p, p) of models by the noise, and by the cohorts, of all rounds.

    A shock of w spreads to everybody from round to round. A client takes part in a round with
    probability `rate`, so its response is random; its mean moves w further.
    """
    m, q = response.parts.shape
    between = response.parts - response.parts.mean(axis=0)
    shocks = {
        "noise": response.of_release @ response.of_release.T / (rate * m) ** 2,
        "cohorts": (1 - rate) / rate * between.T @ between,
    }
    powers = {"noise": deviations[::-1] ** 2, "cohorts": np.ones(len(deviations))}
    shocks = {name: shock for name, shock in shocks.items() if np.any(shock * powers[name].max())}
    v, p = response.of_personal.shape[1], response.model_of_personal.shape[1]
    of_w, of_v = np.eye(q), np.zeros((m, v, q))  # responses of w, and mean ones of v
    second = {name: np.zeros((m, v, v)) for name in shocks}  # E[r Σ rᵀ] of the responses r of v
    total = {name: np.zeros((m, p, p)) for name in ("noise", "cohorts")}

    def squared(left, first, cross, right, outer):
        mixed = left @ cross @ right.swapaxes(1, 2)
        return (
            left @ first @ left.swapaxes(1, 2) + mixed + mixed.swapaxes(1, 2)
            + right @ outer @ right.swapaxes(1, 2)
        )  # fmt: skip

    for age in range(len(deviations)):
        for name, shock in shocks.items():
            cross, outer = of_v @ (shock @ of_w.T), of_w @ shock @ of_w.T
            model = response.model_of_personal, response.model_of_shared
            total[name] += powers[name][age] * squared(
                model[0], second[name], cross, model[1], outer
            )
            moved = squared(response.of_personal, second[name], cross, response.of_shared, outer)
            second[name] = (1 - rate) * second[name] + rate * moved
        of_clients = np.einsum("mqv,mvr->qr", response.part_of_personal, of_v)
        moved = response.of_personal @ of_v + response.of_shared @ of_w
        of_v = (1 - rate) * of_v + rate * moved
        of_w = response.contraction @ of_w + of_clients
    return total["noise"], total["cohorts"]


def personal_functions(program: Program) -> PersonalFunctions:
    """Return the functions of a program's personal models; see `_Fit` and `_Response`."""
    algorithm, m = program.algorithm, program.num_clients
    task, pull_of = algorithm.task, algorithm.personal_pull

    def fit(state, hparams, rows):
        reading = program.plan_of_evaluation(state).reading

        def of_client(personal, client_id):
            key = keys.stream(state.key, keys.Stream.EVALUATION, state.round, client_id)
            data = rows.of(client_id, key, program.minibatches, reading)
            v, back = ravel_pytree(personal)

            def model(v):
                params = algorithm.predict(state.shared, back(v), hparams, client_id)
                return ravel_pytree(params)[0]

            theta, of_params = ravel_pytree(
                algorithm.predict(state.shared, personal, hparams, client_id)
            )

            def loss(theta, batch):
                return task.loss(of_params(theta), batch)

            def row_of(fields):
                return Batch(jax.tree.map(lambda value: value[None], fields), jnp.ones(1))

            def mean_scores(inverse, batch):
                """Return the outer products of rows' gradients, and how unlike their mean is."""
                weight = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)

                def of_row(fields):
                    row = row_of(fields)
                    leverage = jnp.sum(inverse * jax.hessian(loss)(theta, row))
                    return jax.grad(loss)(theta, row), leverage

                scores, leverages = jax.vmap(of_row)(batch.fields)
                scores = jnp.where(weight[:, None] > 0, scores, 0)
                unlike = jnp.linalg.norm(jax.grad(loss)(theta, batch) - weight @ scores)
                factor = weight / jnp.square(1 - jnp.where(weight > 0, leverages, 0))
                return scores.T @ (factor[:, None] * scores), unlike

            assert pull_of is not None
            with bind_weights(task.frozen, rows.frozen):
                client_hparams = client_values(algorithm.hyperparameters, hparams, client_id)
                pull = pull_of(state.shared, personal, data, client_hparams, client_id)
                strength, centre, _ = pull
                if len(jax.tree.leaves(strength)) == 1:
                    [number] = jax.tree.leaves(strength)
                    strength = jax.tree.map(lambda leaf: number, centre)
                strengths, _ = ravel_pytree(jax.tree.map(jnp.full_like, centre, strength))
                of_personal = jax.jacfwd(model)(v)
                hessian, gradient = mean_over_rows(
                    lambda batch: (jax.hessian(loss)(theta, batch), jax.grad(loss)(theta, batch)),
                    data,
                )
                curvature = of_personal.T @ hessian @ of_personal + jnp.diag(strengths)
                bread = jnp.linalg.pinv(curvature, rtol=SINGULAR, hermitian=True)
                inverse = of_personal @ bread @ of_personal.T / jnp.maximum(data.count, 1)
                scores, unlike = mean_over_rows(functools.partial(mean_scores, inverse), data)
            offset = v - ravel_pytree(centre)[0]
            return hessian, scores, gradient, unlike, strengths, offset, of_personal, data.count

        ids = jnp.arange(m, dtype=jnp.int32)
        return jax.lax.map(lambda of: of_client(*of), (state.personal, ids))

    def response(state, hparams, rows):
        w, unravel = ravel_pytree(state.shared)
        drawn = program.draw(state, hparams)
        maps = server_maps(program, state, hparams)

        def of_client(states, client_id):
            personal, consumed = states
            v, back = ravel_pytree(personal)

            def moved(w, v):
                begun = dataclasses.replace(state, shared=unravel(w))
                client = program.client(begun, hparams, rows, drawn)
                (later, _), message, _ = client((back(v), consumed), client_id)
                return ravel_pytree(later)[0], maps.part(w, message, client_id)

            def model(w, v):
                params = algorithm.predict(unravel(w), back(v), hparams, client_id)
                return ravel_pytree(params)[0]

            with bind_weights(task.frozen, rows.frozen):
                of_moved = jax.jacfwd(moved, (0, 1))(w, v)
                (v_of_w, v_of_v), (part_of_w, part_of_v) = of_moved
                model_of_w, model_of_v = jax.jacfwd(model, (0, 1))(w, v)
            part = moved(w, v)[1]
            return part, part_of_w, part_of_v, v_of_v, v_of_w, model_of_v, model_of_w

        ids = jnp.arange(m, dtype=jnp.int32)
        part, part_of_w, *partials = jax.lax.map(lambda of: of_client(*of), (state.of_clients, ids))
        first = jax.tree.map(lambda leaf: leaf[0], state.of_clients)
        client = program.client(state, hparams, rows, drawn)
        value = jax.eval_shape(lambda: maps.release(client(first, ids[0])[1], ids[0]))
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), value)
        zeros, back = ravel_pytree(nothing)
        contraction = jax.jacfwd(lambda w: maps.after(w, nothing))(w) + jnp.sum(part_of_w, axis=0)
        released = jax.jacfwd(lambda release: maps.after(w, back(release)))(zeros)
        return contraction, released, part, *partials

    return PersonalFunctions(fit, response)
