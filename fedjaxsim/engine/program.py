"""A federated run as four pure functions: `init`, `step`, `rounds` and `evaluate`.

`Simulation` checks its parts, builds a `Program` and calls it. The transforms `shard`, `batch`,
`over_seeds` and `stream` take a program and return a program. A round has three parts: `draw`,
`work`, where all time goes, and `server_update`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim import keys
from fedjaxsim.algorithm import Algorithm, Context, Metrics
from fedjaxsim.data.minibatches import (
    BatchReadOptions,
    ClientData,
    ExampleLeakError,
    Minibatches,
    loss_of,
    view_here,
)
from fedjaxsim.data.population import Population
from fedjaxsim.engine.accounts import costs_of
from fedjaxsim.engine.factorizations import factorize_one_by_one
from fedjaxsim.engine.layout import Plan
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of, bytes_of_work
from fedjaxsim.engine.state import AllClients, SimulationState
from fedjaxsim.engine.work import INTEGER, CohortResult, map_clients, row_of, work
from fedjaxsim.hyperparameters import (
    Declarations,
    Hyperparameter,
    Hyperparameters,
    client_values,
    server_values,
)
from fedjaxsim.kernels.backend import planning_for
from fedjaxsim.keys import Stream
from fedjaxsim.models.model import bind_weights
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.in_loop import allows
from fedjaxsim.privacy.events import Account, Examples, PrivacyEvent
from fedjaxsim.privacy.ledger import Charges, Ledger
from fedjaxsim.privacy.mechanisms import Accumulator, Mechanism, Release
from fedjaxsim.privacy.messages import widened
from fedjaxsim.privacy.samplers import Cohort, Sampler, work_of

PyTree = Any


class Draw(NamedTuple):
    """All random choices of one round: the `cohort` of those drawn who answer, and keys.

    Each client was drawn with probability `rate`, (), which is charged. A client's streams are
    `clients` with its id; `orders` belong to the run, for the orders in which minibatches are
    consumed; `noise` belongs to the round, or to all rounds if noise is correlated.
    """

    cohort: Cohort
    rate: jax.Array
    clients: jax.Array
    orders: jax.Array
    noise: jax.Array


class ClientMetrics(NamedTuple):
    """A dict of clients' metrics, each () of one client, (m,) or, of S runs, (m, S).

    `sums` are the task's metrics, summed over each client's rows; `values` its streaming metrics,
    NaN for a client that has none. `statistics`, (k, ...) or (m, S, k, ...), make pooled
    metrics.
    """

    sums: dict[str, jax.Array]
    values: dict[str, jax.Array]
    statistics: dict[str, jax.Array]


class Runs(NamedTuple):
    """The runs of a batched program, made of `program` of one run.

    `axes` has the axis of each hyperparameter, 0 if it differs between the `size` runs, else None.
    """

    program: "Program"
    axes: Hyperparameters
    size: int


class Functions(NamedTuple):
    """Compiled functions of a program."""

    init: Callable[..., SimulationState]
    step: Callable[..., tuple[SimulationState, Metrics]]
    rounds: Callable[..., tuple[SimulationState, Metrics]]
    evaluate: Callable[..., ClientMetrics]


def traced_for_its_devices(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program's method, traced for the devices of its plan."""

    @functools.wraps(method)
    def traced(self: "Program", *args: Any, **kwargs: Any) -> Any:
        with self.tracing():
            return method(self, *args, **kwargs)

    return traced


def run_key(key: jax.Array) -> jax.Array:
    """Return the key that the rounds of a run draw from, given the key of `init`."""
    return keys.stream(key, Stream.RUN)


@dataclasses.dataclass(frozen=True)
class Program:
    """A run as pure functions, and the parts that they are made of.

    Attributes:
      algorithm: functions for one client, as from `algorithm_of_run`.
      mechanism: the only way from messages to the server.
      measure: `(params, data) -> ClientMetrics` of one client.
      plan: the choices for speed, and the devices that they are for.
      partition: the clients whose states this program holds.
      accounts: the scheme and the event of each account; see `engine/accounts.py`.
      no_charges: `(hparams) -> tuple`, the empty accounts.
      charge: `(charges, noise multiplier, sampling rate, round) -> charges`.
      runs: the runs of a batched program; None for a single run.
      examples: the event of a round of clients that protect examples in gradients; else None.
      records: the hyperparameters of all parts. `init` and `draw` check shapes, which are known
        while tracing; a round with a value out of range is charged NaN, so it has no ε.
      assumed: the sentences on users' code that every ledger of the program has, whoever reads it.

    Example:
      >>> init = sim.program.init  # `sim` and `hparams` as in `Simulation`
      >>> jax.eval_shape(init, jax.random.key(0), hparams).round.shape
      ()
    """

    algorithm: Algorithm
    mechanism: Mechanism
    sampling: Sampler
    measure: Callable[[PyTree, ClientData], ClientMetrics]
    minibatches: Minibatches
    plan: Plan
    partition: AllClients
    accounts: tuple[Account, ...]
    no_charges: Callable[[Hyperparameters], tuple[Charges, ...]]
    charge: Callable[..., Charges] = ledger.charge
    runs: Runs | None = None
    examples: PrivacyEvent | None = None
    records: Declarations = ()
    assumed: tuple[str, ...] = ()

    @property
    def num_clients(self) -> int:
        """The number of clients m, on all devices together."""
        return self.partition.num_clients

    @property
    def consumes(self) -> bool:
        """Return whether clients count the minibatches that they took in earlier rounds."""
        return self.minibatches.passes is not None or self.examples is not None

    def parts(self) -> dict[str, Any]:
        """Return a dict of the attributes, for the program of a transform."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Program)}

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace for the devices of the plan in a `with` block, whatever the process has."""
        factorize_one_by_one()
        with planning_for(self.plan.backend):
            yield

    # --- the four functions -----------------------------------------------------------------------

    @traced_for_its_devices
    def init(self, key: jax.Array, hparams: Hyperparameters) -> SimulationState:
        """Return the state before the first round."""
        self._check_shapes(hparams)
        init_key, key = keys.streams(key, (Stream.INIT, 0), (Stream.RUN, 0))
        ids = self.partition.known_ids()
        # `out_axes` raises where the server's state depends on a client's hyperparameters.
        of_clients = jax.vmap(self.algorithm.init, (None, None, 0), (None, 0))
        shared, personal = of_clients(init_key, hparams, ids)
        return SimulationState(
            round=jnp.zeros((), jnp.int32),
            shared=shared,
            personal=personal,
            mechanism=self.mechanism.init(hparams),
            privacy=ledger.with_key(
                ledger.Ledger(self.no_charges(hparams), public=self.assumed), key
            ),
            key=key,
            consumed=jnp.zeros(len(ids), jnp.int32) if self.consumes else None,
        )

    @traced_for_its_devices
    def step(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows
    ) -> tuple[SimulationState, Metrics]:
        """Run one round; return the next state and the round's metrics.

        A round that would exceed the budget of the state is none: the state stays as it is.
        """
        return self.drawn_round(state, hparams, rows, self.draw(state, hparams))

    @traced_for_its_devices
    def drawn_round(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows, drawn: Draw
    ) -> tuple[SimulationState, Metrics]:
        """Run a round whose random choices have been drawn; see `step`."""

        def run(state):
            worked = self.work(state, hparams, rows, drawn)
            return self.server_update(state, hparams, drawn, worked)

        has_budget = state.privacy.limit is not None or state.privacy.room is not None
        if not (has_budget and self.mechanism.event.releases):
            return run(state)
        shapes = jax.eval_shape(
            lambda: (self.work(state, hparams, rows, drawn).accumulator, run(state)[1])
        )
        nothing, no_metrics = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        # The noise multiplier follows from public state alone, so messages of zero tell it.
        release = self._release(state, hparams, drawn, nothing)
        after = self._charged(state, hparams, drawn, release.noise_multiplier)
        return jax.lax.cond(allows(after), run, lambda state: (state, no_metrics), state)

    @traced_for_its_devices
    def rounds(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows, rounds: int
    ) -> tuple[SimulationState, Metrics]:
        """Run `rounds` rounds; return the last state and all metrics, each (rounds, ...)."""
        return jax.lax.scan(lambda state, _: self.step(state, hparams, rows), state, length=rounds)

    @traced_for_its_devices
    def evaluate(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        rows: Rows,
        clients: jax.Array | None = None,
    ) -> ClientMetrics:
        """Compute the metrics of each client on its rows, (m, ...).

        Given the sorted ids of k `clients`, the metrics are theirs alone, (k, ...).
        """
        plan = self.plan_of_evaluation(state)

        def one(personal, client_id):
            return self.measure_client(state, personal, hparams, client_id, rows, plan.reading)

        if clients is None:
            return map_clients(one, state.personal, self.partition.known_ids(), plan, rows)
        count = clients.shape[0]
        sample = Cohort(clients, jnp.ones(count, bool), jnp.zeros((), jnp.int32))
        slots, ids, mask = self.partition.slots_of(sample, full=False)
        personal = jax.tree.map(lambda leaf: leaf[jnp.where(mask, slots, 0)], state.personal)
        measured = map_clients(
            one, personal, jnp.where(mask, ids, self.partition.anybody()), plan, rows
        )
        place = jnp.where(mask, jnp.searchsorted(clients, ids), count)

        def gathered(leaf):
            everyone = jnp.zeros((count, *leaf.shape[1:]), leaf.dtype)
            return everyone.at[place].set(leaf, mode="drop")

        return self.partition.total(jax.tree.map(gathered, measured))

    @traced_for_its_devices
    def measure_client(
        self,
        state: SimulationState,
        personal: PyTree,
        hparams: Hyperparameters,
        client_id: jax.Array,
        rows: Rows,
        reading: BatchReadOptions,
    ) -> ClientMetrics:
        """Compute the metrics of one client of this personal state on its rows."""
        with bind_weights(self.algorithm.task.frozen, rows.frozen):
            params = self.predict(state, personal, hparams, client_id, rows, reading)
            key = keys.stream(state.key, Stream.EVALUATION, state.round, client_id)
            data = rows.of(client_id, key, self.minibatches, reading)
            return self.measure(params, data)

    @traced_for_its_devices
    def predict(
        self,
        state: SimulationState,
        personal: PyTree,
        hparams: Hyperparameters,
        client_id: jax.Array,
        rows: Rows,
        reading: BatchReadOptions,
    ) -> PyTree:
        """Return the parameters that one client of this personal state predicts with."""
        algorithm = self.algorithm
        if algorithm.predict_with_data is None:
            return algorithm.predict(state.shared, personal, hparams, client_id)
        key = keys.stream(state.key, Stream.PREDICTION, state.round, client_id)
        # Minibatches that are consumed are those of a client that has consumed none.
        training, taken = rows.of_training(), jnp.int32(0)
        data = training.of(client_id, key, self.minibatches, reading, taken, key)
        return algorithm.predict_with_data(state.shared, personal, data, hparams, client_id)

    # --- placement and compilation ----------------------------------------------------------------

    def place(self, population: Population) -> dict[str, Any]:
        """Put rows where the functions read them; return them by split."""
        with jax.ensure_compile_time_eval():  # also while a run is being traced
            fields = {name: jax.device_put(value) for name, value in population.fields.items()}
            return {
                split: Rows.place(population, split, fields, self.algorithm)
                for split in population.splits
            }

    def compiled(self) -> Functions:
        """Return the four functions compiled; `rounds` reuses the buffers of its state."""
        options = {"xla_backend_optimization_level": 2} if self.plan.narrow_rows else None
        rounds = jax.jit(
            self.rounds, static_argnames="rounds", donate_argnums=0, compiler_options=options
        )
        return Functions(jax.jit(self.init), jax.jit(self.step), rounds, jax.jit(self.evaluate))

    # --- the three parts of a round ---------------------------------------------------------------

    @traced_for_its_devices
    @jax.named_scope("draw")
    def draw(self, state: SimulationState, hparams: Hyperparameters) -> Draw:
        """Draw a round from the run's key and the round alone, so rounds can be drawn ahead."""
        self._check_shapes(hparams)
        # Correlated noise draws past rounds again: no other mechanism may have used its numbers.
        correlated = self.mechanism.event.of_whole_run
        sampling, clients, orders, noise = keys.streams(
            state.key,
            (Stream.SAMPLING, 0),
            (Stream.CLIENTS, state.round),
            (Stream.ORDERS, 0),
            (Stream.RUN_NOISE, 0) if correlated else (Stream.ROUND_NOISE, state.round),
        )
        cohort = self.sampling.draw(sampling, state.round, hparams)
        return Draw(
            cohort=self.sampling.answering(cohort, clients, state.round),
            rate=self.sampling.rate(hparams),
            clients=clients,
            orders=orders,
            noise=noise,
        )

    @traced_for_its_devices
    @jax.named_scope("work")
    def work(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows, drawn: Draw
    ) -> CohortResult:
        """Run the cohort's clients and add up their messages over all devices."""
        full = self.sampling.takes_all
        worked = work(
            self.client(state, hparams, rows, drawn),
            self.mechanism,
            (state.mechanism, hparams),
            self.num_clients,
            self.partition.anybody(),
            self.plan_of_rounds(state),
            state.of_clients,
            self.partition.slots_of(drawn.cohort, full=full),
            rows,
            filled=full and self.partition.even,
        )
        accumulator, metrics = self.partition.total((worked.accumulator, worked.metrics))
        return CohortResult(worked.states, accumulator, metrics)

    def client(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows, drawn: Draw
    ) -> Callable[[PyTree, jax.Array], tuple[PyTree, PyTree, Metrics]]:
        """Return one client's round, `(states, client_id) -> states, message, metrics`.

        Its states are as `SimulationState.of_clients`, without the axis of clients.
        """
        algorithm, shared, round_ = self.algorithm, state.shared, state.round
        rate = self.sampling.answer_rate(drawn.rate)
        availability, reading = self.sampling.availability, self.plan.reading

        def client(states, client_id):
            personal, consumed = states
            batch_key = keys.stream(drawn.clients, Stream.MINIBATCHES, client_id)
            context_key = keys.stream(drawn.clients, Stream.CONTEXT, client_id)
            order = keys.stream(drawn.orders, Stream.ORDERS, client_id)
            share = availability and work_of(availability, drawn.clients, round_, client_id)
            data = rows.of(client_id, batch_key, self.minibatches, reading, consumed, order, share)
            context = Context(round_, context_key, client_id, self.num_clients, rate)
            with bind_weights(algorithm.task.frozen, rows.frozen):
                personal, message, metrics = algorithm.client(
                    shared, personal, data, hparams, context
                )
            consumed = None if consumed is None else consumed + data.num_steps()
            return (personal, consumed), widened(message), metrics

        return client

    @traced_for_its_devices
    @jax.named_scope("server")
    def server_update(
        self, state: SimulationState, hparams: Hyperparameters, drawn: Draw, worked: CohortResult
    ) -> tuple[SimulationState, Metrics]:
        """Release, take the server's step and charge the ledger; return state and metrics."""
        accumulator, round_ = worked.accumulator, state.round
        release = self._release(state, hparams, drawn, accumulator)
        # From here on the server sees the release alone.
        privacy = self._charged(state, hparams, drawn, release.noise_multiplier)
        shared = self.algorithm.server(state.shared, release.value, hparams, round_)
        after = dataclasses.replace(
            state,
            round=round_ + 1,
            shared=_with_types_of(state.shared, shared),
            mechanism=release.state,
            privacy=privacy,
        ).with_clients(worked.states)
        participants = jnp.sum(drawn.cohort.mask, dtype=jnp.int32)
        means = jax.tree.map(
            lambda total: total / participants.astype(jnp.result_type(float)), worked.metrics
        )
        return after, means | {
            "participants": participants,
            "overflow": drawn.cohort.overflow,
            "clipped": accumulator.clipped,
            "nonfinite": accumulator.nonfinite,
            "noise_multiplier": release.noise_multiplier,
        }

    def _release(
        self, state: SimulationState, hparams: Hyperparameters, drawn: Draw, total: Accumulator
    ) -> Release:
        expected = self.sampling.answer_rate(drawn.rate) * self.sampling.scheme.clients
        return self.mechanism.release(
            total, expected, drawn.noise, state.mechanism, hparams, state.round
        )

    def _charged(
        self, state: SimulationState, hparams: Hyperparameters, drawn: Draw, z: jax.Array
    ) -> Ledger:
        """Return the ledger after a round with noise multiplier z."""
        if not any(event.releases for _, event in self.accounts):
            return state.privacy
        costs = costs_of(self.algorithm, self.examples, hparams, (z, drawn.rate))
        in_range = self._in_range(hparams)
        privacy = ledger.drew(state.privacy, state.key, state.round)
        for (scheme, event), (noise, rate) in zip(self.accounts, costs, strict=True):
            if event.releases:
                cost = jnp.where(in_range, noise, jnp.nan), rate
                privacy = ledger.update(
                    privacy, scheme, event,
                    lambda charges, cost=cost: self.charge(charges, *cost, state.round),
                )  # fmt: skip
        return privacy

    def _check_shapes(self, hparams: Hyperparameters) -> None:
        """Check that each hyperparameter has a shape that its record allows."""
        for record in self.records:
            if record.name in hparams:
                value = hparams.get(record.name)
                if self._differs(record.name):
                    value = jax.ShapeDtypeStruct(jnp.shape(value)[1:], jnp.result_type(value))
                record.check_shape(value, self.num_clients)

    def _in_range(self, hparams: Hyperparameters) -> jax.Array:
        """Return whether all hyperparameters lie in their ranges, (), or of S runs (S,)."""
        inside = jnp.ones(() if self.runs is None else self.runs.size, bool)
        for record in self.records:
            if record.name in hparams:
                allowed = record.allows(jnp.asarray(hparams.get(record.name)))
                first = 1 if self._differs(record.name) else 0
                inside &= jnp.all(allowed, axis=tuple(range(first, allowed.ndim)))
        return inside

    def _differs(self, name: str) -> bool:
        """Return whether a hyperparameter has a first axis of runs."""
        return self.runs is not None and self.runs.axes.get(name) is not None

    # --- the plan ---------------------------------------------------------------------------------

    def plan_of_rounds(self, state: SimulationState) -> Plan:
        """Return the plan, given the personal states of all runs."""
        return self.plan.in_cache(bytes_of(state.personal) / self.partition.size)

    def plan_of_evaluation(self, state: SimulationState) -> Plan:
        """Return the plan of an evaluation, whose batches wait for their longest client."""
        plan = dataclasses.replace(self.plan_of_rounds(state), lengths=())
        shares = self.algorithm.task.linear is not None and not jax.tree.leaves(state.personal)
        return plan.for_shared_model() if shares else plan

    @traced_for_its_devices
    def client_bytes(self, hparams: Hyperparameters, rows: Rows) -> int:
        """Estimate from shapes the bytes that one client of a batch needs at once."""
        key = keys.seed_key(0)
        state = jax.eval_shape(self.init, key, hparams)
        drawn = jax.eval_shape(self.draw, state, hparams)

        def one(state, hparams, rows, drawn, *client):
            return self.client(state, hparams, rows, drawn)(*client)

        row, trace = row_of(state.of_clients), jax.make_jaxpr(one, return_shape=True)
        jaxpr, (_, message, _) = trace(state, hparams, rows, drawn, row, INTEGER)
        return bytes_of_work(jaxpr.jaxpr, row, message)


def _with_types_of(current: PyTree, updated: PyTree) -> PyTree:
    """Cast the new server state to the old floating types; releases are float32 at least."""

    def one(before, after):
        both = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (before, after))
        return after.astype(before.dtype) if both else after

    return jax.tree.map(one, current, updated)


def algorithm_of_run(
    algorithm: Algorithm, sampler: Sampler, fields: Mapping[str, Any], event: PrivacyEvent | None
) -> Algorithm:
    """Return the algorithm with functions that take the hyperparameters of a whole run.

    `init`, with a further argument `client_id`, `client` and `predict` read that client's values;
    the server and ε of examples read none of them. Clients report the loss, and protect examples if
    `event`, from `example_event`, says so.
    """
    records, with_data = algorithm.hyperparameters, algorithm.predict_with_data
    algorithm, examples = algorithm.on_fields(fields), algorithm.task.examples
    silos = event.silos if isinstance(event, Examples) else None

    def init(key, hparams, client_id):
        return algorithm.init(key, client_values(records, hparams, client_id))

    @functools.wraps(algorithm.client)
    def client(shared, personal, data, hparams, context):
        protection = None
        if silos is not None:
            protection = examples.of_client(data.count, silos.size, hparams, silos.noise)
        # Here, since a sweep maps this function over settings.
        view = view_here(data, protection)
        client_hparams = client_values(records, hparams, context.client_id)
        returned = algorithm.client(shared, personal, view, client_hparams, context)
        if silos is not None and view.tickets > silos.gradients:
            raise ExampleLeakError(
                f"the algorithm takes {view.tickets} gradients of a minibatch with hyperparameters "
                f"of these shapes, and {silos.gradients} with numbers: examples cannot be private"
            )
        if not isinstance(returned, tuple) or not isinstance(returned[-1], dict):
            return returned  # the checks of a round say what is wrong
        return (*returned[:-1], loss_of(view) | returned[-1])

    @functools.wraps(algorithm.server)
    def server(shared, release, hparams, round_):
        server_hparams = server_values(records, hparams)
        server_hparams = server_hparams.having(
            sampling_rate=sampler.answer_rate(sampler.rate(hparams))
        )
        return algorithm.server(shared, release, server_hparams, round_)

    @functools.wraps(algorithm.predict)
    def predict(shared, personal, hparams, client_id):
        client_hparams = client_values(records, hparams, client_id)
        return algorithm.predict(shared, personal, client_hparams, client_id)

    def predict_with_data(shared, personal, data, hparams, client_id):
        client_hparams = client_values(records, hparams, client_id)
        return with_data and with_data(shared, personal, data, client_hparams, client_id)

    example_epsilon = algorithm.example_epsilon
    return algorithm._replace(
        init=init,
        client=client,
        server=server,
        predict=predict,
        predict_with_data=with_data and predict_with_data,
        example_epsilon=example_epsilon and _of_server(example_epsilon, records),
    )


def mechanism_of_run(mechanism: Mechanism, records: Iterable[Hyperparameter]) -> Mechanism:
    """Return the mechanism with functions that read no client's hyperparameters.

    So neither the bound on a message nor the noise follows from them.
    """
    names = "init", "add", "release"
    return mechanism._replace(
        **{name: _of_server(getattr(mechanism, name), records) for name in names}
    )


def _of_server(
    function: Callable[..., Any], records: Iterable[Hyperparameter]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args):
        converted = (
            server_values(records, a) if isinstance(a, Hyperparameters) else a for a in args
        )
        return function(*converted)

    return called
