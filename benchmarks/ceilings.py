"""The ceilings of a machine: the speed of its matrix products and of its memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjaxsim.bench.measure import seconds

SIDE, ACCELERATOR_SIDE = 2048, 8192
"""Rows of the multiplied matrices. At 400 TFLOP/s an accelerator takes 3 ms for a large product, a
hundred times the cost of starting an operation and waiting for its end."""
BUFFER_BYTES, ACCELERATOR_BYTES = 2**28, 2**31
"""Bytes of the updated buffer, over all cores of a CPU and on each accelerator."""
_ATTEMPTS = 3


class Ceilings:
    """Both ceilings of some devices at work together; the fastest of three attempts.

    Args:
      devices: one or more JAX devices.
      dtype: dtype of the matrices.
    """

    def __init__(self, devices: Sequence[Any], dtype: Any = jnp.float32):
        spec, mesh = PartitionSpec("devices"), Mesh(np.array(devices), ("devices",))
        count, on_cpu = len(devices), devices[0].platform == "cpu"
        side = SIDE if on_cpu else ACCELERATOR_SIDE
        length = BUFFER_BYTES // 4 // count if on_cpu else ACCELERATOR_BYTES // 4

        def on_each(function: Callable[[jax.Array], jax.Array], **options: Any) -> Any:
            one = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
            return jax.jit(one, **options)

        def ones(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
            return jax.device_put(jnp.ones(shape, dtype), NamedSharding(mesh, spec))

        self._operations = 2 * side**3 * count
        # The products of a run have the default precision, too.
        self._multiply = on_each(lambda a: jnp.matmul(a[0], a[0])[None])
        self._matrices = ones(count, side, side, dtype=dtype)
        self._update = on_each(lambda a: a + 1, donate_argnums=0)
        self._buffer = ones(count, length)
        self.flops()  # compiles
        self.bandwidth()

    def flops(self) -> float:
        """Measure the floating-point operations per second of matrix products."""
        took = [
            seconds(lambda: jax.block_until_ready(self._multiply(self._matrices)))
            for _ in range(_ATTEMPTS)
        ]
        return self._operations / min(took)

    def bandwidth(self) -> float:
        """Measure the bytes read and written per second by an update in place."""

        def update() -> None:
            self._buffer = jax.block_until_ready(self._update(self._buffer))

        return 2 * self._buffer.nbytes / min(seconds(update) for _ in range(_ATTEMPTS))
