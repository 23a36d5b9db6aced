"""The loop: a federated run as repeated application of one pure function.

Start reading here. `Simulation` puts an algorithm (written for one client), a population, a
sampler and a mechanism together, checks them, and compiles the pure functions of
`engine/program.py`. A round is a pure function of (state, hparams); the rounds between two
evaluations are one compiled `lax.scan` whose state is donated.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithm import Algorithm, Metrics
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine import checks
from fedjaxsim.engine.evaluation import Evaluation, Facts, summarize
from fedjaxsim.engine.layout import ChunkMap, Layout, bytes_of, default_layout
from fedjaxsim.engine.loop import Callbacks, Run
from fedjaxsim.engine.placement import Placement
from fedjaxsim.engine.placement.devices import OverDevices
from fedjaxsim.engine.placement.memory import InMemory
from fedjaxsim.engine.placement.streamed import Streamed
from fedjaxsim.engine.processes import to_host
from fedjaxsim.engine.program import Measured, Program, measure_with
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.segments import History
from fedjaxsim.engine.share import Whole
from fedjaxsim.engine.stages import first_states, stage_key
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters, Value, compose, fill
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.composition import require_match
from fedjaxsim.privacy.accounting.in_loop import epsilon_in_jit
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.privacy.guarantee import Report, default_delta, report
from fedjaxsim.privacy.mechanisms import Mechanism, check_noise, gaussian
from fedjaxsim.privacy.sampling import Sampling
from fedjaxsim.tasks.task import Task

PyTree = Any

LEDGER_ENTRIES = 8
"""Places for different (z, p) that a run with a constant z can be charged for over its life."""


class Simulation:
    """A federated simulation: what is compiled, and the population it runs on.

    Args:
      algorithm: e.g. `pmtl(task)`; the `check` of its task must accept the population.
      population: all clients' data.
      sampling: `poisson(0.1)`, `full_participation()`, or another one.
      minibatches: local steps or epochs, and the batch size; by default one epoch of batches of 10.
      mechanism: by default `gaussian()`; `no_release()` for an algorithm that sends nothing.
      accountant: the one that `guarantee` reports, by name; by default the tightest sound one for
        each adjacency and view. (Where nothing is released it is that of the stages before.)
      ledger_entries: how many different (z, p) the run may be charged for; raise it to the number
        of distinct values where z follows a schedule.
      chunk_size: clients run together, at least 2. By default 16 in a scan and 64 in a batch; on an
        accelerator as many as a quarter of the memory holds that rows and states leave.
      chunk_map: "scan" or "vmap" inside a chunk. By default "vmap", and "scan" on a CPU for models
        above 4 kB.
      devices: JAX devices over which the clients are divided; by default the first one. A CPU has
        one for each core after `engine.devices.use_all_cores()`.
      streamed: whether rows and states stay on the host, or on disk, and the device holds those of
        one cohort at a time; see `engine/placement/streamed.py`.

    Attributes:
      program: the pure functions of a run on one device; see `engine/program.py`.
      records: the hyperparameters that its parts declare, by name.

    Raises:
      ValueError: where the parts do not fit together: a function of other arguments than it is
        called with, a sampler for another number of clients, an accountant that does not describe
        sampler and mechanism, data that do not suit the task.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        sampling: Sampling,
        minibatches: Minibatches | None = None,
        mechanism: Mechanism | None = None,
        *,
        accountant: str | None = None,
        ledger_entries: int = LEDGER_ENTRIES,
        chunk_size: int | None = None,
        chunk_map: ChunkMap | None = None,
        devices: Sequence[Any] | None = None,
        streamed: bool = False,
    ):
        self.mechanism = gaussian() if mechanism is None else mechanism
        minibatches = Minibatches(10, epochs=1) if minibatches is None else minibatches
        checks.check_parts(
            algorithm=algorithm,
            task=getattr(algorithm, "task", None),
            warm_start=getattr(algorithm, "warm_start", None),
            population=population,
            sampling=sampling,
            minibatches=minibatches,
            mechanism=self.mechanism,
        )
        self.algorithm, self.task, self._sampling = algorithm, algorithm.task, sampling
        self.sampling = sampling.for_clients(population.num_clients)
        checks.check_parts(sampler=self.sampling)
        if self.sampling.scheme.clients != population.num_clients:
            raise ValueError(
                f"the sampler draws from {self.sampling.scheme.clients} clients, "
                f"but the population has {population.num_clients}"
            )
        self.records = compose(
            (algorithm.hyperparameters, self.mechanism.hyperparameters, sampling.hyperparameters)
        )
        if self.mechanism.num_clients not in (None, population.num_clients):
            raise ValueError(
                f"the mechanism is for {self.mechanism.num_clients} clients, but the population "
                f"has {population.num_clients}"
            )
        if accountant is not None and self.mechanism.event.kind != "none":
            require_match(accountant, self.sampling.scheme, self.mechanism.event)
        self.accountant = accountant
        self.minibatches, self.ledger_entries = minibatches, ledger_entries
        self._chunk_size = chunk_size
        self._chunk_map: ChunkMap | None = chunk_map
        self.layout = self.layout_of(1)
        self.devices = None if devices is None else tuple(devices)
        self.streamed = streamed
        if streamed and devices is not None:
            raise ValueError("a streamed simulation runs on the first device: leave devices out")
        self.placement: Placement = InMemory() if devices is None else OverDevices(devices)
        if streamed:
            self.placement = Streamed()
        self._take(population)
        self.program = Program(
            algorithm,
            self.mechanism,
            self.sampling,
            measure_with(self.task),
            minibatches,
            self.layout,
            Whole(population.num_clients),
            self._no_charges,
        )
        functions = self.placement.compiled(self.program)
        self._init, self._one_round, self._segment, self._evaluate = functions

    def __repr__(self) -> str:
        """The parts: algorithm, data, sampling, mechanism, minibatches and placement."""
        scheme, batches = self.sampling.scheme, self.minibatches
        amount = f"steps {batches.steps}" if batches.epochs is None else f"epochs {batches.epochs}"
        fields = (f"{name} {values.shape}" for name, values in self.population.fields.items())
        where = "streamed" if self.streamed else "in memory"
        lines = [
            f"Simulation of {_name_of(self.algorithm.client)}",
            f"  {repr(self.population).splitlines()[0]}",
            f"  fields: {', '.join(fields)}",
            f"  sampling: {scheme.kind}, at most {scheme.capacity} clients a round",
            f"  mechanism: {self.mechanism.event.kind}",
            f"  minibatches: size {batches.size}, {amount}",
            f"  data: {where}, devices: {len(self.devices or (None,))}",
        ]
        return "\n".join(lines)

    def _no_charges(self) -> ledger.Charges:
        return ledger.no_charges(self.sampling.scheme, self.mechanism.event, self.ledger_entries)

    def _take(self, population: Population) -> None:
        """Checks a population and takes it; it goes to the device when it is first needed."""
        self.task.check(population.fields)
        if population.generate is not None and (
            self.minibatches.steps is None or self.minibatches.passes is not None
        ):
            raise ValueError(
                "a population that generates its minibatches has no epochs or passes; give steps, "
                f"got {self.minibatches}"
            )
        self.population = population
        self._messages: dict[Any, PyTree] = {}
        self._facts: dict[str, Facts] = {}

    @functools.cached_property
    def rows(self) -> dict[str, Rows]:
        """Where each split's rows lie on the first device, by its name.

        Raises:
          ValueError: the simulation is streamed, so that sweeps and derivatives have none.
        """
        self.check_in_memory()
        return InMemory().rows(self.population)

    def check_in_memory(self) -> None:
        """Checks that rows may lie on devices.

        Raises:
          ValueError: the simulation is streamed, so that sweeps and derivatives have none.
        """
        if self.streamed:
            raise ValueError("sweeps and derivatives need all rows in memory: they do not stream")

    @functools.cached_property
    def _placed(self) -> dict[str, Any]:
        """Each split's rows as they are placed, by its name."""
        in_memory = isinstance(self.placement, InMemory)
        return self.rows if in_memory else self.placement.rows(self.population)

    def with_population(self, population: Population) -> Self:
        """The same simulation on other data of as many clients, sharing compiled code.

        Shapes that agree (rows and fields) lead to no new compilation.
        """
        if population.num_clients != self.num_clients:
            raise ValueError(
                f"the population must have {self.num_clients} clients, got {population.num_clients}"
            )
        other = copy.copy(self)
        for cached in ("rows", "_placed"):
            other.__dict__.pop(cached, None)
        other._take(population)
        return other

    def with_algorithm(self, algorithm: Algorithm) -> "Simulation":
        """The same simulation, population and settings included, of another algorithm."""
        return self._of(algorithm, self.mechanism)

    def with_mechanism(self, mechanism: Mechanism) -> "Simulation":
        """The same simulation, population and settings included, behind another door."""
        return self._of(self.algorithm, mechanism)

    def _of(self, algorithm: Algorithm, mechanism: Mechanism) -> "Simulation":
        return Simulation(
            algorithm,
            self.population,
            self._sampling,
            self.minibatches,
            mechanism,
            accountant=self.accountant,
            ledger_entries=self.ledger_entries,
            chunk_size=self._chunk_size,
            chunk_map=self._chunk_map,
            devices=self.devices,
            streamed=self.streamed,
        )

    def layout_of(self, models: int) -> Layout:
        """The layout where every client has so many models at once."""
        return layout_of(self.task, models, self._chunk_size, self._chunk_map)

    def chunk_size(self, hparams: Hyperparameters) -> int:
        """How many clients of a cohort are worked on together on one device, told from shapes.

        Args:
          hparams: of a run.
        """
        if self.layout.memory is None:
            return self.layout.chunk_size
        fields = jax.eval_shape(lambda fields: fields, dict(self.population.fields))
        rows = Rows.place(self.population, "train", fields)
        hparams, devices = hparams.as_arrays(), len(self.devices or (None,))
        state = jax.eval_shape(self.program.init, jax.random.key(0), hparams)
        states = bytes_of((state.personal, state.consumed))
        client = self.program.client_bytes(hparams, rows)
        share = -(-self.num_clients // devices)
        places = min(self.sampling.scheme.capacity, share)
        of_device = self.layout.for_memory(
            bytes_of(rows) // devices, states // devices, client, places
        )
        return of_device.chunk_size

    @property
    def public(self) -> tuple[str, ...]:
        """Sentences on what is taken as public though it may be made of private data.

        Those of the population, the task, the algorithm and the mechanism: assumptions of every
        guarantee of the simulation.
        """
        parts = (self.population, self.task, self.algorithm, self.mechanism)
        return tuple(dict.fromkeys(sentence for part in parts for sentence in part.public))

    @property
    def functions(self) -> checks.Functions:
        """What the checks trace."""
        return checks.Functions(self.algorithm, self.mechanism, self.minibatches, self.population)

    @property
    def num_clients(self) -> int:
        """The number of clients m."""
        return self.population.num_clients

    # --- what a user calls ------------------------------------------------------------------------

    def hyperparameters(self, **values: Value) -> Hyperparameters:
        """Return the hyperparameters of a run: the given values, and defaults for the rest.

        Args:
          **values: by name, each () or, where its record declares a schedule, one per round (T,).

        Raises:
          ValueError: for a name that no part of the simulation reads (with the nearest one that is
            read), a missing value without a default, a wrong shape or a value out of range.
        """
        return fill(self.records, values)

    def calibrate(
        self, hparams: Hyperparameters, *, epsilon: float, rounds: int, delta: float | None = None
    ) -> Hyperparameters:
        """Return the hyperparameters with the least noise multiplier that meets a target ε.

        Args:
          hparams: of the run; its `noise_multiplier` is replaced.
          epsilon: target ε in nats of all rounds (zero-out, joint DP).
          rounds: T.
          delta: δ in (0, 1); by default `default_delta(m)`.

        Raises:
          ValueError: if the mechanism has no noise to calibrate, the clip norm is infinite, or no
            noise multiplier meets the target.
        """
        if "noise_multiplier" not in self.records:
            raise ValueError("the mechanism adds no noise, so no ε can be aimed at")
        z = noise_multiplier(
            epsilon,
            default_delta(self.num_clients) if delta is None else delta,
            rounds=rounds,
            sampling_rate=float(self.sampling.rate(self.check(hparams))),
            scheme=self.sampling.scheme,
            event=self.mechanism.event,
            accountant=self.accountant,
        )
        calibrated = hparams.replace(noise_multiplier=z)
        self.check(calibrated)
        return calibrated

    def init(self, key: jax.Array | int, hparams: Hyperparameters) -> SimulationState:
        """The state before the first round.

        All random numbers of a run follow from the key, so two runs with one seed share cohorts and
        noise whatever else differs. Publish at most one of them, and keep its seed secret.

        Args:
          key: a threefry key (`jax.random.key(seed)`) or a seed.
          hparams: hyperparameters.

        Raises:
          ValueError: if a hyperparameter is out of range, the key is of another kind, the mechanism
            does not suit what the algorithm sends, or a function returns what the engine or the
            task cannot use.
        """
        key = self.check_start(key, hparams)
        return self._init(key, self.check(hparams))

    def start_from(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        earlier: "Simulation | None" = None,
        earlier_hparams: Hyperparameters | None = None,
    ) -> SimulationState:
        """The state before the first round of a stage that goes on where another run ended.

        The ledger goes along, so that `guarantee` composes the charges of all stages. Rounds are
        counted from 0 again, with random numbers of their own, and the mechanism starts anew.

        Args:
          state: of a run on the same clients; it stays usable.
          hparams: of this stage.
          earlier: the simulation whose state it is, where its algorithm is another: clients then
            start from the models that they predicted with, and the billboard from what was
            published, or from the `init` of the task where nothing was. Without it, billboard and
            personal states are taken as they are.
          earlier_hparams: what that simulation ran with; by default `hparams`.

        Raises:
          ValueError: as `init`; if the states or models are not of this simulation's kind, the
            clients not as many, or the algorithm cannot start from models, or needs a published
            one and there is none.
        """
        key = stage_key(state.key, state.round)
        self.check_start(key, hparams)
        hparams = self.check(hparams)
        others = {charges.scheme.clients for charges in state.privacy.charges} - {self.num_clients}
        if others:
            raise ValueError(
                f"the state must be of {self.num_clients} clients, as those here, "
                f"got {others.pop()}"
            )
        if earlier is None:
            shared, personal = jax.tree.map(jnp.copy, (state.shared, state.personal))
        else:
            if self.algorithm.warm_start.start is None:
                raise ValueError("the algorithm has no `warm_start`: it cannot start from models")
            earlier_hparams = hparams if earlier_hparams is None else earlier_hparams.as_arrays()
            begin = functools.partial(
                first_states,
                self.algorithm,
                earlier.algorithm,
                num_clients=self.num_clients,
            )
            shared, personal = jax.jit(begin)(
                key, hparams, state=state, earlier_hparams=earlier_hparams
            )
        fresh = self._init(key, hparams)
        checks.require_same_shapes("billboard", fresh.shared, shared)
        checks.require_same_shapes("personal states", fresh.personal, personal)
        new = dataclasses.replace(
            fresh,
            shared=shared,
            personal=personal,
            privacy=ledger.with_key(jax.tree.map(jnp.copy, state.privacy), fresh.key),
        )
        if state.consumed is not None and new.consumed is not None:
            new = dataclasses.replace(new, consumed=jnp.copy(state.consumed))
        return self._with_account(new)

    def round(
        self, state: SimulationState, hparams: Hyperparameters
    ) -> tuple[SimulationState, Metrics]:
        """One round, as a pure function: it may be mapped, differentiated and composed.

        Returns:
          The next state, and the round's metrics by name (see `Segment`), each ().
        """
        state = self._with_account(state)
        return self._one_round(state, self.check(hparams), self._placed["train"])

    def run(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        rounds: int,
        *,
        eval_every: int | None = None,
        callbacks: Callbacks = (),
        delta: float | None = None,
        keep: int | None = None,
    ) -> tuple[SimulationState, History]:
        """Run rounds, with evaluations on the test split.

        Args:
          state: state to start from; its buffers are reused, so it cannot be used afterwards.
          hparams: hyperparameters; with a noise schedule (T,), round t (counted over the whole
            life of the state) uses its t-th value.
          rounds: number of rounds, at least 1.
          eval_every: rounds in one compiled segment, an evaluation after each multiple of it and
            after the last round; by default all rounds.
          callbacks: called after each evaluation, in this order: those of `fjs.callbacks`, or
            functions `(state, segment)`. One that returns False stops the run.
          delta: δ of the ε that callbacks read; by default 1/(10 m).
          keep: number of segments to return, the last ones, whose evaluations hold values of all
            clients; by default all.

        Returns:
          The state after the last round, and the history: a sequence of segments.

        Raises:
          ValueError: if a number is out of range, or a noise schedule is too short for the rounds
            or has more distinct values than the ledger has places.
        """
        done = int(state.round)
        self.check_rounds(hparams, done, rounds, eval_every)
        hparams = self.check(hparams)
        z = np.asarray(hparams.get("noise_multiplier", 0.0))
        z = z[done : done + rounds] if z.ndim else z
        state = self._with_room(self._with_account(state), z, self.sampling.rate(hparams))

        def advance(state, length):
            return self._segment(state, hparams, self._placed["train"], rounds=length)

        delta = default_delta(self.num_clients) if delta is None else delta
        run = Run(
            advance,
            lambda state, split: self.evaluate(state, hparams, split),
            done + rounds,
            delta,
            self.accountant,
        )
        return run.segments(state, eval_every, callbacks, keep)

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
        self.check_split(split)
        measured = self._evaluate(state, hparams.as_arrays(), self._placed[split])
        return self.summarize(split, measured)

    def summarize(self, split: str, measured: Measured) -> Evaluation:
        """What metrics of each client, (m,) or (m, S), come to."""
        if split not in self._facts:
            self._facts[split] = Facts.of(self.population, split, self.task, measured.sums)
        return summarize(split, to_host(measured), self._facts[split])

    def guarantee(self, state: SimulationState, delta: float | None = None) -> Report:
        """What the releases so far cost, computed on the host in float64 from the ledger.

        Args:
          state: of a run.
          delta: total δ in (0, 1); by default `default_delta(m)`, at most 1/(10 m).
        """
        delta = default_delta(self.num_clients) if delta is None else delta
        state = self._with_account(state)
        return report(
            ledger.charged(state.privacy),
            delta,
            self.accountant,
            draws=ledger.drawn(state.privacy),
            assumed=self.public,
        )

    def epsilon(self, state: SimulationState, delta: float | None = None) -> jax.Array:
        """An upper bound on ε (zero-out) that can be read inside jit; () ∞ where there is none.

        The RDP bound, in the precision of the run: for display, control and derivatives. It is a
        little above the number to report, which `guarantee` computes on the host.

        Args:
          state: of a run.
          delta: δ in (0, 1); by default `default_delta(m)`.
        """
        delta = default_delta(self.num_clients) if delta is None else delta
        return epsilon_in_jit(state.privacy, delta)

    # --- the ledger of a state --------------------------------------------------------------------

    def _with_account(self, state: SimulationState) -> SimulationState:
        """The state of this or another simulation, with a place for what this one releases."""
        scheme, event = self.sampling.scheme, self.mechanism.event
        privacy = ledger.with_account(state.privacy, scheme, event, self.ledger_entries)
        return dataclasses.replace(state, privacy=privacy)

    def _with_room(
        self, state: SimulationState, noise: np.ndarray, rate: jax.Array
    ) -> SimulationState:
        """The state with places in its account for rounds with so much noise, (T,) or ()."""
        scheme, event = self.sampling.scheme, self.mechanism.event
        if event.kind == "none":
            return state
        privacy = ledger.with_room(state.privacy, scheme, event, noise, rate)
        return dataclasses.replace(state, privacy=privacy)

    # --- checks, before any compute ---------------------------------------------------------------

    def check(self, hparams: Hyperparameters) -> Hyperparameters:
        """The hyperparameters as arrays, if they suit the simulation as far as they are known.

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
        for part in (self.algorithm, self.mechanism, self.sampling):
            part.check(hparams)
        # In one order, so that one program serves them wherever they were made.
        ordered = {name: getattr(hparams, name) for name in self.records}
        return Hyperparameters(**ordered).as_arrays()

    def check_start(self, key: jax.Array | int, hparams: Hyperparameters) -> jax.Array:
        """The key with which a run may start.

        Raises:
          ValueError: as `init`.
        """
        if not isinstance(key, jax.Array):
            key = jax.random.key(key, impl="threefry2x32")
        elif not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or "fry" not in str(key.dtype):
            # Other generators share one stream under vmap, which breaks noise and sampling.
            raise ValueError(f"key must be a typed threefry key, jax.random.key(seed), got {key}")
        hparams = self.check(hparams)
        self.message_shapes(key, hparams)
        return key

    def check_rounds(
        self, hparams: Hyperparameters, done: int, rounds: int, eval_every: int | None
    ) -> None:
        """Checks whether a run can go on for so many rounds.

        Raises:
          ValueError: as `run`.
        """
        checks.check_rounds(self.sampling, hparams, self.ledger_entries, done, rounds, eval_every)

    def check_split(self, split: str) -> None:
        """Checks the name of a split.

        Raises:
          ValueError: if there is none of that name.
        """
        splits = self.population.splits
        if split not in splits:
            raise ValueError(f"split must be one of {sorted(splits)}, got {split!r}")

    def message_shapes(self, key: jax.Array, hparams: Hyperparameters) -> PyTree:
        """What one client's message is at the door, as shapes.

        All functions are checked when it is first asked.

        Args:
          key: a random key.
          hparams: hyperparameters, as arrays.

        Raises:
          ValueError: as `init`.
        """
        leaves = jax.tree.leaves(hparams)
        traced = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if traced not in self._messages:
            self._messages[traced] = checks.message_shapes(self.functions, key, hparams)
        return self._messages[traced]


def layout_of(
    task: Task,
    models: int = 1,
    chunk_size: int | None = None,
    chunk_map: ChunkMap | None = None,
) -> Layout:
    """The layout of clients with so many models of a task each; see `default_layout`."""
    model = bytes_of(jax.eval_shape(task.init, jax.random.key(0)))
    return default_layout(models * model, chunk_size, chunk_map, linear=task.linear is not None)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of the public function or class that made a function, or of its module."""
    name = getattr(function, "__qualname__", type(function).__qualname__).partition(".")[0]
    return function.__module__.rpartition(".")[2] if name.startswith("_") else name
