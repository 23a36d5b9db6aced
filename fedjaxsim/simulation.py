"""The loop: a federated run as repeated application of one pure function.

Start reading here. `Simulation` puts an algorithm (written for one client), a population, a
sampler and a mechanism together. A round is a pure function of (state, hparams); the rounds
between two evaluations are one compiled `lax.scan` whose state is donated.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from fedjaxsim.algorithm import Algorithm, Context, Metrics
from fedjaxsim.data.minibatches import Batch, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.evaluation import Evaluation, summarize
from fedjaxsim.hparams import Hyperparameters, known, validate
from fedjaxsim.models.task import Task
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.composition import require_match
from fedjaxsim.privacy.accounting.in_loop import epsilon_in_jit
from fedjaxsim.privacy.guarantee import Report, default_delta, report
from fedjaxsim.privacy.mechanisms import Mechanism, gaussian
from fedjaxsim.privacy.sampling import Sampling, check_rate
from fedjaxsim.rounds import ChunkMap, Rows, default_chunking, map_clients, run_cohort

PyTree = Any

LEDGER_ENTRIES = 8
"""Places for different (z, p) that a run with a constant z can be charged for over its life."""


@register_dataclass
@dataclasses.dataclass(frozen=True)
class SimulationState:
    """Everything a run carries from round to round, as one pytree. Nothing else holds state.

    Attributes:
      round: () int32, rounds done.
      shared: the billboard.
      personal: all clients' personal states, leaves (m, ...).
      mechanism: the mechanism's public state.
      privacy: the ledger of what was released.
      key: the run's random key; rounds and clients fold their numbers into it.
    """

    round: jax.Array
    shared: PyTree
    personal: PyTree
    mechanism: PyTree
    privacy: ledger.Ledger
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Segment:
    """What the rounds between two evaluations gave.

    Attributes:
      round: rounds done at its end.
      metrics: per-round metrics by name, each (rounds,) numpy arrays: the means over the cohort of
        the algorithm's own, and "participants", "overflow", "clipped", "nonfinite",
        "noise_multiplier".
      evaluation: on the test split, after the last round.
    """

    round: int
    metrics: dict[str, np.ndarray]
    evaluation: Evaluation


class Simulation:
    """A federated simulation: what is compiled, and the population it runs on.

    Args:
      algorithm: e.g. `pmtl(task)`.
      task: whose metrics `evaluate` reports; its `check` must accept the population.
      population: all clients' data.
      sampling: e.g. `poisson(m, max_rate=0.1)`, or `everyone(m)`.
      minibatches: local steps or epochs, and the batch size.
      mechanism: the door; `closed()` for an algorithm that sends nothing.
      accountant: the one that `guarantee` reports, by name; by default the tightest sound one for
        each adjacency and view.
      ledger_entries: how many different (z, p) the run may be charged for; raise it to the number
        of distinct values where z follows a schedule.
      chunk_size: clients run together, at least 2. By default 16 on a CPU and 64 elsewhere.
      chunk_map: "scan" or "vmap" inside a chunk. By default "scan" on a CPU and "vmap" elsewhere.

    Raises:
      ValueError: where the parts do not fit together: a sampler for another number of clients, an
        accountant that does not describe sampler and mechanism, data that do not suit the task.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        population: Population,
        sampling: Sampling,
        minibatches: Minibatches,
        mechanism: Mechanism | None = None,
        *,
        accountant: str | None = None,
        ledger_entries: int = LEDGER_ENTRIES,
        chunk_size: int | None = None,
        chunk_map: ChunkMap | None = None,
    ):
        if sampling.scheme.clients != population.num_clients:
            raise ValueError(
                f"the sampler draws from {sampling.scheme.clients} clients, "
                f"but the population has {population.num_clients}"
            )
        self.algorithm, self.task, self.sampling = algorithm, task, sampling
        self.mechanism = gaussian() if mechanism is None else mechanism
        if accountant is not None:
            require_match(accountant, sampling.scheme, self.mechanism.event)
        self.accountant = accountant
        self.minibatches, self.ledger_entries = minibatches, ledger_entries
        self.chunking = default_chunking(chunk_size, chunk_map)
        self._place(population)
        self._init = jax.jit(self._init_state)
        self._one_round = jax.jit(self._round)
        self._segment = jax.jit(self._rounds, static_argnames="rounds", donate_argnums=0)
        self._evaluate = jax.jit(self._evaluate_rows)

    def _place(self, population: Population) -> None:
        """Checks a population and puts it on the device."""
        self.task.check(population.fields)
        self.population = population
        fields = {name: jnp.asarray(value) for name, value in population.fields.items()}
        self._rows = {
            split: Rows(fields, jnp.asarray(ranges.start), jnp.asarray(ranges.count))
            for split, ranges in population.splits.items()
        }

    def with_population(self, population: Population) -> Self:
        """The same simulation on other data of as many clients, sharing compiled code.

        Shapes that agree (rows and fields) lead to no new compilation.
        """
        if population.num_clients != self.num_clients:
            raise ValueError(
                f"the population must have {self.num_clients} clients, got {population.num_clients}"
            )
        other = copy.copy(self)
        other._place(population)
        return other

    def with_algorithm(self, algorithm: Algorithm) -> "Simulation":
        """The same simulation, population and settings included, of another algorithm."""
        return Simulation(
            algorithm,
            self.task,
            self.population,
            self.sampling,
            self.minibatches,
            self.mechanism,
            accountant=self.accountant,
            ledger_entries=self.ledger_entries,
            chunk_size=self.chunking.size,
            chunk_map=self.chunking.map,
        )

    @property
    def num_clients(self) -> int:
        """The number of clients m."""
        return self.population.num_clients

    # --- the pure functions that are compiled -----------------------------------------------------

    def _init_state(self, key: jax.Array, hparams: Hyperparameters) -> SimulationState:
        init_key, run_key = jax.random.split(key)
        shared, personal = self.algorithm.init(init_key, hparams)

        def for_all(leaf):
            return jnp.broadcast_to(leaf, (self.num_clients, *leaf.shape))

        return SimulationState(
            round=jnp.zeros((), jnp.int32),
            shared=shared,
            personal=jax.tree.map(for_all, personal),
            mechanism=self.mechanism.init(hparams),
            privacy=ledger.empty(self.ledger_entries),
            key=run_key,
        )

    def _round(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows
    ) -> tuple[SimulationState, Metrics]:
        streams = jax.random.split(state.key, 3)
        sampling_key = streams[0]
        client_key = jax.random.fold_in(streams[1], state.round)
        noise_key = jax.random.fold_in(streams[2], state.round)
        cohort = self.sampling.draw(sampling_key, state.round, hparams)
        result = run_cohort(
            self.algorithm,
            self.mechanism,
            self.minibatches,
            self.chunking,
            store=state.personal,
            slots=cohort.ids,
            cohort=cohort,
            rows=rows,
            shared=state.shared,
            mechanism_state=state.mechanism,
            hparams=hparams,
            round_=state.round,
            key=client_key,
            num_clients=self.num_clients,
        )
        rate = self.sampling.rate(hparams)
        release = self.mechanism.release(
            result.accumulator,
            rate * self.num_clients,
            noise_key,
            state.mechanism,
            hparams,
            state.round,
        )
        # From here on the server sees the release alone.
        privacy = state.privacy
        if self.mechanism.event.kind != "none":
            privacy = ledger.charge(privacy, release.noise_multiplier, rate)
        new_state = SimulationState(
            round=state.round + 1,
            shared=self.algorithm.server(state.shared, release.value, hparams, state.round),
            personal=result.store,
            mechanism=release.state,
            privacy=privacy,
            key=state.key,
        )
        participants = jnp.sum(cohort.mask, dtype=jnp.int32)
        means = jax.tree.map(lambda total: total / participants, result.metrics)
        return new_state, means | {
            "participants": participants,
            "overflow": cohort.overflow,
            "clipped": result.accumulator.clipped,
            "nonfinite": result.accumulator.nonfinite,
            "noise_multiplier": release.noise_multiplier,
        }

    def _rounds(self, state, hparams, rows, rounds):
        def body(state, _):
            return self._round(state, hparams, rows)

        return jax.lax.scan(body, state, length=rounds)

    def _evaluate_rows(self, state, hparams, rows):
        def one(personal, client_id):
            params = self.algorithm.predict(state.shared, personal, hparams, client_id)
            data = rows.of(client_id, state.key, self.minibatches)

            def add(totals, batch):
                values = self.task.metrics(params, batch)
                return {name: totals[name] + batch.sum(values[name]) for name in totals}

            example = Batch({name: field[:1] for name, field in rows.fields.items()}, jnp.ones(1))
            shapes = jax.eval_shape(self.task.metrics, params, example)
            return data.full_pass(add, {name: jnp.zeros((), v.dtype) for name, v in shapes.items()})

        return map_clients(one, state.personal, self.num_clients, self.chunking)

    # --- what a user calls ------------------------------------------------------------------------

    def init(self, key: jax.Array | int, hparams: Hyperparameters) -> SimulationState:
        """The state before the first round.

        Args:
          key: a threefry key (`jax.random.key(seed)`) or a seed.
          hparams: hyperparameters.

        Raises:
          ValueError: if a hyperparameter is out of range, the key is of another kind, or the
            mechanism does not suit what the algorithm sends.
        """
        if not isinstance(key, jax.Array):
            key = jax.random.key(key, impl="threefry2x32")
        elif not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or "fry" not in str(key.dtype):
            # Other generators share one stream under vmap, which breaks noise and sampling.
            raise ValueError(f"key must be a typed threefry key, jax.random.key(seed), got {key}")
        hparams = self._checked(hparams)
        sends = bool(jax.tree.leaves(self._message_shapes(key, hparams)))
        if sends and self.mechanism.event.kind == "none":
            raise ValueError(
                "the algorithm sends messages, which a closed door would lose; use gaussian()"
            )
        if not sends and self.mechanism.event.kind != "none":
            raise ValueError(
                "the algorithm sends nothing, so its mechanism must be closed(): an open door "
                "would be charged for releasing nothing"
            )
        return self._init(key, hparams)

    def round(
        self, state: SimulationState, hparams: Hyperparameters
    ) -> tuple[SimulationState, Metrics]:
        """One round, as a pure function: it may be mapped, differentiated and composed.

        Returns:
          The next state, and the round's metrics by name (see `Segment`), each ().
        """
        return self._one_round(state, self._checked(hparams), self._rows["train"])

    def run(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        rounds: int,
        *,
        eval_every: int | None = None,
        on_segment: Callable[[SimulationState, Segment], bool | None] | None = None,
    ) -> tuple[SimulationState, list[Segment]]:
        """Runs rounds, evaluating on the test split after every `eval_every` of them.

        Args:
          state: where to start; its buffers are reused, so it cannot be used afterwards.
          hparams: hyperparameters; with a noise schedule (T,), round t (counted over the whole
            life of the state) uses its t-th value.
          rounds: how many, at least 1.
          eval_every: rounds in one compiled segment; by default all of them.
          on_segment: called with the state and what the segment gave; returning False stops.

        Returns:
          The state after the last round, and the segments.

        Raises:
          ValueError: if a number is out of range, or a noise schedule is too short for the rounds
            or has more distinct values than the ledger has places.
        """
        if rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {rounds}")
        eval_every = rounds if eval_every is None else eval_every
        if eval_every < 1:
            raise ValueError(f"eval_every must be at least 1, got {eval_every}")
        done = int(state.round)
        self._check_schedule(hparams, done + rounds)
        hparams = self._checked(hparams)
        last = done + rounds
        if self.sampling.rounds is not None and last > self.sampling.rounds:
            raise ValueError(
                f"the sampler serves {self.sampling.rounds} rounds in all, "
                f"got {done} done and {rounds} more"
            )
        history = []
        while done < last:
            length = min(eval_every, last - done)
            state, metrics = self._segment(state, hparams, self._rows["train"], rounds=length)
            done += length
            evaluation = self.evaluate(state, hparams)
            history.append(Segment(done, jax.tree.map(np.asarray, metrics), evaluation))
            if on_segment is not None and on_segment(state, history[-1]) is False:
                break
        return state, history

    def evaluate(
        self, state: SimulationState, hparams: Hyperparameters, split: str = "test"
    ) -> Evaluation:
        """Per-client metrics of the models the clients predict with.

        Args:
          state: of a run.
          hparams: hyperparameters.
          split: "train", "validation" or "test".

        Raises:
          ValueError: if there is no such split.
        """
        if split not in self._rows:
            raise ValueError(f"split must be one of {sorted(self._rows)}, got {split!r}")
        sums = self._evaluate(state, hparams.as_arrays(), self._rows[split])
        ranges = self.population.splits[split]
        targets = None
        if "squared_error" in sums:
            y = self.population.fields["y"]
            spans = zip(ranges.start, ranges.count, strict=True)
            targets = np.concatenate([y[start : start + count] for start, count in spans])
        return summarize(split, jax.tree.map(np.asarray, sums), ranges.count, targets)

    def guarantee(self, state: SimulationState, delta: float | None = None) -> Report:
        """What the releases so far cost, computed on the host in float64 from the ledger.

        Args:
          state: of a run.
          delta: total δ in (0, 1); by default `default_delta(m)`, at most 1/(10 m).
        """
        delta = default_delta(self.num_clients) if delta is None else delta
        event = self.mechanism.event
        return report(state.privacy, self.sampling.scheme, event, delta, self.accountant)

    def epsilon(self, state: SimulationState, delta: float | None = None) -> jax.Array:
        """An upper bound on ε (zero-out) that can be read inside jit; () ∞ where there is none.

        The RDP bound, in the precision of the run: for display, control and derivatives. It is a
        little above the number to report, which `guarantee` computes on the host.

        Args:
          state: of a run.
          delta: δ in (0, 1); by default `default_delta(m)`.
        """
        delta = default_delta(self.num_clients) if delta is None else delta
        return epsilon_in_jit(state.privacy, delta, self.sampling.scheme, self.mechanism.event)

    # --- checks, before any compute ---------------------------------------------------------------

    def _checked(self, hparams: Hyperparameters) -> Hyperparameters:
        validate(hparams)
        self.mechanism.check(hparams, self.num_clients)
        rate = known(hparams.sampling_rate)
        if rate is not None:
            for value in np.ravel(rate):
                check_rate(self.sampling, float(value))
        return hparams.as_arrays()

    def _check_schedule(self, hparams: Hyperparameters, last_round: int) -> None:
        z = hparams.noise_multiplier
        if np.ndim(z) == 0:
            return
        if np.shape(z)[0] < last_round:
            raise ValueError(
                f"the noise schedule has {np.shape(z)[0]} values, too few for {last_round} rounds"
            )
        distinct = len(np.unique(np.asarray(z)[:last_round]))
        if distinct > self.ledger_entries:
            raise ValueError(
                f"the noise schedule has {distinct} distinct values, but the ledger has "
                f"{self.ledger_entries} places; set ledger_entries={distinct} or more"
            )

    def _message_shapes(self, key: jax.Array, hparams: Hyperparameters) -> PyTree:
        def one(key, hparams, rows):
            shared, personal = self.algorithm.init(key, hparams)
            client_id = jnp.int32(0)
            data = rows.of(client_id, key, self.minibatches)
            context = Context(jnp.int32(0), key, client_id, self.num_clients)
            return self.algorithm.client(shared, personal, data, hparams, context)[1]

        return jax.eval_shape(one, key, hparams, self._rows["train"])
