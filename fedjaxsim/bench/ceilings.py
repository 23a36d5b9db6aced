"""The ceilings of a machine: how fast it multiplies matrices and moves memory."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from fedjaxsim.engine.devices import across, divided, mesh_of

SIDE = 2048
"""Rows of the float32 matrices that are multiplied, one pair on each device."""
BUFFER_BYTES = 2**28
"""Of the buffer that is updated in place: on each accelerator, and on all cores of a CPU."""
_ATTEMPTS = 3


class Ceilings:
    """Measures both ceilings, on all of some devices at once.

    The machine's best is what counts, so each measurement is the fastest of three.

    Args:
      devices: one or more.
    """

    def __init__(self, devices: Sequence[Any]):
        mesh, spec = mesh_of(devices, "devices"), divided("devices")
        count = len(devices)
        shares = count if devices[0].platform == "cpu" else 1
        length = BUFFER_BYTES // 4 // shares

        def on_each(function, **options):
            return jax.jit(across(function, mesh, spec, spec), **options)

        def filled(*shape):
            return jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))

        self._count = count
        # In the default precision, like the products of the workloads.
        self._multiply = on_each(lambda a: jnp.matmul(a[0], a[0])[None])
        self._matrices = filled(count, SIDE, SIDE)
        self._update = on_each(lambda a: a + 1, donate_argnums=0)
        self._buffer = jax.block_until_ready(self._update(filled(count, length)))
        jax.block_until_ready(self._multiply(self._matrices))

    def flops(self) -> float:
        """Floating-point operations per second of the matrix products, over all devices."""

        def multiply():
            jax.block_until_ready(self._multiply(self._matrices))

        return 2 * SIDE**3 * self._count / _fastest(multiply)

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
