"""The memory of a program by the compiler's analysis, and an estimate of one more run's."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.setup import Setup
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.hyperparameters import Hyperparameters

PyTree = Any

_STATE_COPIES = 2
"""The state, and a copy of it while it is initialized, evaluated or saved."""
_MANY = 1000
"""Number of runs for which the layout is chosen: memory matters with many runs."""


class Memory(NamedTuple):
    """Bytes of a program on one device.

    Attributes:
      states: the clients' parts of the state.
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


def memory_of(program: Program, hparams: Hyperparameters, rows: Mapping[str, Rows]) -> Memory:
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


def bytes_per_run(setup: Setup, hparams: Hyperparameters) -> int:
    """Estimate from above the bytes that one more run in a batched program needs.

    Args:
      setup: the setup of one run.
      hparams: hyperparameters of any of the runs.
    """
    hparams, program = hparams.as_arrays(), setup.program
    rows = Rows.shapes(setup.population, "train", setup.algorithm)
    state = jax.eval_shape(program.init, _key(), hparams)
    row_bytes = bytes_of(state.personal) / program.num_clients
    layout = program.layout.for_settings(_MANY, _MANY * row_bytes)
    batch = 1 if layout.scans else layout.chunk_size
    return _STATE_COPIES * bytes_of(state) + batch * program.client_bytes(hparams, rows)


def _key() -> jax.Array:
    return jax.random.key(0, impl="threefry2x32")
