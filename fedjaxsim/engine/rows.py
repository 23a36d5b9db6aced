"""The rows of all clients, and the view that one client has of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.minibatches import (
    PASS_SIZE,
    BatchReadOptions,
    ClientData,
    Generate,
    Minibatches,
    RowReader,
)
from fedjaxsim.data.population import Population
from fedjaxsim.kernels import backend
from fedjaxsim.kernels.permutation import FEW_ROWS


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Every client's rows of one split: flat fields and ranges.

    Attributes:
      fields: each (N, ...).
      start, count: (m,) int32, or (s,) with `ids`.
      ids: (s,) sorted int32, the clients of `start` and `count`; None for all.
      generate: static; the population's function for fresh minibatches, or None.
      most_rows: static; a public bound on a client's rows, the padding of its last batch included.
      training: the clients' training rows, where `fields` are these ones; None if the split is
        theirs, or nobody reads them.
      frozen: the frozen weights of the model, which all clients read; or None.
    """

    fields: dict[str, jax.Array]
    start: jax.Array
    count: jax.Array
    ids: jax.Array | None = None
    generate: Generate | None = dataclasses.field(default=None, metadata={"static": True})
    most_rows: int = dataclasses.field(default=PASS_SIZE, metadata={"static": True})
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

        Frozen weights, and training rows if predictions read them, are the algorithm's.
        """
        ranges = population.splits[split]
        # Rounded up to a power of two, so other data rarely recompile; whole passes fit the bound.
        most = 1 << max(0, population.bound(split) - 1).bit_length()
        if split != "train" and most > PASS_SIZE:  # minibatches need a closer bound
            most = 1 << 2 * ((most - 1).bit_length() + 1 >> 1)
        rows = cls(
            fields,
            jnp.asarray(ranges.start),
            jnp.asarray(ranges.count),
            generate=population.generate,
            most_rows=most,
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
        fields = {  # as JAX orders and types them; to trace them for that takes a millisecond
            name: jax.ShapeDtypeStruct(values.shape, jax.dtypes.canonicalize_dtype(values.dtype))
            for name, values in sorted(population.fields.items())
        }
        return cls.place(population, split, fields, algorithm)

    def bounded_as(self, other: "Rows") -> "Rows":
        """Return the rows with the static bound of `other` if it holds, to share its compiled code.

        That changes no result beyond rounding, where no minibatch draws its examples by coins.
        """
        most = other.most_rows
        # Else rows are shuffled otherwise.
        holds = most >= self.most_rows and (most <= FEW_ROWS) == (self.most_rows <= FEW_ROWS)
        training = self.training
        if training is not None and other.training is not None:
            training = training.bounded_as(other.training)
        return dataclasses.replace(
            self,
            most_rows=most if holds else self.most_rows,
            training=training,
        )

    def of(
        self,
        client_id: jax.Array,
        key: jax.Array,
        minibatches: Minibatches,
        reading: BatchReadOptions,
        consumed: jax.Array | None = None,
        order: jax.Array | None = None,
        share: jax.Array | None = None,
    ) -> ClientData:
        """Return one client's view; m, which is no client, has no rows.

        `key` is of this round's minibatches. If minibatches are consumed, `consumed`, () int32, is
        the number in earlier rounds, and `order` the key of their orders in all rounds.
        The client does the part `share`, (), of its local steps; None is all.
        """
        index = self._index(client_id)
        count = self._count(index)
        return ClientData(
            RowReader(self.fields, self.start[index], count),
            count,
            key,
            minibatches,
            consumed,
            order,
            self.generate,
            reading,
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
