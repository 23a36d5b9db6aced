"""The trace that JAX is in, and the losses noted while a step is traced."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.extend.core


def current_trace() -> Any:
    """Return the trace that JAX is in, equal to itself alone; to nothing if JAX cannot tell."""
    state = getattr(jax.extend.core, "get_opaque_trace_state", object)
    return state()


_current: ContextVar[tuple[Any, list[jax.Array]] | None] = ContextVar("losses", default=None)


@contextlib.contextmanager
def noted_losses() -> Iterator[list[jax.Array]]:
    """Collect the losses at the gradients of one minibatch, while its step is traced."""
    losses: list[jax.Array] = []
    token = _current.set((current_trace(), losses))
    try:
        yield losses
    finally:
        _current.reset(token)


def note(loss: jax.Array) -> None:
    """Note the loss at a gradient for the fold's mean, unless in a loop or `vmap` of the step."""
    if (noted := _current.get()) is not None and current_trace() == noted[0]:
        noted[1].append(loss)
