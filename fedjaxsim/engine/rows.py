"""The rows of all clients, and one client's view of its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from fedjaxsim.data.minibatches import ClientData, Generate, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine.layout import LARGEST_PASS, Layout


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Every client's rows of one split: flat fields and ranges.

    Attributes:
      fields: each (N, ...).
      start: (m,) int32.
      count: (m,) int32.
      ids: (s,) sorted int32, whose `start` and `count` are, then (s,) too; None for all clients.
      generate: static; what makes fresh minibatches, where the population has it.
      pass_size: static; rows in a batch of an exact pass.
      most_rows: static; no client has more rows, the padding of its last batch included.
    """

    fields: dict[str, jax.Array]
    start: jax.Array
    count: jax.Array
    ids: jax.Array | None = None
    generate: Generate | None = dataclasses.field(default=None, metadata={"static": True})
    pass_size: int = dataclasses.field(default=LARGEST_PASS, metadata={"static": True})
    most_rows: int = dataclasses.field(default=LARGEST_PASS, metadata={"static": True})

    @classmethod
    def place(cls, population: Population, split: str, fields: dict[str, jax.Array]) -> "Rows":
        """Return one split of a population whose fields are on the device."""
        ranges = population.splits[split]
        start, count = jnp.asarray(ranges.start), jnp.asarray(ranges.count)
        return cls.lying(fields, start, count, int(ranges.count.max()), population.generate)

    @classmethod
    def lying(
        cls,
        fields: dict[str, Any],
        start: Any,
        count: Any,
        largest: int,
        generate: Generate | None = None,
        ids: Any = None,
    ) -> "Rows":
        """Rows of clients, or their shapes, of whom none has more than `largest`."""
        # Small batches where every client has few rows; a cap, and a power of two, so that what is
        # compiled depends little on the data.
        pass_size = max(1, min(LARGEST_PASS, largest))
        most_rows = max(LARGEST_PASS, 1 << (largest - 1).bit_length())
        return cls(fields, start, count, ids, generate, pass_size, most_rows)

    def for_training(self) -> "Rows":
        """Return the rows with batches that are the same for every client.

        How many rows the others have must not show in the rounding of a client's own sums.
        """
        return dataclasses.replace(self, pass_size=LARGEST_PASS)

    def of(
        self,
        client_id: jax.Array,
        key: jax.Array,
        minibatches: Minibatches,
        layout: Layout,
        consumed: jax.Array | None = None,
        order: jax.Array | None = None,
    ) -> ClientData:
        """Return one client's view.

        Args:
          client_id: () int32, whose.
          key: what the choice of minibatches in this round depends on.
          minibatches: of the local steps.
          layout: static settings; they change no result beyond rounding.
          consumed: () int32, how many minibatches the client has consumed in earlier rounds; None
            where minibatches are not consumed.
          order: the key of the orders in which they are consumed, the same in all rounds; or None.
        """
        place = client_id
        if self.ids is not None:
            place = jnp.searchsorted(self.ids, client_id, method="compare_all")
        start, count = self.start[place], self.count[place]
        return ClientData(
            self.fields,
            start,
            count,
            key,
            minibatches,
            consumed,
            order,
            self.generate,
            layout.reading(self.pass_size),
            _largest_of_all(count) if layout.in_step else None,
        )


@jax.custom_batching.custom_vmap
def _largest_of_all(number: jax.Array) -> jax.Array:
    """Return the largest number that `jax.vmap` maps over, if it does."""
    return number


@_largest_of_all.def_vmap
def _(axis_size, in_batched, number):
    del axis_size, in_batched
    return jnp.max(number), False
