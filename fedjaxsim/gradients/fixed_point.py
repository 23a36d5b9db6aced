"""Derivatives of the limit of a run, by the implicit function theorem.

If every round is the same contraction s ↦ F(s, h) of the state, a long run ends at its fixed point
s* = F(s*, h). The derivative of s* along a direction dh of the hyperparameters solves
(I − ∂F/∂s) ds = ∂F/∂h dh (Griewank and Walther 2008, chapter 15; Bai, Kolter and Koltun 2019;
Lorraine, Vicol and Duvenaud 2020).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from scipy.sparse.linalg import LinearOperator, gmres

from fedjaxsim.engine.state import SimulationState
from fedjaxsim.gradients.objectives import Gradient, Objective, check_names
from fedjaxsim.gradients.reverse import floats
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.simulation import Simulation

_RESTART = 30
"""Vectors that GMRES keeps before it restarts."""
_MOST_RESTARTS = 100


def implicit_hypergradient(
    simulation: Simulation,
    objective: Objective,
    wrt: str | Sequence[str],
    *,
    tolerance: float | None = None,
) -> Callable[[SimulationState, Hyperparameters], tuple[jax.Array, Gradient]]:
    """Return the gradient of an objective at the fixed point of the rounds.

    Rounds must be deterministic and equal: full participation, full batches, no noise. Optimizers
    may keep a state, but a round must not depend on its number. GMRES solves one linear system for
    each name in `wrt`, on the host, with one derivative of one round per step: neither time nor
    memory depends on the number of rounds before.

    Rounds may conserve a quantity, such as w̃ minus η_s times the mean of the w_k in PMTL with
    updates. Then fixed points form a family, the system is singular, and the derivative is taken at
    the conserved value. It is refused for hyperparameters that the quantity depends on, such as
    this η_s and the level of PP-SGD, since it would depend on all earlier rounds.

    Args:
      simulation: the rounds.
      objective: `(state, hparams) -> ()`.
      wrt: names of hyperparameters, each ().
      tolerance: bound on the movement of the state in one round, relative to its norm, and on the
        relative residual of a linear system; by default the square root of the precision.

    Returns:
      A function `(state, hparams) -> (value, gradient)` of a state at the fixed point. It raises
      ValueError if a name has no derivative, a hyperparameter is out of range or brings noise, or
      the state is not at a fixed point; and RuntimeError if a system cannot be solved to the
      tolerance.

    Raises:
      ValueError: if sampling, minibatches or mechanism make rounds differ.
    """
    _require_equal_rounds(simulation)
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    objective = objective if isinstance(objective, Partial) else Partial(objective)
    if tolerance is None:
        tolerance = math.sqrt(float(jnp.finfo(jnp.result_type(float)).eps))
    a_round, measure = _compile(simulation)
    rows = simulation.rows["train"]

    def function(state, hparams):
        check_names(names, hparams)
        simulation.check(hparams)
        z = hparams.get("noise_multiplier", 0.0)
        if "noise_multiplier" in names or np.any(np.asarray(z) > 0):
            raise ValueError(
                "with noise there is no fixed point: noise_multiplier must be 0 and not vary, got "
                f"{z}"
            )
        hparams = hparams.as_arrays()
        point, fixed = _vector(state), jax.tree.map(jnp.zeros_like, hparams)
        still, scale = np.zeros_like(point), max(float(np.linalg.norm(point)), 1.0)

        def of_round(at, along, direction):
            """Run a round and its derivative along a change of state and hparams."""
            values = a_round(at, along, state, hparams, direction, rows)
            return [np.array(value) for value in values]  # copies: GMRES writes into them

        def solve(right):
            """Apply (I − ∂F/∂s)⁻¹ to a vector; also return the relative residual."""
            size = max(float(np.linalg.norm(right)), tolerance * scale)

            def left(v):
                return v - of_round(point, v.reshape(-1).astype(point.dtype), fixed)[1]

            system = LinearOperator((point.size, point.size), left)
            solution, _ = gmres(
                system,
                right,
                rtol=0.0,
                atol=tolerance / 10 * size,
                restart=min(_RESTART, point.size),
                maxiter=_MOST_RESTARTS,
            )
            return solution, float(np.linalg.norm(system @ solution - right)) / size

        moved = float(np.linalg.norm(of_round(point, still, fixed)[0] - point)) / scale
        if not moved <= tolerance:
            raise ValueError(
                f"the state is not at a fixed point: a round still moves it by {moved:.2g} of its "
                f"norm, above the tolerance of {tolerance:.2g}; run more rounds first"
            )
        spread = scale / math.sqrt(point.size) / 10
        elsewhere = point + spread * np.random.default_rng(0).normal(size=point.size)
        gradient = {}
        for name in names:
            direction = fixed.replace(**{name: jnp.ones(())})
            # Conserved quantities are orthogonal to the range of the system: if ∂F/∂h leaves that
            # range anywhere, one of them depends on h.
            _, residual = solve(of_round(elsewhere, still, direction)[1])
            if not residual <= tolerance:
                raise ValueError(
                    f"rounds conserve something that depends on {name}, so the fixed point depends "
                    "on all earlier rounds: use hypergradient"
                )
            solution, residual = solve(of_round(point, still, direction)[1])
            if not residual <= tolerance:
                raise RuntimeError(
                    f"GMRES left a relative residual of {residual:.2g} for {name}, above the "
                    f"tolerance of {tolerance:.2g}: the fixed point is not isolated, or nearly so"
                )
            gradient[name] = measure(point, solution, state, hparams, direction, objective)[1]
        return objective(state, hparams), gradient

    return function


def _moving(state: SimulationState):
    """Return the arrays that rounds change, and a function that replaces them."""
    return floats((state.shared, state.personal, state.mechanism))


def _vector(state: SimulationState) -> np.ndarray:
    return np.asarray(ravel_pytree(_moving(state)[0])[0])


def _compile(simulation: Simulation):
    """Return a round and an objective as functions of a vector and hparams, with derivatives.

    Both are `(vector, its direction, state, hparams, its direction, rows or objective) ->
    (value, derivative)`; the vector replaces the moving arrays of the state.
    """
    program = simulation.program.with_capped_batches()

    def put(vector, state):
        leaves, replace = _moving(state)
        shared, personal, mechanism = replace(ravel_pytree(leaves)[1](vector))
        return dataclasses.replace(state, shared=shared, personal=personal, mechanism=mechanism)

    @jax.jit
    def a_round(vector, along, state, hparams, direction, rows):
        def after(vector, hparams):
            new, _ = program.step(put(vector, state), hparams, rows)
            return ravel_pytree(_moving(new)[0])[0]

        return jax.jvp(after, (vector, hparams), (along, direction))

    @jax.jit
    def measure(vector, along, state, hparams, direction, objective):
        def at(vector, hparams):
            return objective(put(vector, state), hparams)

        return jax.jvp(at, (vector, hparams), (along, direction))

    return a_round, measure


def _require_equal_rounds(simulation: Simulation) -> None:
    """Raise ValueError if anything is drawn in a round."""
    if not simulation.sampler.takes_all:
        raise ValueError(
            "a fixed point needs all clients in every round, got "
            f"{simulation.sampler.scheme.kind!r} sampling or clients that do not always answer"
        )
    largest = int(simulation.population.splits["train"].count.max())
    minibatches = simulation.minibatches
    fresh = simulation.population.generate is not None
    if fresh or minibatches.epochs is None or minibatches.size < largest:
        raise ValueError(
            "a fixed point needs full batches: epochs with a batch size of at least "
            f"{largest}, the rows of the largest client, got {minibatches}"
        )
    kind = simulation.mechanism.event.kind
    if kind not in ("gaussian", "no_release"):
        raise ValueError(f"a fixed point needs a mechanism without noise at z = 0, got {kind!r}")
