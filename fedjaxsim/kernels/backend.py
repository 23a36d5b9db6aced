"""The kind of device that programs are traced for: this process's, or one that is planned for."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax


class Backend(NamedTuple):
    """A kind of device."""

    platform: str
    memory: int | None


_planned: ContextVar[Backend | None] = ContextVar("planned", default=None)


def platform() -> str:
    """Return the platform of the devices: "cpu", "gpu" or "tpu"."""
    planned = _planned.get()
    return jax.default_backend() if planned is None else planned.platform


def memory() -> int | None:
    """Return the bytes that JAX may allocate on one device; None if it does not tell."""
    planned = _planned.get()
    if planned is not None:
        return planned.memory
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


@contextlib.contextmanager
def planning_for(backend: Backend) -> Iterator[None]:
    """Lay out and trace programs for other devices than this process's in a `with` block."""
    token = _planned.set(backend)
    try:
        yield
    finally:
        _planned.reset(token)
