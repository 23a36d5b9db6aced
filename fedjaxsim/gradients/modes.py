"""Ways to differentiate a run: forward mode, reverse mode, and at its fixed point.

Reverse mode recomputes a client's work instead of keeping it (`Workload.rematerialize`), and so the
rounds of a segment (Griewank 1992; Chen, Xu, Zhang, Guestrin 2016). Kept are the cohort's rows and
the server state of each round in one segment, and the state at the start of every segment.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import gmres

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.engine.layout import Workload
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters, client_values, on_host
from fedjaxsim.kernels.products import unsealed

PyTree = Any


def reversible(program: Program, rows: Rows) -> Program:
    """Return the program for reverse mode; forward mode does not apply to it.

    A message that is not finite counts as zero, and so does its derivative. Plain reverse mode
    would multiply that zero by infinite derivatives of the client's work and give NaN for all.
    """
    workload = dataclasses.replace(bounded(program.workload, rows), rematerialize=True)
    return dataclasses.replace(program, algorithm=_guarded(program.algorithm), workload=workload)


def bounded(workload: Workload, rows: Rows) -> Workload:
    """Return the workload with the largest client's rows as a static bound of loops."""
    counts = (np.max(np.asarray(each.count)) for each in (rows, rows.of_training()))
    most_rows = max(1, int(max(counts)))
    return dataclasses.replace(workload, capped=True, most_rows=most_rows)


def _run_rounds(
    program: Program,
    state: SimulationState,
    hparams: Hyperparameters,
    rows: Rows,
    rounds: int,
    segment: int,
) -> SimulationState:
    """Run T rounds and return the state; reverse mode recomputes `segment` rounds together."""

    def several(state, length):
        def one(state, _):
            return program.step(state, hparams, rows)[0], None

        return jax.lax.scan(one, state, length=length)[0]

    if segment >= rounds:
        return several(state, rounds)
    again = jax.checkpoint(lambda state, _: (several(state, segment), None), prevent_cse=False)
    state, _ = jax.lax.scan(again, state, length=rounds // segment)
    rest = rounds % segment
    return several(state, rest) if rest else state


def _segment_length(program: Program, state: SimulationState, rounds: int) -> int:
    """Return the rounds of a segment with which reverse mode needs the least memory.

    Segments of L rounds keep T/L states of S bytes and L rounds of R bytes each: least at
    L = √(T·S/R). With full participation that is about √T; with a state much larger than the
    cohort's part of it, there is only one segment.
    """
    whole = bytes_of(state)
    cohort = program.sampling.scheme.capacity / program.num_clients
    # A round keeps the cohort's rows, the server state, and noise of its size.
    kept = cohort * bytes_of(state.personal) + 2 * bytes_of(state.shared) + 1
    best = min(rounds, max(1.0, math.sqrt(rounds * whole / kept)))
    near = [n for n in range(1, rounds + 1) if rounds % n == 0 and best / 2 <= n <= best * 2]
    # A rest would be one more program to compile, so divisors of T come first.
    return min(near, key=lambda n: abs(math.log(n / best))) if near else round(best)


def _guarded(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with `client` between two identities that see its cotangents.

    The backward pass meets `_leave` first: it removes the cotangents of a message that is not
    finite, and the marker's cotangent tells `_enter` whether any are left. The marker is made from
    the client id, so that `jax.vmap` maps the inputs with the client; otherwise it would sum the
    clients' cotangents before `_enter` sees them.
    """

    def client(shared, personal, data, hparams, context):
        marker = (context.client_id * 0).astype(float)
        hparams = client_values(algorithm.hyperparameters, hparams, context.client_id)
        read, put = _floats((shared, personal, hparams))
        read, marker = _enter(read, marker)
        shared, personal, hparams = put(read)
        personal, message, _ = algorithm.client(shared, personal, data, hparams, context)
        kept, put_kept = _floats(personal)
        sent, put_sent = _floats(unsealed(message))
        kept, sent = _leave(kept, sent, marker)
        return put_kept(kept), put_sent(sent), {}

    return algorithm._replace(client=client)


def _floats(tree: PyTree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
    """Return the leaves with derivatives, and a function that replaces them in the tree."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def put(new):
        changed = dict(zip(places, new, strict=True))
        return structure.unflatten([changed.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], put


@jax.custom_vjp
def _enter(read: list[jax.Array], marker: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return the inputs of a client plus the marker, which is zero."""
    return [leaf + marker.astype(leaf.dtype) for leaf in read], marker


def _enter_backward(_, cotangents):
    read, nothing_left = cotangents
    return [jnp.where(nothing_left > 0, 0, leaf) for leaf in read], jnp.zeros_like(nothing_left)


@jax.custom_vjp
def _leave(kept: list[jax.Array], sent: list[jax.Array], marker: jax.Array):
    return kept, sent


def _leave_forward(kept, sent, marker):
    finite = jnp.array(True)
    for leaf in sent:
        finite &= jnp.all(jnp.isfinite(leaf))
    return _leave(kept, sent, marker), (finite, marker)


def _leave_backward(residuals, cotangents):
    finite, marker = residuals
    kept, sent = cotangents
    sent = [jnp.where(finite, leaf, 0) for leaf in sent]
    nothing_left = jnp.array(True)
    for leaf in [*kept, *sent]:
        nothing_left &= jnp.all(leaf == 0)
    return kept, sent, nothing_left.astype(marker.dtype)


_enter.defvjp(lambda *inputs: (_enter(*inputs), None), _enter_backward)
_leave.defvjp(_leave_forward, _leave_backward)


Differentiated = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""(chosen, rows, objective, epsilon, key, hparams) -> (value, derivatives by `chosen`)."""


class Run(NamedTuple):
    """A run of T rounds that is differentiated.

    `begin` is `(chosen, epsilon, key, hparams) -> (first state, hparams with the chosen ones)`.
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
            state = _run_rounds(program, state, hparams, rows, self.rounds, length)
            return objective(state, hparams)

        return value


class Mode(Protocol):
    """A way to differentiate a run."""

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a compiled function."""
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

        return jax.jit(lambda *given: jax.jacfwd(twice, has_aux=True)(*given)[::-1])


@dataclasses.dataclass(frozen=True)
class Reverse:
    """Reverse mode, for many numbers.

    It takes two to four times the time of a run for any number of derivatives, and keeps part of
    every round.

    Args:
      segment: number of rounds that are recomputed together, at least 1; by default the number that
        needs the least memory. T keeps all rounds, which saves a third of the time.
    """

    segment: int | None = None

    def __post_init__(self):
        if self.segment is not None:
            checks.count(segment=self.segment)

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a compiled function."""
        program = reversible(run.program, run.rows)

        def length(state: SimulationState) -> int:
            return self.segment or _segment_length(program, state, run.rounds)

        return jax.jit(jax.value_and_grad(run.value(program, length)))


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


def _solve(run, chosen, rows, objective, key, hparams):
    """Return the value, the derivatives, and whether a round still moves the state."""
    first, hparams = run.begin(chosen, None, key, hparams)
    last = _run_rounds(run.program, first, hparams, rows, run.rounds, run.rounds)
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
    leaves, replaced = _floats([getattr(state, name) for name in names])
    vector, split = ravel_pytree(leaves)
    return vector, lambda at: replace(state, **dict(zip(names, replaced(split(at)), strict=True)))
