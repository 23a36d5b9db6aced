"""The clients whose states a program holds: all, those of one device, or those fetched for a round.

`AllClients` is the plain partition, whose methods the others replace.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.engine.work import CohortSlots
from fedjaxsim.privacy.samplers import Cohort

PyTree = Any


@dataclasses.dataclass(frozen=True)
class AllClients:
    """All clients of a simulation; a client's id is the index of its state.

    Attributes:
      num_clients: m, in all partitions together.
    """

    num_clients: int

    @property
    def size(self) -> int:
        """The number of states held; padding states belong to no client."""
        return self.num_clients

    @property
    def even(self) -> bool:
        """Return whether no state is padding."""
        return True

    def ids(self) -> tuple[jax.Array, jax.Array]:
        """Return the states' client ids, (size,) int32, and whether each exists, (size,) bool."""
        ids = jnp.arange(self.num_clients, dtype=jnp.int32)
        return ids, jnp.ones(self.num_clients, bool)

    def slots_of(self, cohort: Cohort, *, full: bool) -> CohortSlots:
        """Return the cohort's clients with states in this partition.

        Args:
          cohort: the drawn clients.
          full: static; whether all clients take part.
        """
        del full
        return CohortSlots(cohort.ids, cohort.ids, cohort.mask)

    def total(self, sums: PyTree) -> PyTree:
        """Add up sums over all partitions."""
        return sums


@dataclasses.dataclass(frozen=True)
class StreamedClients(AllClients):
    """Clients whose states and rows were fetched to one device.

    Attributes:
      fetched: (s,) sorted int32 ids; m is padding and comes last.
    """

    fetched: jax.Array

    @property
    def size(self) -> int:
        """The number s of fetched states."""
        return self.fetched.shape[0]

    @property
    def even(self) -> bool:
        """False: cohorts may be smaller than s."""
        return False

    def ids(self) -> tuple[jax.Array, jax.Array]:
        """Return ids, the last client's for padding, and whether each exists."""
        return jnp.minimum(self.fetched, self.num_clients - 1), self.fetched < self.num_clients

    def slots_of(self, cohort: Cohort, *, full: bool) -> CohortSlots:
        """Return the cohort's clients with their indices in `fetched`."""
        del full
        slots = jnp.searchsorted(self.fetched, cohort.ids, method="sort")
        return CohortSlots(slots.astype(jnp.int32), cohort.ids, cohort.mask)


@dataclasses.dataclass(frozen=True)
class Shard(AllClients):
    """The clients of one of several devices: ids from size·index on, inside `jax.shard_map`.

    Attributes:
      axis: name of the mesh axis over which the clients are divided.
      devices: number of devices on it.
    """

    axis: str
    devices: int

    @property
    def size(self) -> int:
        """The number of states on each device; the last devices may hold padding."""
        return -(-self.num_clients // self.devices)

    @property
    def even(self) -> bool:
        """Return whether the number of devices divides m."""
        return self.num_clients % self.devices == 0

    def ids(self) -> tuple[jax.Array, jax.Array]:
        """Return this device's ids, the last client's for padding, and whether each exists."""
        ids = jax.lax.axis_index(self.axis) * self.size + jnp.arange(self.size, dtype=jnp.int32)
        return jnp.minimum(ids, self.num_clients - 1), ids < self.num_clients

    def slots_of(self, cohort: Cohort, *, full: bool) -> CohortSlots:
        """Return the cohort's clients of this device, in min(capacity, size) slots.

        `min(capacity, size)` slots suffice, so sharding adds no overflow.
        """
        if full:
            ids, exist = self.ids()
            return CohortSlots(jnp.arange(self.size, dtype=jnp.int32), ids, exist)
        slots = cohort.ids - jax.lax.axis_index(self.axis) * self.size
        mine = cohort.mask & (slots >= 0) & (slots < self.size)
        capacity = min(mine.shape[0], self.size)
        kept = jnp.nonzero(mine, size=capacity, fill_value=0)[0]
        mask = jnp.arange(capacity) < jnp.sum(mine)
        return CohortSlots(slots[kept], cohort.ids[kept], mask)

    def total(self, sums: PyTree) -> PyTree:
        """Add up sums over the mesh axis."""
        return jax.lax.psum(sums, self.axis)
