"""The kind of device that a program is traced for: its own, or one that is planned for."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax


class Backend(NamedTuple):
    """A kind of device."""

    platform: str
    memory: int | None


# JAX keeps what it traced for one backend apart from what it traced for another.
_bound = jax.make_user_context(None)


def current(devices: Sequence[Any] | None = None) -> Backend:
    """Return what a `with` block plans for, else the kind of `devices`, by default JAX's."""
    if _bound.value is not None:
        return _bound.value
    devices = (_default_device(),) if devices is None else devices
    mine = [device for device in devices if device.process_index == jax.process_index()]
    stats = mine[0].memory_stats() if mine else None
    return Backend(devices[0].platform, (stats or {}).get("bytes_limit"))


def _default_device() -> Any:
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def platform() -> str:
    """Return the platform of the devices: "cpu", "gpu" or "tpu"."""
    return current().platform


def memory() -> int | None:
    """Return the bytes that JAX may allocate on one device; None if it does not tell."""
    return current().memory


def is_bound() -> bool:
    """Return whether a program of this package is being traced, or planned."""
    return _bound.value is not None


@contextlib.contextmanager
def planning_for(backend: Backend) -> Iterator[None]:
    """Lay out and trace programs for these devices in a `with` block."""
    with _bound(backend):
        yield
