"""What reverse mode needs of a run: clients whose derivatives are guarded, and rounds in segments.

Reverse mode walks through a run backwards, so it needs again what the rounds computed. A client's
work is done again instead of kept (`Layout.rematerialize`), and the rounds of a segment likewise
(Griewank 1992; Chen, Xu, Zhang, Guestrin 2016). What is left to keep are the cohort's rows and the
billboard of each round in one segment, and the state at the start of every segment.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.engine.layout import Layout
from fedjaxsim.engine.memory import bytes_of
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels.products import unsealed

PyTree = Any


def reversible(program: Program, rows: Rows) -> Program:
    """The program as reverse mode needs it; forward mode does not apply to it.

    A message that is not finite counts as zero, and so does its derivative. Plain reverse mode
    multiplies that zero by infinite derivatives of the client's work, which gives NaN for all.
    """
    layout = dataclasses.replace(bounded(program.layout, rows), rematerialize=True)
    return dataclasses.replace(program, algorithm=_guarded(program.algorithm), layout=layout)


def bounded(layout: Layout, rows: Rows) -> Layout:
    """The layout with static bounds of loops: no client has more rows than the largest one."""
    most_rows = max(1, int(np.max(np.asarray(rows.count))))
    return dataclasses.replace(layout.limited(), most_rows=most_rows)


def run_rounds(
    program: Program,
    state: SimulationState,
    hparams: Hyperparameters,
    rows: Rows,
    rounds: int,
    segment: int,
) -> SimulationState:
    """The state after so many rounds.

    Args:
      program: whose rounds are run.
      state: where to start.
      hparams: hyperparameters.
      rows: the training rows.
      rounds: T, how many.
      segment: rounds that reverse mode does again together; T or more to keep them all.
    """

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


def segment_length(program: Program, state: SimulationState, rounds: int) -> int:
    """The rounds of a segment with which reverse mode needs the least memory.

    Segments of L rounds keep T/L states of S bytes and L rounds of R bytes each: least at
    L = √(T·S/R). Everyone taking part, that is about √T; where the state of the population is
    large beside what one cohort reads of it, there is one segment only.

    Args:
      program: whose rounds are run.
      state: as shapes.
      rounds: T.
    """
    whole = bytes_of(state)
    cohort = program.sampling.scheme.capacity / program.num_clients
    # A round keeps the cohort's rows, the billboard, and the noise on something of its size.
    kept = cohort * bytes_of(state.personal) + 2 * bytes_of(state.shared) + 1
    best = min(rounds, max(1.0, math.sqrt(rounds * whole / kept)))
    near = [n for n in range(1, rounds + 1) if rounds % n == 0 and best / 2 <= n <= best * 2]
    # A divisor leaves no rest, which would be one more program to compile.
    return min(near, key=lambda n: abs(math.log(n / best))) if near else round(best)


# --- guarded clients ------------------------------------------------------------------------------


def _guarded(algorithm: Algorithm) -> Algorithm:
    """The algorithm, with `client` between two identities that see its cotangents.

    The backward pass meets `_leave` first. It removes the cotangents of a message that is not
    finite, and says on the marker's cotangent whether any are left; `_enter` reads that. They must
    be in one client's own pass: were what enters not mapped with the client, `jax.vmap` would add
    up the clients' cotangents before `_enter` sees them. The marker, made from the id, sees to it.
    """

    def client(shared, personal, data, hparams, context):
        marker = (context.client_id * 0).astype(float)
        read, put = floats((shared, personal, hparams))
        read, marker = _enter(read, marker)
        shared, personal, hparams = put(read)
        personal, message, _ = algorithm.client(shared, personal, data, hparams, context)
        kept, put_kept = floats(personal)
        sent, put_sent = floats(unsealed(message))
        kept, sent = _leave(kept, sent, marker)
        return put_kept(kept), put_sent(sent), {}

    return algorithm._replace(client=client)


def floats(tree: PyTree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
    """The leaves that have derivatives, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def put(new):
        changed = dict(zip(places, new, strict=True))
        return structure.unflatten([changed.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], put


@jax.custom_vjp
def _enter(read: list[jax.Array], marker: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """What a client reads, and the marker: zeros that belong to the client."""
    return [leaf + marker.astype(leaf.dtype) for leaf in read], marker


def _enter_forward(read, marker):
    return _enter(read, marker), None


def _enter_backward(_, cotangents):
    read, nothing_left = cotangents
    return [jnp.where(nothing_left > 0, 0, leaf) for leaf in read], jnp.zeros_like(nothing_left)


@jax.custom_vjp
def _leave(kept: list[jax.Array], sent: list[jax.Array], marker: jax.Array):
    """What a client keeps and sends, as they are."""
    del marker
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


_enter.defvjp(_enter_forward, _enter_backward)
_leave.defvjp(_leave_forward, _leave_backward)
