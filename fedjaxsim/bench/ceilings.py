"""The ceilings of a machine: how fast it multiplies matrices and moves memory."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from fedjaxsim.engine.devices import across, divided, mesh_of

SIDE, ACCELERATOR_SIDE = 2048, 8192
"""Rows of the matrices that are multiplied, one pair on each device. At 400 TFLOP/s an accelerator
takes 3 ms for the large ones, a hundred times what it takes to start an operation and to wait for
its end; for the small ones it would take 40 µs."""
BUFFER_BYTES, ACCELERATOR_BYTES = 2**28, 2**31
"""Of the buffer that is updated in place: on all cores of a CPU, and on each accelerator, where it
takes 1 ms at 4 TB/s."""
_ATTEMPTS = 3


class Ceilings:
    """Measures both ceilings, on all of some devices at once.

    The machine's best is what counts, so each measurement is the fastest of three.

    Args:
      devices: one or more.
      dtype: of the matrices.
    """

    def __init__(self, devices: Sequence[Any], dtype: Any = jnp.float32):
        mesh, spec = mesh_of(devices, "devices"), divided("devices")
        count = len(devices)
        on_cpu = devices[0].platform == "cpu"
        self._side = SIDE if on_cpu else ACCELERATOR_SIDE
        length = BUFFER_BYTES // 4 // count if on_cpu else ACCELERATOR_BYTES // 4

        def on_each(function, **options):
            return jax.jit(across(function, mesh, spec, spec), **options)

        def filled(*shape, dtype=jnp.float32):
            return jax.device_put(jnp.ones(shape, dtype), NamedSharding(mesh, spec))

        self._count = count
        # In the default precision, like the products of the workloads.
        self._multiply = on_each(lambda a: jnp.matmul(a[0], a[0])[None])
        self._matrices = filled(count, self._side, self._side, dtype=dtype)
        self._update = on_each(lambda a: a + 1, donate_argnums=0)
        self._buffer = jax.block_until_ready(self._update(filled(count, length)))
        jax.block_until_ready(self._multiply(self._matrices))

    def flops(self) -> float:
        """Floating-point operations per second of the matrix products, over all devices."""

        def multiply():
            jax.block_until_ready(self._multiply(self._matrices))

        return 2 * self._side**3 * self._count / _fastest(multiply)

    def bandwidth(self) -> float:
        """Bytes per second that are read and written by an update in place, over all devices."""

        def update():
            self._buffer = jax.block_until_ready(self._update(self._buffer))

        return 2 * self._buffer.nbytes / _fastest(update)


def _fastest(function) -> float:
    seconds = []
    for _ in range(_ATTEMPTS):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
