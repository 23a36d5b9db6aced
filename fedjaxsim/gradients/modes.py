"""Ways to differentiate a run: forward mode and reverse mode.

Reverse mode recomputes a client's work instead of keeping it (`Plan.rematerialize`), and so the
rounds of a segment (Griewank 1992; Chen, Xu, Zhang, Guestrin 2016). Kept are the cohort's rows and
the server state of each round in one segment, and the state at the start of every segment.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.engine.layout import Plan
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters, client_values
from fedjaxsim.kernels.products import unsealed

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Forward:
    """Forward mode, for few numbers.

    It carries a derivative of the state for every number through the rounds. Its time grows with
    their number; its memory does not grow with T.
    """

    def program(self, program: Program, rows: Rows) -> Program:
        """Return the program that is differentiated, of these training rows."""
        plan = dataclasses.replace(program.plan, capped=True)
        return dataclasses.replace(program, plan=plan)

    def segment_length(self, program: Program, state: SimulationState, rounds: int) -> int:
        """Return the number of rounds that are recomputed together."""
        return rounds

    def differentiate(self, value: Callable[..., jax.Array]) -> Callable[..., Any]:
        """Return the compiled function of a value and its derivatives in the first argument."""

        def twice(*arguments: Any):
            result_twice = value(*arguments)
            return result_twice, result_twice

        return jax.jit(lambda *arguments: jax.jacfwd(twice, has_aux=True)(*arguments)[::-1])


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

    def program(self, program: Program, rows: Rows) -> Program:
        """Return the program that is differentiated; forward mode does not apply to it.

        A message that is not finite counts as zero, and so does its derivative. Plain reverse mode
        would multiply that zero by infinite derivatives of the client's work: NaN for all.
        """
        plan = dataclasses.replace(bounded(program.plan, rows), rematerialize=True)
        return dataclasses.replace(program, algorithm=_guarded(program.algorithm), plan=plan)

    def segment_length(self, program: Program, state: SimulationState, rounds: int) -> int:
        """Return the number of rounds that are recomputed together.

        Segments of L rounds keep T/L states of S bytes and L rounds of R bytes each: least at
        L = √(T·S/R). With full participation that is about √T; with a state much larger than the
        cohort's part of it, there is only one segment.
        """
        if self.segment is not None:
            return self.segment
        state_bytes = bytes_of(state)
        cohort = program.sampling.scheme.capacity / program.num_clients
        # A round keeps the cohort's rows, the server state, and noise of its size.
        round_bytes = cohort * bytes_of(state.personal) + 2 * bytes_of(state.shared) + 1
        best = min(rounds, max(1.0, math.sqrt(rounds * state_bytes / round_bytes)))
        near = [n for n in range(1, rounds + 1) if rounds % n == 0 and best / 2 <= n <= best * 2]
        # A rest would be one more program to compile, so divisors of T come first.
        return min(near, key=lambda n: abs(math.log(n / best))) if near else round(best)

    def differentiate(self, value: Callable[..., jax.Array]) -> Callable[..., Any]:
        """Return the compiled function of a value and its derivatives in the first argument."""
        return jax.jit(jax.value_and_grad(value))


Mode = Forward | Reverse


def bounded(plan: Plan, rows: Rows) -> Plan:
    """Return the plan with the largest client's rows as a static bound of loops."""
    counts = (np.max(np.asarray(split_rows.count)) for split_rows in (rows, rows.of_training()))
    most_rows = max(1, int(max(counts)))
    return dataclasses.replace(plan, capped=True, most_rows=most_rows)


def run_rounds(
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
    remainder = rounds % segment
    return several(state, remainder) if remainder else state


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
        personal_leaves, put_kept = _floats(personal)
        sent, put_sent = _floats(unsealed(message))
        personal_leaves, sent = _leave(personal_leaves, sent, marker)
        return put_kept(personal_leaves), put_sent(sent), {}

    return algorithm._replace(client=client)


def _floats(tree: PyTree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
    """Return the leaves with derivatives, and a function that replaces them in the tree."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def put(leaves_put):
        changed = dict(zip(places, leaves_put, strict=True))
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
def _leave(personal: list[jax.Array], sent: list[jax.Array], marker: jax.Array):
    return personal, sent


def _leave_forward(personal, sent, marker):
    finite = jnp.array(True)
    for leaf in sent:
        finite &= jnp.all(jnp.isfinite(leaf))
    return _leave(personal, sent, marker), (finite, marker)


def _leave_backward(residuals, cotangents):
    finite, marker = residuals
    personal, sent = cotangents
    sent = [jnp.where(finite, leaf, 0) for leaf in sent]
    nothing_left = jnp.array(True)
    for leaf in [*personal, *sent]:
        nothing_left &= jnp.all(leaf == 0)
    return personal, sent, nothing_left.astype(marker.dtype)


_enter.defvjp(lambda *inputs: (_enter(*inputs), None), _enter_backward)
_leave.defvjp(_leave_forward, _leave_backward)
