"""Derivatives of the limit of a run, by the implicit function theorem.

If every round is the same contraction s ↦ F(s, h) of the state, a long run ends at its fixed point
s* = F(s*, h). The derivative of s* along a direction dh of the hyperparameters solves
(I − ∂F/∂s) ds = ∂F/∂h dh (Griewank and Walther 2008, chapter 15; Bai, Kolter and Koltun 2019;
Lorraine, Vicol and Duvenaud 2020).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import gmres

from fedjaxsim.gradients.modes import Differentiated, Run
from fedjaxsim.gradients.reverse import bounded, floats, run_rounds
from fedjaxsim.hyperparameters import on_host


@dataclasses.dataclass(frozen=True)
class Implicit:
    """Differentiation of the fixed point that T rounds lead to, by one linear system a number.

    Rounds must be deterministic and equal: full participation, full batches, no noise. Optimizers
    may keep a state, but a round must not depend on its number. The T rounds run without
    derivatives. Each step of GMRES then takes one derivative of one round, whatever T is.

    Rounds may conserve a quantity, such as w̃ minus η_s times the mean of the w_k in PMTL with
    updates. Then fixed points form a family, the system is singular, and the derivative is taken at
    the conserved value. It is refused for hyperparameters that the quantity depends on, such as
    this η_s, since it would depend on all earlier rounds.

    The differentiated function raises ValueError if a round still moves the state or a system has
    no solution; inside jit its derivatives are then NaN.

    Args:
      tolerance: bound on the movement of the state in one round, relative to its norm, and on the
        relative residual of a system; by default the square root of the precision.
    """

    tolerance: float | None = None

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a function.

        Raises:
          ValueError: if sampling, minibatches or mechanism make rounds differ.
        """
        if why := _unequal_rounds(run):
            raise ValueError(f"a fixed point needs {why}")
        tolerance = self.tolerance or float(jnp.finfo(jnp.result_type(float)).eps) ** 0.5
        solve = _solver(run, tolerance)

        def differentiate(chosen, rows, objective, epsilon, key, hparams):
            z = on_host(hparams.get("noise_multiplier", 0.0))
            if epsilon is not None or "noise_multiplier" in chosen or np.any(z):
                raise ValueError(
                    "with noise there is no fixed point: noise_multiplier must be 0, and neither "
                    f"it nor epsilon can vary, got {z}"
                )
            value, gradient, moved, residuals = solve(chosen, rows, objective, key, hparams)
            if (known := on_host(moved)) is not None and not known <= tolerance:
                raise ValueError(
                    f"no fixed point after {run.rounds} rounds: another one moves the state by "
                    f"{known:.2g} of its norm, more than {tolerance:.2g}; run more rounds"
                )
            for name, each in residuals.items():
                if (known := on_host(each)) is not None and not known <= tolerance:
                    raise ValueError(
                        f"no derivative in {name}: GMRES leaves a residual of {known:.2g}, more "
                        f"than {tolerance:.2g}; rounds conserve something that depends on it, or "
                        "the fixed point is not isolated. Use forward mode"
                    )
            return value, gradient

        return differentiate

    def runs(self, count: int) -> int:
        """Return about how many runs the derivatives take: one."""
        del count
        return 1


def _solver(run: Run, tolerance: float):
    """Return a compiled function with derivatives, a round's movement, and largest residuals."""
    # The solver transposes the system, so loops need a static bound.
    program = dataclasses.replace(run.program, layout=bounded(run.program.layout, run.rows))

    @jax.jit
    def solve(chosen, rows, objective, key, hparams):
        first, hparams = run.begin(chosen, None, key, hparams)
        last = run_rounds(run.program, first, hparams, rows, run.rounds, run.rounds)
        numbers, by_name = ravel_pytree(chosen)
        (start, _), (point, put) = _vector(first), _vector(last)

        def after(vector, numbers):
            values = hparams.replace(**by_name(numbers))
            return _vector(program.step(put(vector), values, rows)[0])[0]

        def measure(vector, numbers):
            return objective(put(vector), hparams.replace(**by_name(numbers)))

        def derivative(direction):
            def system(right):
                size = jnp.maximum(jnp.linalg.norm(right), tolerance * scale)
                solution, _ = gmres(
                    lambda v: v - push(v),
                    right / size,
                    tol=0.0,
                    atol=tolerance / 10,
                    restart=min(30, point.size),
                    maxiter=100,
                    solve_method="incremental",
                )
                residual = jnp.linalg.norm(solution - push(solution) - right / size)
                return solution * size, residual

            def along(vector):
                return jax.jvp(lambda numbers: after(vector, numbers), (numbers,), (direction,))[1]

            # Conserved quantities are orthogonal to the range of the system: if ∂F/∂h leaves that
            # range anywhere, as at the first state, one of them depends on h.
            (solution, here), (_, there) = system(along(point)), system(along(start))
            slope = jax.jvp(measure, (point, numbers), (solution, direction))[1]
            good = (moved <= tolerance) & (here <= tolerance) & (there <= tolerance)
            return jnp.where(good, slope, jnp.nan), jnp.maximum(here, there)

        new, push = jax.linearize(lambda vector: after(vector, numbers), point)
        scale = jnp.maximum(jnp.linalg.norm(point), 1.0)
        moved = jnp.linalg.norm(new - point) / scale
        gradient, residuals = jax.lax.map(derivative, jnp.eye(numbers.size, dtype=numbers.dtype))
        return measure(point, numbers), by_name(gradient), moved, by_name(residuals)

    return solve


def _vector(state):
    """Return the numbers that rounds change, and a function from them to a state."""
    leaves, replace = floats((state.shared, state.personal, state.mechanism))
    vector, split = ravel_pytree(leaves)

    def put(vector):
        shared, personal, mechanism = replace(split(vector))
        return dataclasses.replace(state, shared=shared, personal=personal, mechanism=mechanism)

    return vector, put


def _unequal_rounds(run: Run) -> str:
    """Return what equal rounds lack; an empty string if nothing is drawn."""
    program, kind = run.program, run.program.mechanism.event.kind
    largest, minibatches = int(np.max(np.asarray(run.rows.count))), run.program.minibatches
    if not program.sampling.takes_all:
        return (
            f"all clients in every round, got {program.sampling.scheme.kind!r} sampling or clients "
            "that do not always answer"
        )
    fresh = run.rows.generate is not None
    if fresh or minibatches.epochs is None or minibatches.size < largest:
        return (
            f"full batches: epochs with a batch size of at least {largest}, the rows of the "
            f"largest client, got {minibatches}"
        )
    quiet = kind in ("gaussian", "no_release")
    return "" if quiet else f"a mechanism without noise at z = 0, got {kind!r}"
