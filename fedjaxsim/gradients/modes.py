"""Ways to differentiate a run: forward mode, reverse mode, and at its fixed point."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import gmres

from fedjaxsim import checks
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.gradients.reverse import bounded, floats, reversible, run_rounds, segment_length
from fedjaxsim.hyperparameters import Hyperparameters, on_host

Differentiated = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""(chosen, rows, objective, epsilon, key, hparams) -> (value, derivatives by `chosen`)."""


class Run(NamedTuple):
    """A run that is differentiated.

    Attributes:
      program: its program.
      begin: `(chosen, epsilon, key, hparams) -> (first state, hparams with the chosen ones)`.
      rows: the training rows.
      rounds: T.
    """

    program: Program
    begin: Callable[..., tuple[SimulationState, Hyperparameters]]
    rows: Rows
    rounds: int

    def value(
        self, program: Program, segment: Callable[[SimulationState], int] | None = None
    ) -> Callable[..., jax.Array]:
        """Return the objective after the run, a function of the arguments of `Differentiated`."""

        def value(chosen, rows, objective, *given):
            state, hparams = self.begin(chosen, *given)
            length = self.rounds if segment is None else segment(state)
            state = run_rounds(program, state, hparams, rows, self.rounds, length)
            return objective(state, hparams)

        return value


class Mode(Protocol):
    """A way to differentiate a run."""

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a compiled function."""
        ...

    def runs(self, count: int) -> int:
        """Return about how many runs the derivatives of `count` numbers take."""
        ...


@dataclasses.dataclass(frozen=True)
class Forward:
    """Forward mode, for few numbers.

    It carries a derivative of the state for every number through the rounds. Its time grows with
    their number; its memory does not grow with T.
    """

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a compiled function."""
        value = run.value(run.program)

        def twice(*arguments: Any):
            found = value(*arguments)
            return found, found

        def differentiate(*arguments: Any):
            gradient, found = jax.jacfwd(twice, has_aux=True)(*arguments)
            return found, gradient

        return jax.jit(differentiate)

    def runs(self, count: int) -> int:
        """Return about how many runs the derivatives of `count` numbers take."""
        return 1 + count


@dataclasses.dataclass(frozen=True)
class Reverse:
    """Reverse mode, for many numbers.

    It takes two to four times the time of a run for any number of derivatives, and keeps part of
    every round; see `reverse.segment_length`.

    Args:
      segment: number of rounds that are recomputed together; by default the number that needs the
        least memory. T keeps all rounds, which saves a third of the time.

    Raises:
      ValueError: if the segment is below 1.
    """

    segment: int | None = None

    def __post_init__(self):
        if self.segment is not None:
            checks.count(segment=self.segment)

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a compiled function."""
        program = reversible(run.program, run.rows)

        def length(state: SimulationState) -> int:
            return self.segment or segment_length(program, state, run.rounds)

        return jax.jit(jax.value_and_grad(run.value(program, length)))

    def runs(self, count: int) -> int:
        """Return about how many runs the derivatives take: two forwards and two back."""
        return 4


class Implicit:
    """Implicit differentiation of the fixed point that T rounds lead to (Bai et al. 2019).

    For s* = F(s*, h) it solves (I − ∂F/∂s) ds* = ∂F/∂h dh, one linear system a number.
    Rounds must be equal: full participation, full batches, no noise. Each step of GMRES takes one
    derivative of one round, whatever T is. Where rounds conserve a quantity, such as w̃ minus η_s
    times the mean of the w_k in PMTL with updates, numbers that change it are refused.

    The differentiated function raises ValueError if a round moves the state, or a system keeps a
    residual, by more than √precision, relatively; inside jit its derivatives are then NaN.
    """

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a function."""
        parts, most = run.program, int(np.max(np.asarray(run.rows.count)))
        batches, scheme, kind = parts.minibatches, parts.sampling.scheme, parts.mechanism.event.kind
        whole = run.rows.generate is None and batches.epochs is not None and batches.size >= most
        if not (parts.sampling.takes_all and whole and kind in ("gaussian", "no_release")):
            raise ValueError(
                f"a fixed point needs all clients, full batches (epochs, and a size of at least "
                f"{most}) and no noise, got {scheme.kind!r} sampling, {batches} and {kind!r}"
            )
        # The solver transposes the system, so loops need a static bound.
        run = run._replace(program=replace(parts, workload=bounded(parts.workload, run.rows)))
        solve = jax.jit(lambda *given: _solve(run, *given))

        def differentiate(chosen, rows, objective, epsilon, key, hparams):
            z = on_host(hparams.get("noise_multiplier", 0.0))
            if epsilon is not None or "noise_multiplier" in chosen or np.any(z):
                raise ValueError(f"with noise there is no fixed point: z must be 0, got {z}")
            value, slopes, moves = solve(chosen, rows, objective, key, hparams)
            for name, slope in ({} if on_host(moves) is None else slopes).items():
                if np.isnan(slope).any():
                    fixed = "rounds conserve something that depends on it: use Forward()"
                    why = "a round still moves the state: run more rounds" if moves else fixed
                    raise ValueError(f"no derivative in {name}: {why}")
            return value, slopes

        return differentiate

    def runs(self, count: int) -> int:
        """Return about how many runs the derivatives take: one."""
        return 1


def _solve(run, chosen, rows, objective, key, hparams):
    """Return the value, the derivatives, and whether a round still moves the state."""
    first, hparams = run.begin(chosen, None, key, hparams)
    last = run_rounds(run.program, first, hparams, rows, run.rounds, run.rounds)
    (start, _), (point, put), (numbers, named) = _vector(first), _vector(last), ravel_pytree(chosen)

    def after(at, numbers):
        return _vector(run.program.step(put(at), hparams.replace(**named(numbers)), rows)[0])[0]

    def measure(at, numbers):
        return objective(put(at), hparams.replace(**named(numbers)))

    def slope(direction):
        def system(at):
            right = jax.jvp(lambda numbers: after(at, numbers), (numbers,), (direction,))[1]
            right /= (size := jnp.maximum(jnp.linalg.norm(right), bound * scale))
            found, _ = gmres(lambda v: v - push(v), right, tol=0.0, atol=bound / 10, maxiter=100)
            return found * size, jnp.linalg.norm(found - push(found) - right) <= bound

        # Conserved quantities are orthogonal to the range of the system: if ∂F/∂h leaves that
        # range anywhere, as at the first state, one of them depends on h.
        (solution, here), (_, there) = system(point), system(start)
        found = jax.jvp(measure, (point, numbers), (solution, direction))[1]
        return jnp.where(here & there & ~moves, found, jnp.nan)

    bound = float(jnp.finfo(point.dtype).eps) ** 0.5
    new, push = jax.linearize(lambda at: after(at, numbers), point)
    scale = jnp.maximum(jnp.linalg.norm(point), 1.0)
    moves = ~(jnp.linalg.norm(new - point) <= bound * scale)
    slopes = jax.lax.map(slope, jnp.eye(numbers.size, dtype=numbers.dtype))
    return measure(point, numbers), named(slopes), moves


def _vector(state):
    """Return the numbers that rounds change, and a function from them to a state."""
    names = "shared", "personal", "mechanism"
    leaves, replaced = floats([getattr(state, name) for name in names])
    vector, split = ravel_pytree(leaves)
    return vector, lambda at: replace(state, **dict(zip(names, replaced(split(at)), strict=True)))
