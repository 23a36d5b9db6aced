"""An estimate of the memory of one more run in a batched program, from shapes alone."""

import jax

from fedjaxsim.data.population import Population
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.hyperparameters import Hyperparameters

_STATE_COPIES = 2
"""The state, and a copy of it while it is initialized, evaluated or saved."""
_MANY = 1000
"""Number of runs for which the layout is chosen: memory matters with many runs."""


def bytes_per_run(program: Program, population: Population, hparams: Hyperparameters) -> int:
    """Estimate from above the bytes that one more run in a batched program needs.

    Args:
      program: of one run.
      population: the clients.
      hparams: hyperparameters of any of the runs.
    """
    hparams = hparams.as_arrays()
    rows = Rows.shapes(population, "train", program.algorithm)
    state = jax.eval_shape(program.init, jax.random.key(0, impl="threefry2x32"), hparams)
    row_bytes = bytes_of(state.personal) / program.num_clients
    layout = program.workload.layout(_MANY, _MANY * row_bytes)
    batch = 1 if layout.scans else layout.chunk_size
    return _STATE_COPIES * bytes_of(state) + batch * program.client_bytes(hparams, rows)
