"""The parts of a simulation, checked against each other, and what follows from them.

`Simulation` is what users call. Sweeps, derivatives, audits and commands ask a simulation's `setup`
for what they need besides: checks before any compute, rows on devices, shapes of messages.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine import checks
from fedjaxsim.engine.client_partition import AllClients
from fedjaxsim.engine.devices import mesh_of
from fedjaxsim.engine.evaluation import Evaluation, SplitStatistics, summarize
from fedjaxsim.engine.layout import ChunkMap, Layout, default_layout
from fedjaxsim.engine.processes import to_host
from fedjaxsim.engine.program import ClientMetrics, Program, measure_with
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.shard import CLIENTS, shard
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.stream import stream
from fedjaxsim.engine.traced_checks import Functions, message_shapes
from fedjaxsim.hyperparameters import Hyperparameters, compose
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.composition import require_match
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.privacy.guarantee import Report, report
from fedjaxsim.privacy.mechanisms import Mechanism, check_noise
from fedjaxsim.privacy.samplers import Sampling
from fedjaxsim.tasks.task import Task

PyTree = Any

LEDGER_ENTRIES = 8
"""Number of distinct (z, p) that a run with a constant z can be charged for over its life."""


class Setup:
    """The parts of a simulation and the functions compiled from them.

    Arguments and errors are those of `Simulation`.

    Attributes:
      algorithm, task, population, mechanism, minibatches, accountant, ledger_entries: as given.
      asked_sampling: the sampling as given, for any number of clients.
      sampling: the sampler for the population's clients.
      records: the hyperparameters that the parts declare, by name.
      layout: of clients and their work.
      program: the pure functions of a run on one device.
      transformed: the program sharded or streamed, as asked for.
      compiled: its functions, compiled.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        sampling: Sampling,
        minibatches: Minibatches,
        mechanism: Mechanism,
        *,
        accountant: str | None,
        ledger_entries: int,
        chunk_size: int | None,
        chunk_map: ChunkMap | None,
        devices: Sequence[Any] | None,
        streamed: bool,
    ):
        checks.check_parts(
            algorithm=algorithm,
            task=getattr(algorithm, "task", None),
            warm_start=getattr(algorithm, "warm_start", None),
            population=population,
            sampling=sampling,
            minibatches=minibatches,
            mechanism=mechanism,
        )
        self.algorithm, self.task, self.mechanism = algorithm, algorithm.task, mechanism
        self.asked_sampling = sampling
        self.sampling = sampling.for_clients(population.num_clients)
        checks.check_parts(sampler=self.sampling)
        if self.sampling.scheme.clients != population.num_clients:
            raise ValueError(
                f"the sampler draws from {self.sampling.scheme.clients} clients, "
                f"but the population has {population.num_clients}"
            )
        self.records = compose(
            (algorithm.hyperparameters, mechanism.hyperparameters, sampling.hyperparameters)
        )
        if mechanism.num_clients not in (None, population.num_clients):
            raise ValueError(
                f"the mechanism is for {mechanism.num_clients} clients, but the population "
                f"has {population.num_clients}"
            )
        if accountant is not None and mechanism.event.kind != "no_release":
            require_match(accountant, self.sampling.scheme, mechanism.event)
        self.accountant = accountant
        self.minibatches, self.ledger_entries = minibatches, ledger_entries
        self.layout = layout_of(self.task, chunk_size, chunk_map)
        self.devices = None if devices is None else tuple(devices)
        if self.devices == ():
            raise ValueError("a simulation needs at least one device, got none")
        self.streamed = streamed
        if streamed and devices is not None:
            raise ValueError("a streamed simulation runs on the first device: leave devices out")
        self._take(population)
        self.program = Program(
            algorithm,
            mechanism,
            self.sampling,
            measure_with(self.task),
            minibatches,
            self.layout,
            AllClients(population.num_clients),
            self._no_charges,
        )
        if streamed:
            self.transformed = stream(self.program)
        elif self.devices is not None:
            self.transformed = shard(self.program, mesh_of(self.devices, CLIENTS))
        else:
            self.transformed = self.program
        self.compiled = self.transformed.compiled()

    def _no_charges(self) -> ledger.Charges:
        return ledger.no_charges(self.sampling.scheme, self.mechanism.event, self.ledger_entries)

    def _take(self, population: Population) -> None:
        """Check a population and take it; it goes to the device when it is first needed."""
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
        self._facts: dict[str, SplitStatistics] = {}

    @functools.cached_property
    def rows(self) -> dict[str, Rows]:
        """Each split's rows on the first device, by its name.

        Raises:
          ValueError: the simulation is streamed, and no rows lie on a device.
        """
        self.check_in_memory()
        return self.program.place(self.population)

    def check_in_memory(self) -> None:
        """Check that rows may lie on devices.

        Raises:
          ValueError: the simulation is streamed, and no rows lie on a device.
        """
        if self.streamed:
            raise ValueError("sweeps and derivatives need all rows in memory: they do not stream")

    @functools.cached_property
    def placed(self) -> dict[str, Any]:
        """Each split's rows where the transformed program reads them, by its name."""
        alike = self.transformed is self.program
        return self.rows if alike else self.transformed.place(self.population)

    def with_population(self, population: Population) -> Self:
        """Return the setup on other data of as many clients, sharing compiled code.

        Shapes that agree (rows and fields) lead to no new compilation.

        Raises:
          ValueError: for another number of clients.
        """
        if population.num_clients != self.num_clients:
            raise ValueError(
                f"the population must have {self.num_clients} clients, got {population.num_clients}"
            )
        other = copy.copy(self)
        for cached in ("rows", "placed"):
            other.__dict__.pop(cached, None)
        other._take(population)
        return other

    def with_parts(self, algorithm: Algorithm | None, mechanism: Mechanism | None) -> "Setup":
        """Return a setup with another algorithm or mechanism, and all else the same."""
        return Setup(
            self.algorithm if algorithm is None else algorithm,
            self.population,
            self.asked_sampling,
            self.minibatches,
            self.mechanism if mechanism is None else mechanism,
            accountant=self.accountant,
            ledger_entries=self.ledger_entries,
            chunk_size=self.layout.asked[0],
            chunk_map=self.layout.asked[1],
            devices=self.devices,
            streamed=self.streamed,
        )

    def chunk_size(self, hparams: Hyperparameters) -> int:
        """Return the number of clients of a chunk on one device, computed from shapes.

        Rounds may take chunks of another size that suit a form of messages, or divide a cohort.

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
        """Sentences on numbers that are taken as public though they may be made of private data.

        Those of the population, the task, the algorithm and the mechanism: assumptions of every
        guarantee of the simulation.
        """
        parts = (self.population, self.task, self.algorithm, self.mechanism)
        return tuple(dict.fromkeys(sentence for part in parts for sentence in part.public))

    @property
    def num_clients(self) -> int:
        """The number of clients m."""
        return self.population.num_clients

    def summarize(self, split: str, measured: ClientMetrics) -> Evaluation:
        """Summarize metrics of each client, (m,) or, of S runs, (m, S)."""
        if split not in self._facts:
            self._facts[split] = SplitStatistics.of(
                self.population, split, self.task, measured.sums
            )
        return summarize(split, to_host(measured), self._facts[split])

    # --- the ledger of a state --------------------------------------------------------------------

    def with_account(self, state: SimulationState) -> SimulationState:
        """Return a state of any simulation with an account for what this one releases."""
        scheme, event = self.sampling.scheme, self.mechanism.event
        privacy = ledger.with_account(state.privacy, scheme, event, self.ledger_entries)
        return dataclasses.replace(state, privacy=privacy)

    def with_room(
        self, state: SimulationState, hparams: Hyperparameters, rounds: int
    ) -> SimulationState:
        """Return the state with ledger entries for `rounds` more rounds."""
        state, done = self.with_account(state), int(state.round)
        scheme, event = self.sampling.scheme, self.mechanism.event
        if event.kind == "no_release":
            return state
        z = np.asarray(hparams.get("noise_multiplier", 0.0))
        z = z[done : done + rounds] if z.ndim else z
        rate = self.sampling.rate(hparams)
        privacy = ledger.with_room(state.privacy, scheme, event, z, rate)
        return dataclasses.replace(state, privacy=privacy)

    def guarantee(self, state: SimulationState, delta: float) -> Report:
        """Compute the guarantees of all releases so far; see `Simulation.guarantee`."""
        privacy = self.with_account(state).privacy
        return report(
            ledger.charged(privacy),
            delta,
            self.accountant,
            draws=ledger.drawn(privacy),
            assumed=self.public,
        )

    def calibrate(
        self, hparams: Hyperparameters, epsilon: float, rounds: int, delta: float
    ) -> Hyperparameters:
        """Return the hyperparameters with calibrated noise; see `Simulation.calibrate`."""
        if "noise_multiplier" not in self.records:
            raise ValueError("the mechanism adds no noise, so no ε can be aimed at")
        z = noise_multiplier(
            epsilon,
            delta,
            rounds=rounds,
            sampling_rate=float(self.sampling.rate(self.check(hparams))),
            scheme=self.sampling.scheme,
            event=self.mechanism.event,
            accountant=self.accountant,
        )
        calibrated = hparams.replace(noise_multiplier=z)
        self.check(calibrated)
        return calibrated

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
        for part in (self.algorithm, self.mechanism, self.sampling):
            part.check(hparams)
        # In one order, so that one program serves them wherever they were made.
        ordered = {name: getattr(hparams, name) for name in self.records}
        return Hyperparameters(**ordered).as_arrays()

    def check_start(self, key: jax.Array | int, hparams: Hyperparameters) -> jax.Array:
        """Return the key with which a run may start.

        Raises:
          ValueError: as `Simulation.init`.
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
        """Check that a run can go on for `rounds` rounds.

        Raises:
          ValueError: as `Simulation.run`.
        """
        checks.check_rounds(self.sampling, hparams, self.ledger_entries, done, rounds, eval_every)

    def check_split(self, split: str) -> None:
        """Check the name of a split.

        Raises:
          ValueError: if there is none of that name.
        """
        splits = self.population.splits
        if split not in splits:
            raise ValueError(f"split must be one of {sorted(splits)}, got {split!r}")

    def message_shapes(self, key: jax.Array, hparams: Hyperparameters) -> PyTree:
        """Return the shapes of one client's message.

        The first call checks all functions of the algorithm and the mechanism.

        Args:
          key: a random key.
          hparams: hyperparameters, as arrays.

        Raises:
          ValueError: as `Simulation.init`.
        """
        leaves = jax.tree.leaves(hparams)
        traced = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if traced not in self._messages:
            self._messages[traced] = message_shapes(self.functions(), key, hparams)
        return self._messages[traced]

    def functions(self) -> Functions:
        """Return the functions that checks trace."""
        return Functions(self.algorithm, self.mechanism, self.minibatches, self.population)


def layout_of(
    task: Task, chunk_size: int | None = None, chunk_map: ChunkMap | None = None
) -> Layout:
    """Return the layout for a task's models; see `default_layout`."""
    model = bytes_of(jax.eval_shape(task.init, jax.random.key(0)))
    return default_layout(model, chunk_size, chunk_map, linear=task.linear is not None)
