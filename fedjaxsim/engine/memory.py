"""An estimate of the memory of one more run in a batched program, from shapes alone."""

import jax

from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.setup import Setup
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.hyperparameters import Hyperparameters

_STATE_COPIES = 2
"""The state, and a copy of it while it is initialized, evaluated or saved."""
_MANY = 1000
"""Number of runs for which the layout is chosen: memory matters with many runs."""


def bytes_per_run(setup: Setup, hparams: Hyperparameters) -> int:
    """Estimate from above the bytes that one more run in a batched program needs.

    Args:
      setup: the setup of one run.
      hparams: hyperparameters of any of the runs.
    """
    hparams, program = hparams.as_arrays(), setup.program
    rows = Rows.shapes(setup.population, "train", setup.algorithm)
    state = jax.eval_shape(program.init, jax.random.key(0, impl="threefry2x32"), hparams)
    row_bytes = bytes_of(state.personal) / program.num_clients
    layout = program.layout.for_settings(_MANY, _MANY * row_bytes)
    batch = 1 if layout.scans else layout.chunk_size
    return _STATE_COPIES * bytes_of(state) + batch * program.client_bytes(hparams, rows)
