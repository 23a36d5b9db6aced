"""Meshes of devices, and functions with inputs and outputs divided over them."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

SAME: Any = PartitionSpec()
"""The spec of an array that every device holds whole."""


def use_all_cores() -> None:
    """Make one device per core of a CPU, over which clients or settings may be divided.

    Call it before JAX computes anything: later it has no effect. `Simulation(…, devices=
    jax.devices())` then divides the clients; one device with all cores is slower, since XLA spreads
    the small operations of one client over them.
    """
    use_devices(None)


def use_devices(wanted: int | None) -> None:
    """Use `wanted` devices of this process, cores of a CPU or GPUs; by default all.

    Call it before JAX computes anything, as `use_all_cores`, and `require` afterwards.
    """
    cores = os.cpu_count() or 1
    # JAX may have computed already, as in a notebook or in tests.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", min(wanted or cores, cores))
        if wanted is not None:
            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(wanted))))


def require(wanted: int | None) -> None:
    """Check that this process uses `wanted` devices."""
    there = jax.local_device_count()
    if wanted is not None and wanted != there:
        kind = jax.local_devices()[0].platform
        raise ValueError(f"devices must be all, or at most the {there} ({kind}), got {wanted}")


def require_devices(devices: Any) -> None:
    """Raise ValueError if an argument is no sequence of JAX devices, or an empty one."""
    listed = isinstance(devices, Sequence | np.ndarray) and all(
        isinstance(each, jax.Device) for each in devices
    )
    if not listed or not len(devices):
        raise ValueError(
            f"devices must be a list of JAX devices, such as jax.devices()[:2], got {devices!r}"
        )


def placed(whole: np.ndarray, sharding: Any) -> jax.Array:
    """Put a host array on devices, also on devices of other processes."""
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def mesh_of(devices: Sequence[Any], axis: str) -> Mesh:
    """Return a mesh of devices along one named axis."""
    return grid_of(devices, {axis: len(devices)})


def grid_of(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    """Return a mesh of devices with the given size along each named axis."""
    grid = np.array(devices).reshape(*axes.values())
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def divided(axis: str, place: int = 0) -> Any:
    """Return the spec of an array divided along one of its axes, by default the first."""
    return PartitionSpec(*[None] * place, axis)


def across(function: Callable[..., Any], mesh: Mesh, inputs: Any, outputs: Any) -> Any:
    """Return a function of whole arrays, given the function of each device's part.

    `inputs` and `outputs` are specs as prefixes of pytrees; the function sums over devices itself.
    It may contain scans over rounds and gradients of a client. Derivatives in replicated values
    must not be summed over the devices, hence `check_vma=False`.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
