"""A minibatch with its rows, and one of protected examples, which gives gradients alone."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjaxsim.kernels.traces import current_trace, note

PyTree = Any
Reader = Callable[[jax.Array], dict[str, jax.Array]]
"""(positions among one client's rows) -> the fields of these rows."""


class Batch(NamedTuple):
    """A minibatch with static shapes.

    Attributes:
      fields: each (b, ...), by name: "x" and "y" by convention.
      weight: (b,) float, 1 for an example and 0 for padding (the last batch may be partial).
      keys: (b,) typed keys of the examples, for random layers and augmentation, of the client, the
        round and the step; None in exact passes, where nothing is random.
    """

    fields: dict[str, jax.Array]
    weight: jax.Array
    keys: jax.Array | None = None

    @property
    def examples(self) -> jax.Array:
        """The number of examples of which a mean over the minibatch is, ()."""
        return jnp.sum(self.weight)

    def gradient(self, task: Any, params: PyTree) -> PyTree:
        """Compute `Task.gradient`."""
        value, gradient = jax.value_and_grad(task.loss)(params, self)
        note(value)
        return gradient

    def sum(self, values: jax.Array) -> jax.Array:
        """Sum per-example `values` (b,) over the real examples, ()."""
        weight = self.weight.astype(values.dtype)
        return jnp.sum(jnp.where(weight > 0, weight * values, 0))

    def mean(self, values: jax.Array) -> jax.Array:
        """Average per-example `values` (b,) over the real examples, () (0 if none)."""
        return self.sum(values) / jnp.maximum(jnp.sum(self.weight), 1.0).astype(values.dtype)


class UnprotectedError(ValueError):
    """A use of a client's rows that noise in gradients does not protect."""


class Protection(Protocol):
    """The draw of minibatches whose gradients protect examples, and their gradients."""

    def sample(self, key: jax.Array, size: int, count: jax.Array, most_rows: int) -> Any:
        """Draw a minibatch, with its `expected` number of examples."""
        ...

    def read(self, sampled: Any, read: Reader) -> Batch:
        """Read all rows of a minibatch."""
        ...

    def gradient(
        self, task: Any, params: PyTree, sampled: Any, rows: Reader | Batch, ticket: int
    ) -> tuple[jax.Array, PyTree]:
        """Compute the mean loss and the noised gradient, with the noise of the ticket."""
        ...


class ProtectedBatch:
    """A minibatch of protected examples: `Task.gradient` is its one use, where it was drawn.

    It has no rows, counts or weights. Each gradient takes the next ticket, which is charged and
    draws its own noise; the noised sum is divided by the expected, public number of `examples`, ().
    """

    __slots__ = ("_gradient", "_loss", "_trace", "examples")

    def __init__(
        self,
        protection: Protection,
        sampled: Any,
        rows: Reader | Batch,
        first: int,
        took: Callable[[int], None],
    ):
        """Make the minibatch in the current trace; `took` gets the tickets so far, per gradient."""
        tickets, losses = itertools.count(first), []

        def gradient(task, params):
            ticket = next(tickets)
            took(ticket + 1)
            value, found = protection.gradient(task, params, sampled, rows, ticket)
            losses.append(value)
            return found

        made = {"_trace": current_trace(), "_gradient": gradient, "examples": sampled.expected}
        for name, value in (made | {"_loss": lambda: losses[0] if losses else None}).items():
            object.__setattr__(self, name, value)

    def gradient(self, task: Any, params: PyTree) -> PyTree:
        """Compute `Task.gradient`.

        Raises:
          UnprotectedError: elsewhere than directly in the step that got the minibatch.
        """
        if current_trace() != self._trace:
            raise UnprotectedError(
                "a gradient of protected examples must be taken directly in the step of data.fold, "
                "where it is counted once: not inside jit, checkpoint, vmap, grad, cond or a loop "
                "(a loop over one minibatch is a Python loop)"
            )
        return self._gradient(task, params)

    if not TYPE_CHECKING:

        def __setattr__(self, name, value):
            raise AttributeError(f"a minibatch of protected examples keeps its {name!r}")

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            raise UnprotectedError(
                f"a minibatch of protected examples has no {name!r}: its one use is "
                "task.gradient(params, batch), and the engine reports the loss"
            )
