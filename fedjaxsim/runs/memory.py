"""How much memory one more run in a program takes, told from shapes alone."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from fedjaxsim.algorithm import Context
from fedjaxsim.engine.layout import bytes_of
from fedjaxsim.fast.products import unsealed
from fedjaxsim.hparams import Hyperparameters
from fedjaxsim.simulation import Simulation

_STATE_COPIES = 2
"""The state, and a copy of it while it is made or saved."""
_ROW_COPIES = 4
"""The personal states of a chunk: gathered, in the loop, updated, and on their way back."""
_MANY = 1000
"""Runs of a program for which memory matters."""


def bytes_per_run(simulation: Simulation, hparams: Hyperparameters) -> int:
    """An estimate from above of what one more run in a program needs, in bytes.

    It counts the state, the personal states of one chunk of clients, and every intermediate value
    of one client's round (loops once), as if all of them lived at the same time.

    Args:
      simulation: what is run.
      hparams: of any of the runs.
    """
    program, rows = simulation.program, simulation.rows["train"]
    hparams = hparams.as_arrays()
    key = jax.random.key(0, impl="threefry2x32")

    def one(key, hparams, rows):
        shared, personal = program.algorithm.init(key, hparams)
        client_id = jnp.int32(0)
        data = rows.of(client_id, key, program.minibatches, program.layout, jnp.int32(0), key)
        context = Context(jnp.int32(0), key, client_id, program.num_clients)
        return unsealed(program.algorithm.client(shared, personal, data, hparams, context))

    state = jax.eval_shape(program.init, key, hparams)
    personal, shared = bytes_of(state.personal), bytes_of((state.shared, state.mechanism))
    client = _intermediate_bytes(jax.make_jaxpr(one)(key, hparams, rows).jaxpr)
    layout = simulation.layout_of(_MANY)
    at_once = 1 if layout.scans else layout.chunk_size
    rows_of_chunk = layout.chunk_size * personal // program.num_clients
    return _STATE_COPIES * (personal + 4 * shared) + _ROW_COPIES * rows_of_chunk + at_once * client


def _intermediate_bytes(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        total += bytes_of([variable.aval for variable in equation.outvars])
        total += sum(map(_intermediate_bytes, jaxprs_in_params(equation.params)))
    return total
