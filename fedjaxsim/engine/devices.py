"""Devices in a row, and functions whose inputs and outputs are divided over them."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

SAME: Any = PartitionSpec()
"""The whole on every device."""


def use_all_cores() -> None:
    """Use one device per core of a CPU, to divide clients or settings over.

    What needs one device takes the first, which still uses all cores inside an operation. To be
    called before JAX computes anything: later, devices stay what they are.
    """
    use_devices(None)


def use_devices(wanted: int | None) -> None:
    """Use `wanted` devices of this process, cores of a CPU or GPUs; by default all.

    To be called as `use_all_cores`, which see, and `require` once JAX knows its devices.
    """
    cores = os.cpu_count() or 1
    # As in a notebook, or in tests.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", min(wanted or cores, cores))
        if wanted is not None:
            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(wanted))))


def require(wanted: int | None) -> None:
    """Check that this process uses `wanted` devices.

    Raises:
      ValueError: if it does not.
    """
    there = jax.local_device_count()
    if wanted is not None and wanted != there:
        kind = jax.local_devices()[0].platform
        raise ValueError(f"devices must be all, or at most the {there} ({kind}), got {wanted}")


def placed(whole: np.ndarray, sharding: Any) -> jax.Array:
    """Put a host array on devices, also those of other processes."""
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def mesh_of(devices: Sequence[Any], axis: str) -> Mesh:
    """Return a mesh of devices along one named axis."""
    return grid_of(devices, {axis: len(devices)})


def grid_of(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    """Return a mesh of devices with the given size along each named axis."""
    grid = np.array(devices).reshape(*axes.values())
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def divided(axis: str, place: int = 0) -> Any:
    """Divided over the devices along one axis of an array, by default the first."""
    return PartitionSpec(*[None] * place, axis)


def across(function: Callable[..., Any], mesh: Mesh, inputs: Any, outputs: Any) -> Any:
    """Return a function of whole arrays from one of each device's part.

    The part may hold scans over rounds and gradients of a client: what is replicated stays each
    device's own there (`check_vma=False`), where derivatives would otherwise be summed over the
    devices. Sums over devices are the part's own affair.

    Args:
      function: of the parts.
      mesh: of devices.
      inputs: how each argument is divided: specs, as prefixes of their pytrees.
      outputs: specs of the results.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
