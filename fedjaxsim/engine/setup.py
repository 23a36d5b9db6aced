"""The parts of a simulation, checked against each other, and the program made of them.

`Simulation` is what users call. Sweeps, derivatives, audits and commands ask a simulation's `setup`
for what they need besides: checks before any compute, rows on devices, shapes of messages.
"""

import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine import accounts
from fedjaxsim.engine.checks import check_parts, require_key, require_state
from fedjaxsim.engine.client_partition import AllClients
from fedjaxsim.engine.devices import mesh_of, require_devices
from fedjaxsim.engine.evaluation import Evaluation, SplitStatistics, measure_with, summarize
from fedjaxsim.engine.layout import ChunkMap, layout_of
from fedjaxsim.engine.own_code import assumptions_of
from fedjaxsim.engine.processes import to_host
from fedjaxsim.engine.program import ClientMetrics, Program, with_rate
from fedjaxsim.engine.purity import Captured, check_captured
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.shard import CLIENTS, shard
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.stream import stream
from fedjaxsim.engine.traced_checks import trace_round
from fedjaxsim.factories import factory_of
from fedjaxsim.hyperparameters import USUAL_STEP, Hyperparameters, compose
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.composition import require_match
from fedjaxsim.privacy.budget import entries
from fedjaxsim.privacy.events import PrivacySpend
from fedjaxsim.privacy.mechanisms import Mechanism, check_noise
from fedjaxsim.privacy.samplers import Sampling
from fedjaxsim.privacy.samplers.law import check_own
from fedjaxsim.tasks.task import check_rows

_MANY_ROUNDS = 200
"""Rounds after which noise that adds up is worth a warning."""

PyTree = Any

LEDGER_ENTRIES = 8
"""Number of distinct (z, p) that a run with a constant z can be charged for over its life."""


@dataclasses.dataclass(eq=False, repr=False)
class Setup:
    """The parts of a simulation and the functions compiled from them.

    Fields and errors are the arguments and errors of `Simulation`. Further attributes follow from
    the fields.

    Attributes:
      task: the algorithm's task.
      sampler: the sampler of cohorts of the population's clients.
      records: the hyperparameters that the parts declare, by name.
      layout: grouping of clients and their work.
      program: the pure functions of a run on one device.
      transformed: the program, sharded or streamed as asked for.
      compiled: the compiled functions of `transformed`.
    """

    algorithm: Algorithm
    population: Population
    sampling: Sampling
    minibatches: Minibatches
    mechanism: Mechanism
    accountant: str | None
    ledger_entries: int
    chunk_size: int | None
    chunk_map: ChunkMap | None
    devices: Sequence[Any] | None
    streamed: bool

    def __post_init__(self):
        algorithm, mechanism = self.algorithm, self.mechanism
        check_parts(
            algorithm=algorithm,
            task=getattr(algorithm, "task", None),
            warm_start=getattr(algorithm, "warm_start", None),
            population=self.population,
            sampling=self.sampling,
            minibatches=self.minibatches,
            mechanism=mechanism,
        )
        m = self.num_clients
        self.task, self.sampler = algorithm.task, self.sampling.sampler(m)
        check_parts(sampler=self.sampler)
        scheme, event = self.sampler.scheme, mechanism.event
        if scheme.clients != m:
            raise ValueError(
                f"the sampler draws from {scheme.clients} clients, but the population has {m}"
            )
        parts = (algorithm, mechanism, self.sampling, *accounts.read_by(self.task))
        self.records = compose(part.hyperparameters for part in parts)
        if mechanism.num_clients not in (None, m):
            raise ValueError(
                f"the mechanism is for {mechanism.num_clients} clients, but the population has {m}"
            )
        if event.releases and event.known:
            require_match(self.accountant, scheme, event)
        if self.devices is not None:
            require_devices(self.devices)
        checks.count(ledger_entries=self.ledger_entries)
        if self.streamed and self.devices is not None:
            raise ValueError("a streamed simulation runs on the first device: leave devices out")
        self._use(self.population)
        self.layout = layout_of(
            self.task,
            self.population,
            self.sampling,
            self.minibatches,
            self.chunk_size,
            self.chunk_map,
        )
        self._lawful: set[str] = set()
        self._accounts = accounts.accounts_of(algorithm, mechanism, self.sampler, self.examples)
        self._traced: dict[Any, tuple[PyTree, list[Captured]]] = {}
        self.program = Program(
            accounts.with_views(with_rate(algorithm, self.sampler), self.examples),
            mechanism,
            self.sampler,
            measure_with(self.task),
            self.minibatches,
            self.layout,
            AllClients(m),
            accounts.no_charges(self._accounts, self.ledger_entries, self.population.preparations),
            examples=self.examples,
        )
        if self.streamed:
            self.transformed = stream(self.program)
        elif self.devices is not None:
            self.transformed = shard(self.program, mesh_of(self.devices, CLIENTS))
        else:
            self.transformed = self.program
        self.compiled = self.transformed.compiled()

    def _use(self, population: Population) -> None:
        """Check and set the population; rows go to the device when they are first needed."""
        check_rows(self.task, population.fields)
        if population.generate is not None and (
            self.minibatches.steps is None or self.minibatches.passes is not None
        ):
            raise ValueError(
                "a population that generates its minibatches has no epochs or passes; give steps, "
                f"got {self.minibatches}"
            )
        self.population = population
        self.examples = accounts.example_event(self.algorithm, self.minibatches, population)
        self._checked: set[Any] = set()
        self._statistics: dict[str, SplitStatistics] = {}

    def with_population(self, population: Population) -> Self:
        """Return the setup on other data of as many clients, sharing compiled code.

        Raises:
          ValueError: for another number of clients.
        """
        if population.num_clients != self.num_clients:
            raise ValueError(
                f"the population must have {self.num_clients} clients, got {population.num_clients}"
            )
        if population.preparations != self.population.preparations:
            return dataclasses.replace(self, population=population)
        other = copy.copy(self)
        for cached in ("rows", "placed"):
            other.__dict__.pop(cached, None)
        other._use(population)
        accounts.require_same(self.examples, other.examples)
        return other

    @functools.cached_property
    def rows(self) -> dict[str, Rows]:
        """Each split's rows on the first device, by its name.

        Raises:
          ValueError: the simulation is streamed, so no rows are on a device.
        """
        self.check_in_memory()
        return self.program.place(self.population)

    @functools.cached_property
    def placed(self) -> dict[str, Any]:
        """Each split's rows where the transformed program reads them, by its name."""
        alike = self.transformed is self.program
        return self.rows if alike else self.transformed.place(self.population)

    def chunk_size_for(self, hparams: Hyperparameters) -> int:
        """Return the number of clients of a chunk on one device, computed from shapes.

        Rounds may use another size that suits a form of messages, or divides a cohort.
        """
        if self.layout.memory is None:
            return self.layout.chunk_size
        rows, hparams = Rows.shapes(self.population, "train", self.algorithm), hparams.as_arrays()
        state = jax.eval_shape(self.program.init, jax.random.key(0), hparams)
        devices = len(self.devices or (None,))
        layout = self.layout.for_memory(
            bytes_of(rows) // devices,
            bytes_of((state.personal, state.consumed)) // devices,
            self.program.client_bytes(hparams, rows),
            min(self.sampler.scheme.capacity, -(-self.num_clients // devices)),
        )
        return layout.chunk_size

    @property
    def public(self) -> tuple[str, ...]:
        """The assumptions of every guarantee: numbers made of data that are taken as public.

        The population, the task, the algorithm and the mechanism each name theirs in sentences;
        functions of users add theirs.
        """
        parts = (self.population, self.task, self.algorithm, self.mechanism)
        named = dict.fromkeys(sentence for part in parts for sentence in part.public)
        return (*named, *assumptions_of(self.algorithm, self.mechanism, self.sampler))

    @property
    def bounds_steps(self) -> bool:
        """Return whether the curvature that local steps meet is bounded: of squared loss by ‖x‖."""
        known = self.task.curvature is not None and self.algorithm.curvature is not None
        columns = self.population.columns.get("x")
        return known and columns is not None and math.isfinite(columns.norm)

    def step_size(self, hparams: Hyperparameters) -> Any:
        """Return the default learning rate: 1/L where the curvature is bounded by L."""
        if not self.bounds_steps:
            return USUAL_STEP
        assert self.task.curvature is not None
        assert self.algorithm.curvature is not None
        of_loss = self.task.curvature(self.population.columns["x"].norm ** 2)
        return 1 / self.algorithm.curvature(of_loss, hparams)

    @property
    def num_clients(self) -> int:
        """The number of clients m."""
        return self.population.num_clients

    def summarize(self, split: str, measured: ClientMetrics) -> Evaluation:
        """Summarize metrics of each client, (m,) or, of S runs, (m, S)."""
        if split not in self._statistics:
            self._statistics[split] = SplitStatistics.of(
                self.population, split, self.task, measured.sums
            )
        return summarize(split, to_host(measured), self._statistics[split])

    def __repr__(self) -> str:
        batches = self.minibatches
        amount = f"steps {batches.steps}" if batches.epochs is None else f"epochs {batches.epochs}"
        fields = (f"{name} {values.shape}" for name, values in self.population.fields.items())
        where, scheme = "streamed" if self.streamed else "in memory", self.sampler.scheme
        lines = [
            f"Simulation of {factory_of(self.algorithm.client)}",
            f"  {repr(self.population).splitlines()[0]}",
            f"  fields: {', '.join(fields)}",
            f"  sampling: {scheme.kind}, at most {scheme.capacity} clients a round",
            f"  mechanism: {self.mechanism.event.kind}",
            f"  minibatches: size {batches.size}, {amount}",
            f"  data: {where}, devices: {len(self.devices or (None,))}",
        ]
        return "\n".join(lines)

    # --- the ledger of a state --------------------------------------------------------------------

    def with_account(self, state: SimulationState, begins: bool = False) -> SimulationState:
        """Return a state of any simulation with accounts, and assumptions, of this one."""
        require_state(state)
        accounts.require_protection(state.privacy, self._accounts)
        privacy = ledger.with_public(state.privacy, self.public)
        privacy = ledger.with_preparations(privacy, self.population.preparations)
        for scheme, event in self._accounts:
            privacy = ledger.with_account(privacy, scheme, event, self.ledger_entries, begins)
        return dataclasses.replace(state, privacy=privacy)

    def with_room(
        self, state: SimulationState, hparams: Hyperparameters, rounds: int
    ) -> SimulationState:
        """Return the state with ledger entries for `rounds` more rounds."""
        state, done = self.with_account(state), int(state.round)
        scheme, event = self._accounts[0]
        if not event.releases:
            return state
        z = np.asarray(hparams.get("noise_multiplier", 0.0))
        z = z[done : done + rounds] if z.ndim else z
        privacy = ledger.with_room(state.privacy, scheme, event, z, self.sampler.rate(hparams))
        return dataclasses.replace(state, privacy=privacy)

    @property
    def prepared(self) -> tuple[PrivacySpend, ...]:
        """The charges of releases before round 1, to which the population was adapted."""
        return tuple(map(ledger.spend_of, self.population.preparations))

    def planned(
        self, hparams: Hyperparameters, begin: int = 0, end: int | None = None
    ) -> PrivacySpend:
        """Return the charges of rounds `begin` to `end`; by default of one, or of a schedule."""
        scheme, event = self._accounts[0]
        hparams = hparams.as_arrays()
        noise = np.asarray(hparams.get("noise_multiplier", 0.0))
        end = (len(noise) if noise.ndim else begin + 1) if end is None else end
        if not event.releases:
            return PrivacySpend(scheme, event, ())
        noise = noise[begin:end] if noise.ndim else noise
        rate = float(self.sampler.rate(hparams))
        return PrivacySpend(scheme, event, entries(noise, rate, end - begin))

    # --- checks, before any compute ---------------------------------------------------------------

    def check(self, hparams: Hyperparameters) -> Hyperparameters:
        """Return the hyperparameters as arrays, if they suit the parts.

        Raises:
          ValueError: if one is out of range.
        """
        if not isinstance(hparams, Hyperparameters) or set(hparams) != set(self.records):
            names = list(hparams) if isinstance(hparams, Hyperparameters) else hparams
            raise ValueError(
                f"hparams must come from `hyperparameters` of this simulation, which reads "
                f"{', '.join(self.records) or 'none'}; got {names}"
            )
        for name, record in self.records.items():
            record.check(getattr(hparams, name))
        check_noise(hparams)
        for part in (self.algorithm, self.mechanism, self.sampler):
            part.check(hparams)
        # In one order, so that one program serves them wherever they were made.
        ordered = {name: getattr(hparams, name) for name in self.records}
        return Hyperparameters(**ordered).as_arrays()

    def check_start(
        self, key: jax.Array | int, hparams: Hyperparameters
    ) -> tuple[jax.Array, Hyperparameters]:
        """Return the key and, as arrays, the hyperparameters with which a run may start.

        Raises:
          ValueError: as `Simulation.init`.
        """
        key = require_key(key)
        hparams = self.check(hparams)
        check_own(self.sampling, self.sampler, hparams, self._lawful)
        self.message_shapes(key, hparams)
        return key, hparams

    def check_rounds(
        self, hparams: Hyperparameters, done: int, rounds: int, eval_every: int | None
    ) -> None:
        """Check that a run can go on for `rounds` rounds after `done`.

        Raises:
          ValueError: as `Simulation.run`.
        """
        checks.count(rounds=rounds)
        if eval_every is not None:
            checks.count(eval_every=eval_every)
        most, last = self.sampler.rounds, done + rounds
        if most is not None and last > most:
            raise ValueError(
                f"the sampler serves {most} rounds in all, got {done} done and {rounds} more"
            )
        z = hparams.get("noise_multiplier", 0.0)
        forgets = self.algorithm.noise_adds_up
        known = not isinstance(z, core.Tracer)
        if forgets and known and last > _MANY_ROUNDS and np.any(np.asarray(z) > 0):
            warnings.warn(
                f"the server's state adds up the noise of all {last} rounds; at the same ε, "
                f"{forgets} forgets it",
                stacklevel=1,
            )
        if np.ndim(z) == 0:
            return
        if np.shape(z)[0] < last:
            raise ValueError(
                f"the noise schedule has {np.shape(z)[0]} values, too few for {last} rounds"
            )
        distinct = len(np.unique(np.asarray(z)[:last]))
        if distinct > self.ledger_entries:
            raise ValueError(
                f"the noise schedule has {distinct} distinct values, but the ledger has "
                f"{self.ledger_entries} places; set ledger_entries={distinct} or more"
            )

    def check_split(self, split: str) -> None:
        """Raise ValueError if there is no split of that name."""
        checks.one_of(sorted(self.population.splits), split=split)

    def check_in_memory(self) -> None:
        """Check that rows may be on devices.

        Raises:
          ValueError: the simulation is streamed.
        """
        if self.streamed:
            raise ValueError("sweeps and derivatives need all rows in memory: they do not stream")

    def message_shapes(self, key: jax.Array, hparams: Hyperparameters) -> PyTree:
        """Return the shapes of one client's message.

        The first call checks all functions of the algorithm and the mechanism.

        Args:
          key: a random key.
          hparams: hyperparameters, as arrays.

        Raises:
          ValueError: as `Simulation.init`.
        """
        rows = Rows.shapes(self.population, "train")
        leaves = jax.tree.leaves((hparams, rows.fields))
        kind = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if kind not in self._traced:  # shared with the setups of other data
            self._traced[kind] = trace_round(self.program, rows, key, hparams)
        message, captured = self._traced[kind]
        if kind not in self._checked:
            check_captured(captured, self.population.fields)
            self._checked.add(kind)
        return message

    def require_checked(self) -> None:
        """Check all functions, unless a run did; a state may come from `program` alone.

        Raises:
          ValueError: as `Simulation.init`.
        """
        if not self._checked:
            one = jnp.zeros(())
            hparams = Hyperparameters(**dict.fromkeys(self.records, one))
            self.message_shapes(jax.random.key(0, impl="threefry2x32"), hparams)
