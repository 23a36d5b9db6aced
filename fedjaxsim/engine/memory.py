"""The memory of a program: arithmetic on shapes, and the compiler's own analysis.

`bytes_of_work` estimates what one client of a batch needs. It runs while a program is traced, so
layouts and the cuts of sweeps use it. `memory_of` asks the compiler and serves plans.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from fedjaxsim.hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from fedjaxsim.engine.program import Program
    from fedjaxsim.engine.rows import Rows

PyTree = Any

_STATE_COPIES = 2
"""The state, and a copy of it while it is made, evaluated or saved."""
_ROW_COPIES = 4
"""A client's personal state: gathered, in the loop, updated, and scattered back."""
_MESSAGE_COPIES = 2
"""A client's message: scaled to its bound, and added to the sum."""
_MANY = 1000
"""Runs in a program whose memory matters."""


class Memory(NamedTuple):
    """Bytes of a program on one device.

    Attributes:
      states: what clients keep from round to round.
      server: the rest of the state.
      rounds: working memory of rounds, beyond state and rows.
      evaluation: working memory of an evaluation, beyond state and rows.
      metrics: the metrics that an evaluation returns, contained in `evaluation`.
      compiled: the compiled programs; the process holds them as long as this record.
    """

    states: int
    server: int
    rounds: int
    evaluation: int
    metrics: int
    compiled: tuple[Any, ...]


def memory_of(program: "Program", hparams: Hyperparameters, rows: Mapping[str, "Rows"]) -> Memory:
    """Compute the memory of a program; nothing is allocated on a device.

    Args:
      program: for one device.
      hparams: of a run.
      rows: rows by split, or their shapes: "train" for rounds, "test" for an evaluation. Without
        one of them its working memory is 0.

    Raises:
      ValueError: if the compiler of this machine's devices has no memory analysis.
    """
    hparams = hparams.as_arrays()
    state = jax.eval_shape(program.init, _key(), hparams)
    functions: Any = program.compiled()
    rounds = metrics = evaluation = 0
    compiled = []
    if "train" in rows:
        lowered = functions.rounds.lower(state, hparams, rows["train"], rounds=2)
        compiled.append(lowered.compile())
        rounds = _working_bytes(compiled[-1])
    if "test" in rows:
        lowered = functions.evaluate.lower(state, hparams, rows["test"])
        compiled.append(lowered.compile())
        evaluation, metrics = _working_bytes(compiled[-1]), bytes_of(lowered.out_info)
    states = bytes_of((state.personal, state.consumed))
    server = bytes_of(state) - states
    return Memory(states, server, rounds, evaluation, metrics, tuple(compiled))


def _working_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("the compiler of this machine's devices has no memory analysis")
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + outputs


def bytes_per_run(program: "Program", hparams: Hyperparameters, rows: "Rows") -> int:
    """Estimate from above the bytes that one more run in a batched program needs.

    Args:
      program: the program of one run.
      hparams: of any of the runs.
      rows: the training rows, or their shapes.
    """
    hparams = hparams.as_arrays()
    state = jax.eval_shape(program.init, _key(), hparams)
    row_bytes = bytes_of(state.personal) / program.num_clients
    layout = program.layout.for_settings(_MANY, _MANY * row_bytes)
    batch = 1 if layout.scans else layout.chunk_size
    return _STATE_COPIES * bytes_of(state) + batch * program.client_bytes(hparams, rows)


def bytes_of_work(jaxpr: Any, row: PyTree, message: PyTree = ()) -> int:
    """Estimate from above the bytes that one client of a batch needs at once.

    It counts every intermediate value as if all of them lived at the same time, and copies of the
    client's personal state and message.

    Args:
      jaxpr: jaxpr of the work of one client.
      row: the client's personal state, or its shapes.
      message: the client's message, or its shapes.
    """
    copies = _ROW_COPIES * bytes_of(row) + _MESSAGE_COPIES * bytes_of(message)
    return intermediate_bytes(jaxpr) + copies


def intermediate_bytes(jaxpr: Any) -> int:
    """Compute the bytes of all intermediate values of a jaxpr, those of a loop once."""
    total = 0
    for equation in jaxpr.eqns:
        total += bytes_of([variable.aval for variable in equation.outvars])
        total += sum(map(intermediate_bytes, jaxprs_in_params(equation.params)))
    return total


def bytes_of(arrays: PyTree) -> int:
    """Compute the bytes of a pytree of arrays, or of their shapes."""
    leaves = jax.tree.leaves(arrays)
    return sum(leaf.size * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves)


def _key() -> jax.Array:
    return jax.random.key(0, impl="threefry2x32")
