"""A run as pure functions: what is compiled, without anything that checks or reports.

`Simulation` builds a `Program` and calls it; a sweep maps its parts over many settings first.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm, Metrics
from fedjaxsim.data.minibatches import ClientData, Minibatches
from fedjaxsim.engine.client_partition import ClientPartition
from fedjaxsim.engine.draw import Draw, draw
from fedjaxsim.engine.layout import Layout
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.server_update import server_update
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import (
    Broadcast,
    ClientStates,
    CohortResult,
    client_bytes,
    client_of,
    map_clients,
    work,
)
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.ledger import Charges
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.samplers import Sampler
from fedjaxsim.tasks.task import Task

PyTree = Any


class ClientMetrics(NamedTuple):
    """Metrics of clients by name, each () of one client, (m,) or, of S runs, (m, S).

    Attributes:
      sums: of the task's metrics, over each client's rows.
      values: of the task's folds; NaN for a client that has none.
    """

    sums: dict[str, jax.Array]
    values: dict[str, jax.Array]


def run_key(key: jax.Array) -> jax.Array:
    """Return the key that the rounds of a run draw from, given the key of `init`."""
    return jax.random.split(key)[1]


@dataclasses.dataclass(frozen=True)
class Program:
    """The parts of a simulation as pure functions, with the settings that fix shapes.

    Attributes:
      algorithm: four functions for one client.
      mechanism: the door.
      sampling: who takes part.
      measure: `(params, data, most_rows) -> ClientMetrics`, of one client; none has more rows.
      minibatches: of the local steps.
      layout: how clients and their work are laid out.
      share: the clients that are worked on here: all of them, or those of one device.
      no_charges: `() -> Charges`, the account of the sampler and the mechanism before any round.
      charge: `(charges, noise multiplier, sampling rate, round) -> charges`.
    """

    algorithm: Algorithm
    mechanism: Mechanism
    sampling: Sampler
    measure: Callable[[PyTree, ClientData, int], ClientMetrics]
    minibatches: Minibatches
    layout: Layout
    share: ClientPartition
    no_charges: Callable[[], Charges]
    charge: Callable[..., Charges] = ledger.charge

    @property
    def num_clients(self) -> int:
        """The number of clients m, here and elsewhere."""
        return self.share.num_clients

    def init(self, key: jax.Array, hparams: Hyperparameters) -> SimulationState:
        """The state before the first round."""
        init_key, key = jax.random.split(key)[0], run_key(key)
        shared, personal = self.algorithm.init(init_key, hparams)
        clients = self.share.size

        def for_all(leaf):
            return jnp.broadcast_to(leaf, (clients, *leaf.shape))

        consumes = self.minibatches.passes is not None
        return SimulationState(
            round=jnp.zeros((), jnp.int32),
            shared=shared,
            personal=jax.tree.map(for_all, personal),
            mechanism=self.mechanism.init(hparams),
            privacy=ledger.with_key(ledger.Ledger((self.no_charges(),)), key),
            key=key,
            consumed=jnp.zeros(clients, jnp.int32) if consumes else None,
        )

    def round(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows
    ) -> tuple[SimulationState, Metrics]:
        """One round, and its metrics."""
        drawn = self.draw(state, hparams)
        return self.server_update(state, hparams, drawn, self.work(state, hparams, rows, drawn))

    def draw(self, state: SimulationState, hparams: Hyperparameters) -> Draw:
        """Who takes part in the next round, and its keys; of the state it reads key and round."""
        return draw(self.sampling, state.key, state.round, hparams)

    def work(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows, drawn: Draw
    ) -> CohortResult:
        """What the cohort does, added up over all places where clients are."""
        everyone = self.sampling.scheme.kind == "full"
        worked = work(
            self.algorithm,
            self.mechanism,
            self.minibatches,
            self.num_clients,
            self.layout,
            ClientStates(state.personal, state.consumed),
            self.share.places(drawn.cohort, everyone=everyone),
            rows,
            self._told(state, hparams, drawn),
            filled=everyone and self.share.even,
        )
        accumulator, metrics = self.share.total((worked.accumulator, worked.metrics))
        return CohortResult(worked.store, accumulator, metrics)

    @staticmethod
    def _told(state: SimulationState, hparams: Hyperparameters, drawn: Draw) -> Broadcast:
        return Broadcast(
            state.shared,
            state.mechanism,
            hparams,
            state.round,
            drawn.rate,
            drawn.clients,
            drawn.order,
        )

    def limited(self) -> "Program":
        """The same for work of more than one run: its derivatives, or many seeds of it."""
        return dataclasses.replace(self, layout=self.layout.limited())

    def client_bytes(self, hparams: Hyperparameters, rows: Rows) -> int:
        """What one client of a batch needs at once, in bytes, as told from shapes.

        Args:
          hparams: as arrays.
          rows: the training rows, or their shapes.
        """
        key = jax.random.key(0, impl="threefry2x32")
        state = jax.eval_shape(self.init, key, hparams)
        drawn = jax.eval_shape(self.draw, state, hparams)
        client = client_of(self.algorithm, self.minibatches, self.num_clients, self.layout)
        told = self._told(state, hparams, drawn)
        return client_bytes(client, told, rows, ClientStates(state.personal, state.consumed))

    def server_update(
        self, state: SimulationState, hparams: Hyperparameters, drawn: Draw, worked: CohortResult
    ) -> tuple[SimulationState, Metrics]:
        """The next state, after the release and the server's step, and the round's metrics."""
        scheme = self.sampling.scheme
        return server_update(
            self.algorithm, self.mechanism, scheme, self.charge, state, hparams, drawn, worked
        )

    def rounds(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows, rounds: int
    ) -> tuple[SimulationState, Metrics]:
        """So many rounds, and their metrics, each (rounds, ...)."""
        return jax.lax.scan(lambda state, _: self.round(state, hparams, rows), state, length=rounds)

    def evaluate(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows
    ) -> ClientMetrics:
        """The metrics of each client on its rows, (m, ...)."""
        layout = self.layout.for_evaluation(state.personal)

        def one(personal, client_id):
            params = self.algorithm.predict(state.shared, personal, hparams, client_id)
            data = rows.of(client_id, state.key, self.minibatches, layout)
            return self.measure(params, data, rows.most_rows)

        ids, _ = self.share.ids()
        return map_clients(one, state.personal, ids, layout, rows)


def measure_with(task: Task) -> Callable[[PyTree, ClientData, int], ClientMetrics]:
    """The `measure` of a `Program`: the task's metrics and folds, in one pass over the rows."""

    def measure(params, data, most_rows):
        def add(carry, batch):
            sums, carries = carry
            # Folds ask the model again for the same batch: the compiler does it once.
            values = task.metrics(params, batch)
            return (
                {name: sums[name] + batch.sum(values[name]) for name in sums},
                {
                    name: task.streaming_metrics[name].add(carries[name], params, batch)
                    for name in carries
                },
            )

        shapes = jax.eval_shape(task.metrics, params, data.batch_shapes())
        sums = {name: jnp.zeros((), v.dtype) for name, v in shapes.items()}
        carries = {name: fold.start(most_rows) for name, fold in task.streaming_metrics.items()}
        sums, carries = data.full_pass(add, (sums, carries))
        return ClientMetrics(
            sums, {name: task.streaming_metrics[name].value(carries[name]) for name in carries}
        )

    return measure
