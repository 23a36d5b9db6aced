"""The rows of all clients, and the view that one client has of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.minibatches import ClientData, Generate, Minibatches, reader
from fedjaxsim.data.population import Population
from fedjaxsim.engine.layout import LARGEST_PASS, Layout
from fedjaxsim.kernels import backend
from fedjaxsim.kernels.permutation import FEW_ROWS

RARE = 8
"""Clients with many rows are few if they are at most an eighth."""


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Every client's rows of one split: flat fields and ranges.

    Attributes:
      fields: each (N, ...).
      start, count: (m,) int32, or (s,) with `ids`.
      ids: (s,) sorted int32, the clients of `start` and `count`; None for all.
      generate: static; the population's function for fresh minibatches, or None.
      pass_size: static; rows in a batch of an exact pass.
      most_rows: static; a bound on a client's rows, the padding of its last batch included.
      tail: static; pairs of a number of clients, which rises, and a bound on the rows of every
        client beyond these, the longest; empty unless few clients are long.
      training: the clients' training rows, where `fields` are these ones; None if the split is
        theirs, or nobody reads them.
      frozen: the frozen weights of the model, which all clients read; or None.
    """

    fields: dict[str, jax.Array]
    start: jax.Array
    count: jax.Array
    ids: jax.Array | None = None
    generate: Generate | None = dataclasses.field(default=None, metadata={"static": True})
    pass_size: int = dataclasses.field(default=LARGEST_PASS, metadata={"static": True})
    most_rows: int = dataclasses.field(default=LARGEST_PASS, metadata={"static": True})
    tail: tuple[tuple[int, int], ...] = dataclasses.field(default=(), metadata={"static": True})
    training: "Rows | None" = None
    frozen: dict[str, jax.Array] | None = None

    @classmethod
    def place(
        cls,
        population: Population,
        split: str,
        fields: dict[str, Any],
        algorithm: Algorithm | None = None,
    ) -> "Rows":
        """Return one split of a population whose fields are on the device.

        Frozen weights, and training rows if predictions read them, are those of the algorithm.
        """
        ranges = population.splits[split]
        # Rounded up to a power of two, so other data rarely recompile; whole passes fit the bound.
        power = 1 << max(0, int(ranges.count.max()) - 1).bit_length()
        most = max(LARGEST_PASS, power)
        if split != "train":  # minibatches need a closer bound
            most = 1 << 2 * ((most - 1).bit_length() + 1 >> 1)
        rows = cls(
            fields,
            jnp.asarray(ranges.start),
            jnp.asarray(ranges.count),
            generate=population.generate,
            pass_size=min(LARGEST_PASS, power),
            most_rows=most,
            tail=_tail(ranges.count, most),
        )
        if algorithm is None:
            return rows
        frozen, training = algorithm.task.frozen, None
        if algorithm.predict_with_data is not None and split != "train":
            training = cls.place(population, "train", {})
        return dataclasses.replace(rows, training=training, frozen=frozen and frozen.weights)

    def of_training(self) -> "Rows":
        """Return the clients' training rows."""
        if self.training is None:
            return self
        return dataclasses.replace(self.training, fields=self.fields)

    @classmethod
    def shapes(
        cls, population: Population, split: str, algorithm: Algorithm | None = None
    ) -> "Rows":
        """Return one split of a population with the shapes of its fields."""
        fields = jax.eval_shape(lambda fields: fields, dict(population.fields))
        return cls.place(population, split, fields, algorithm)

    def bounded_as(self, other: "Rows") -> "Rows":
        """Return the rows with the static bounds of `other` that hold, to share its compiled code.

        That changes no result beyond rounding, where no minibatch draws its examples by coins.
        """
        most = other.most_rows
        # Else rows are shuffled otherwise.
        holds = most >= self.most_rows and (most <= FEW_ROWS) == (self.most_rows <= FEW_ROWS)
        training = self.training
        if training is not None and other.training is not None:
            training = training.bounded_as(other.training)
        # More than `bound` rows are more than those of any smaller bound.
        few = (
            self.most_rows <= bound or any(n <= longest and b <= bound for n, b in self.tail)
            for longest, bound in other.tail
        )
        return dataclasses.replace(
            self,
            pass_size=other.pass_size,
            most_rows=most if holds else self.most_rows,
            tail=other.tail if holds and all(few) else self.tail,
            training=training,
        )

    def for_training(self) -> "Rows":
        """Return the rows with batches that are the same for every client.

        The rounding of a client's sums must not depend on other clients' row counts.
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
        share: jax.Array | None = None,
    ) -> ClientData:
        """Return one client's view; m, which is no client, has no rows.

        `key` is of this round's minibatches. If minibatches are consumed, `consumed`, () int32, is
        the number of those of earlier rounds, and `order` the key of their orders in all rounds.
        The client does the part `share`, (), of its local steps; None is all.
        """
        index = self._index(client_id)
        count = self._count(index)
        return ClientData(
            reader(self.fields, self.start[index], count),
            count,
            key,
            minibatches,
            consumed,
            order,
            self.generate,
            layout.reading(self.pass_size),
            _largest_of_all(count) if layout.in_step else None,
            share,
            self.most_rows,
        )

    def counts(self, client_ids: jax.Array) -> jax.Array:
        """Return clients' numbers of rows; client m, who is none, has none."""
        return self._count(self._index(client_ids))

    def _count(self, index: jax.Array) -> jax.Array:
        return self.count.at[index].get(mode="fill", fill_value=0)

    def _index(self, client_ids: jax.Array) -> jax.Array:
        """Return the places of clients among those whose ranges are here."""
        if self.ids is None:
            return client_ids
        # Comparisons with all ids are one kernel of an accelerator, and most of a CPU's evaluation.
        method = "scan" if backend.platform() == "cpu" else "compare_all"
        return jnp.searchsorted(self.ids, client_ids, method=method)


def _tail(count: np.ndarray, most_rows: int) -> tuple[tuple[int, int], ...]:
    """Return the `tail` of clients; numbers are rounded up to powers of four to share programs."""
    found, bound = [], LARGEST_PASS
    while bound < most_rows:
        longer = int(np.sum(count > bound))
        longest = 1 << 2 * ((longer - 1).bit_length() + 1 >> 1)
        if longer > 0 and longest <= len(count) // RARE:
            found.insert(0, (longest, bound))
        bound *= 16
    return tuple(found)


@jax.custom_batching.custom_vmap
def _largest_of_all(number: jax.Array) -> jax.Array:
    """Return a number or, under `jax.vmap`, the largest of the mapped numbers."""
    return number


@_largest_of_all.def_vmap
def _(axis_size, in_batched, number):
    return jnp.max(number), False
