"""Which of a simulation's clients are worked on in one place: all of them, or those of a device."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjaxsim.engine.work import CohortSlots
from fedjaxsim.privacy.samplers import Cohort

PyTree = Any


class ClientPartition(Protocol):
    """The clients whose states one place holds.

    Attributes:
      num_clients: m, in all places together.
      size: states that this place holds; some may belong to no client.
      even: whether all of them belong to one.
    """

    @property
    def num_clients(self) -> int: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def even(self) -> bool: ...  # noqa: D102

    def ids(self) -> tuple[jax.Array, jax.Array]:
        """The ids of this place's clients, (size,) int32, and which of them exist, (size,)."""
        ...

    def places(self, cohort: Cohort, *, everyone: bool) -> CohortSlots:
        """The part of a cohort that is worked on here; `full`: whether it is all clients."""
        ...

    def total(self, sums: PyTree) -> PyTree:
        """Sums over all places."""
        ...


class AllClients(NamedTuple):
    """All clients of a simulation, in one place."""

    num_clients: int

    @property
    def size(self) -> int:
        """As of `ClientPartition`."""
        return self.num_clients

    @property
    def even(self) -> bool:
        """As of `ClientPartition`."""
        return True

    def ids(self) -> tuple[jax.Array, jax.Array]:
        """As of `ClientPartition`."""
        ids = jnp.arange(self.num_clients, dtype=jnp.int32)
        return ids, jnp.ones(self.num_clients, bool)

    def places(self, cohort: Cohort, *, everyone: bool) -> CohortSlots:
        """As of `ClientPartition`: a client's state lies at its id."""
        del everyone
        return CohortSlots(cohort.ids, cohort.ids, cohort.mask)

    def total(self, sums: PyTree) -> PyTree:
        """As of `ClientPartition`."""
        return sums


class StreamedClients(NamedTuple):
    """Some clients, whose states and rows were brought to one place for a while.

    Attributes:
      num_clients: m, wherever they are.
      own: (s,) sorted int32 ids of those here; m at the end where there are fewer.
    """

    num_clients: int
    own: jax.Array

    @property
    def size(self) -> int:
        """As of `ClientPartition`."""
        return self.own.shape[0]

    @property
    def even(self) -> bool:
        """As of `ClientPartition`."""
        return False

    def ids(self) -> tuple[jax.Array, jax.Array]:
        """As of `ClientPartition`."""
        return jnp.minimum(self.own, self.num_clients - 1), self.own < self.num_clients

    def places(self, cohort: Cohort, *, everyone: bool) -> CohortSlots:
        """As of `ClientPartition`."""
        del everyone
        slots = jnp.searchsorted(self.own, cohort.ids, method="sort")
        return CohortSlots(slots.astype(jnp.int32), cohort.ids, cohort.mask)

    def total(self, sums: PyTree) -> PyTree:
        """As of `ClientPartition`."""
        return sums


class Shard(NamedTuple):
    """The clients that one of several devices holds: those with ids from size·index on.

    Attributes:
      axis: name of the mesh axis over which the clients are divided.
      devices: how many there are.
      num_clients: m, on all devices together.
    """

    axis: str
    devices: int
    num_clients: int

    @property
    def size(self) -> int:
        """Clients on each device; on the last ones some places may belong to none."""
        return -(-self.num_clients // self.devices)

    @property
    def even(self) -> bool:
        """Whether all devices hold as many clients."""
        return self.num_clients % self.devices == 0

    def ids(self) -> tuple[jax.Array, jax.Array]:
        """As of `ClientPartition`."""
        ids = jax.lax.axis_index(self.axis) * self.size + jnp.arange(self.size, dtype=jnp.int32)
        return jnp.minimum(ids, self.num_clients - 1), ids < self.num_clients

    def places(self, cohort: Cohort, *, everyone: bool) -> CohortSlots:
        """As of `ClientPartition`; each in min(capacity, size) places.

        As many places as that are enough whoever is drawn, so that no cohort overflows here that
        would not on one device.
        """
        if everyone:
            ids, exist = self.ids()
            return CohortSlots(jnp.arange(self.size, dtype=jnp.int32), ids, exist)
        slots = cohort.ids - jax.lax.axis_index(self.axis) * self.size
        mine = cohort.mask & (slots >= 0) & (slots < self.size)
        capacity = min(mine.shape[0], self.size)
        kept = jnp.nonzero(mine, size=capacity, fill_value=0)[0]
        mask = jnp.arange(capacity) < jnp.sum(mine)
        return CohortSlots(slots[kept], cohort.ids[kept], mask)

    def total(self, sums: PyTree) -> PyTree:
        """As of `ClientPartition`."""
        return jax.lax.psum(sums, self.axis)
