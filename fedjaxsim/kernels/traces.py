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


class Losses:
    """The losses at the gradients of one minibatch, noted while its step is traced."""

    def __init__(self):
        """Start without losses, in the current trace."""
        self._trace, self._values = current_trace(), []

    def add(self, value: jax.Array) -> None:
        """Add the loss at a gradient, unless it is inside a loop or a `vmap` of the step."""
        if current_trace() == self._trace:
            self._values.append(value)

    @property
    def first(self) -> jax.Array | None:
        """The first loss, if there is one."""
        return self._values[0] if self._values else None


_current: ContextVar[Losses | None] = ContextVar("losses", default=None)


@contextlib.contextmanager
def noted_losses() -> Iterator[Losses]:
    """Collect the losses that `note` gets."""
    token = _current.set(losses := Losses())
    try:
        yield losses
    finally:
        _current.reset(token)


def note(loss: jax.Array) -> None:
    """Note the loss at a gradient of the minibatch of the current step, for the fold's mean."""
    if (losses := _current.get()) is not None:
        losses.add(loss)
