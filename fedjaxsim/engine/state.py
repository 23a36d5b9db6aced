"""The state of a run, and the owner of each of its parts.

Placements, sweeps, seeds and checkpoints read `PARTS`. Clients' parts have a leading axis of
clients, (m, ...), and may be divided. Parts that vary between runs of one key get an axis of runs:
the first or, after the clients' axis, the second one.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, register_dataclass, tree_leaves_with_path

from fedjaxsim.engine.work import CohortSlots
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.events import PrivacySpend
from fedjaxsim.privacy.ledger import Ledger
from fedjaxsim.privacy.samplers import Cohort

PyTree = Any
_SHOWN = 4
"""Most arrays of a part that the text of a state names."""


class StatePart(NamedTuple):
    """A field's owner, and whether it varies between runs of one key and other hyperparameters."""

    owner: Literal["clients", "server"]
    varies: bool


@register_dataclass
@dataclasses.dataclass(frozen=True)
class SimulationState:
    """Everything a run carries from round to round, as one pytree. Nothing else holds state.

    `round`, () int32, is the number of those done, `shared` the server's state, `personal` all
    clients', leaves (m, ...). Rounds and clients fold their numbers into `key`. `consumed`, (m,)
    int32, counts the minibatches that each client has consumed; None if they are not.

    Example:
      >>> int(state.round)  # `state` as in `Simulation`
      3
    """

    round: jax.Array
    shared: PyTree
    personal: PyTree
    mechanism: PyTree
    privacy: Ledger
    key: jax.Array
    consumed: jax.Array | None = None

    def __repr__(self) -> str:
        """Show the round and the name, type and shape of each array, without its numbers."""
        lines = [f"SimulationState of round {self.round}"]
        for name in ("shared", "personal", "mechanism"):
            arrays = [
                f"{keystr(path, simple=True, separator='.')} {_shape_text(leaf)}".strip()
                for path, leaf in tree_leaves_with_path(getattr(self, name))
            ]
            more = [f"… ({len(arrays)} arrays)"] if len(arrays) > _SHOWN else []
            lines += [f"  {name}: {', '.join(arrays[:_SHOWN] + more)}"] if arrays else []
        return "\n".join(lines)

    @property
    def of_clients(self) -> tuple[PyTree, jax.Array | None]:
        """The parts that clients keep: personal states and numbers of consumed minibatches."""
        return self.personal, self.consumed

    def with_clients(self, states: tuple[PyTree, jax.Array | None]) -> "SimulationState":
        """Return the state with other parts of clients."""
        personal, consumed = states
        return dataclasses.replace(self, personal=personal, consumed=consumed)

    def announce(
        self,
        releases: Iterable[PrivacySpend] = (),
        sentences: Iterable[str] = (),
        *,
        places: int = 1,
        stage: jax.Array | None = None,
        stream: jax.Array | None = None,
    ) -> "SimulationState":
        """Return the state with all that releases to come need; see `ledger.announce`."""
        privacy = ledger.announce(
            self.privacy, releases, sentences, places=places, stage=stage, stream=stream
        )
        return dataclasses.replace(self, privacy=privacy)


def _shape_text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__


PARTS = {
    "round": StatePart("server", varies=False),
    "shared": StatePart("server", varies=True),
    "personal": StatePart("clients", varies=True),
    "mechanism": StatePart("server", varies=True),
    "privacy": StatePart("server", varies=True),
    "key": StatePart("server", varies=False),
    "consumed": StatePart("clients", varies=False),
}


@dataclasses.dataclass(frozen=True)
class AllClients:
    """All m clients of a simulation; a client's id is the index of its state.

    Partitions of one device's clients, or of those fetched for a round, replace its methods.
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

    def ids(self) -> jax.Array:
        """Return the states' client ids, (size,) int32; padding has ids from m on."""
        return jnp.arange(self.num_clients, dtype=jnp.int32)

    def known_ids(self) -> jax.Array:
        """Return the states' client ids, (size,) int32; padding repeats a client."""
        return jnp.minimum(self.ids(), self.num_clients - 1)

    def anybody(self) -> jax.Array:
        """Return the id of the client whose state comes first, () int32."""
        return jnp.int32(0)

    def slots_of(self, cohort: Cohort, *, full: bool) -> CohortSlots:
        """Return the cohort's clients with states here; `full`, static: all clients take part."""
        return CohortSlots(cohort.ids, cohort.ids, cohort.mask)

    def total(self, sums: PyTree) -> PyTree:
        """Add up sums over all partitions."""
        return sums


def evaluated_part(state: SimulationState) -> SimulationState:
    """Return the state without what evaluations do not read: the ledger and the mechanism."""
    unread: Any = ()
    return dataclasses.replace(state, privacy=unread, mechanism=unread)


def map_parts(function: Callable[[StatePart, PyTree], PyTree], state: SimulationState) -> Any:
    """Replace every part of a state by `function(part, subtree)`."""
    changed = {}
    for name, part in PARTS.items():
        tree = getattr(state, name)
        if isinstance(tree, Ledger):
            # Runs that differ in hyperparameters draw from one key.
            tree = dataclasses.replace(
                tree,
                charges=function(part, tree.charges),
                draws=function(part._replace(varies=False), tree.draws),
                room=function(part._replace(varies=False), tree.room),
            )
        else:
            tree = function(part, tree)
        changed[name] = tree
    return dataclasses.replace(state, **changed)


def map_clients_leaves(
    function: Callable[[jax.Array], jax.Array], state: SimulationState
) -> SimulationState:
    """Apply a function to every leaf that belongs to clients."""
    return map_parts(
        lambda part, tree: jax.tree.map(function, tree) if part.owner == "clients" else tree, state
    )


def state_of(state: SimulationState, run: int) -> SimulationState:
    """Return one run of a state whose varying parts have an axis of runs."""

    def of_run(part, tree):
        if not part.varies:
            return tree
        index = (slice(None), run) if part.owner == "clients" else run
        return jax.tree.map(lambda leaf: leaf[index], tree)

    return map_parts(of_run, state)
