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
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.layout import ChunkMap
from fedjaxsim.engine.loop import Callbacks, Run
from fedjaxsim.engine.segments import History
from fedjaxsim.engine.setup import Setup
from fedjaxsim.engine.stages import first_states, stage_key
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters, Value, fill
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting.in_loop import epsilon_in_jit
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.privacy.guarantee import Report, report
from fedjaxsim.privacy.mechanisms import Mechanism, gaussian
from fedjaxsim.privacy.samplers import Sampling

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
      algorithm, task, population, mechanism, minibatches: its parts.
      sampling: the sampler of cohorts of this population's clients.
      num_clients: m.
      records: the hyperparameters that its parts declare, by name.
      program: the pure functions of a run on one device; see `engine/program.py`.
      setup: what other modules of the package need besides; see `engine/setup.py`.

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
        setup = Setup(
            algorithm,
            population,
            sampling,
            Minibatches(10, epochs=1) if minibatches is None else minibatches,
            gaussian() if mechanism is None else mechanism,
            accountant=accountant,
            ledger_entries=ledger_entries,
            chunk_size=chunk_size,
            chunk_map=chunk_map,
            devices=devices,
            streamed=streamed,
        )
        self._use(setup)

    def _use(self, setup: Setup) -> None:
        self.setup, self.program, self.records = setup, setup.program, setup.records
        self.algorithm, self.task, self.population = setup.algorithm, setup.task, setup.population
        self.sampling, self.mechanism = setup.sampling, setup.mechanism
        self.minibatches, self.num_clients = setup.minibatches, setup.num_clients

    def __repr__(self) -> str:
        """The parts: algorithm, data, sampling, mechanism, minibatches and placement."""
        scheme, batches = self.sampling.scheme, self.minibatches
        amount = f"steps {batches.steps}" if batches.epochs is None else f"epochs {batches.epochs}"
        fields = (f"{name} {values.shape}" for name, values in self.population.fields.items())
        where = "streamed" if self.setup.streamed else "in memory"
        lines = [
            f"Simulation of {_name_of(self.algorithm.client)}",
            f"  {repr(self.population).splitlines()[0]}",
            f"  fields: {', '.join(fields)}",
            f"  sampling: {scheme.kind}, at most {scheme.capacity} clients a round",
            f"  mechanism: {self.mechanism.event.kind}",
            f"  minibatches: size {batches.size}, {amount}",
            f"  data: {where}, devices: {len(self.setup.devices or (None,))}",
        ]
        return "\n".join(lines)

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
            sampling_rate=float(self.sampling.rate(self.setup.check(hparams))),
            scheme=self.sampling.scheme,
            event=self.mechanism.event,
            accountant=self.setup.accountant,
        )
        calibrated = hparams.replace(noise_multiplier=z)
        self.setup.check(calibrated)
        return calibrated

    def with_population(self, population: Population) -> Self:
        """Return the simulation on other data of as many clients, sharing compiled code.

        Args:
          population: data; where fields and rows agree in shape, nothing is compiled again.

        Raises:
          ValueError: for another number of clients, or data that do not suit the task.
        """
        other = copy.copy(self)
        other._use(self.setup.with_population(population))
        return other

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
        key = self.setup.check_start(key, hparams)
        return self.setup.compiled.init(key, self.setup.check(hparams))

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
        self.setup.check_start(key, hparams)
        hparams = self.setup.check(hparams)
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
        fresh = self.setup.compiled.init(key, hparams)
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
        return self.setup.with_account(new)

    def round(
        self, state: SimulationState, hparams: Hyperparameters
    ) -> tuple[SimulationState, Metrics]:
        """One round, as a pure function: it may be mapped, differentiated and composed.

        Returns:
          The next state, and the round's metrics by name (see `Segment`), each ().
        """
        state = self.setup.with_account(state)
        return self.setup.compiled.round(
            state, self.setup.check(hparams), self.setup.placed["train"]
        )

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
        self.setup.check_rounds(hparams, done, rounds, eval_every)
        hparams = self.setup.check(hparams)
        z = np.asarray(hparams.get("noise_multiplier", 0.0))
        z = z[done : done + rounds] if z.ndim else z
        state = self.setup.with_room(self.setup.with_account(state), z, self.sampling.rate(hparams))

        def advance(state, length):
            rows = self.setup.placed["train"]
            return self.setup.compiled.rounds(state, hparams, rows, rounds=length)

        delta = default_delta(self.num_clients) if delta is None else delta
        run = Run(
            advance,
            lambda state, split: self.evaluate(state, hparams, split),
            done + rounds,
            delta,
            self.setup.accountant,
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
        self.setup.check_split(split)
        rows = self.setup.placed[split]
        measured = self.setup.compiled.evaluate(state, hparams.as_arrays(), rows)
        return self.setup.summarize(split, measured)

    def guarantee(self, state: SimulationState, delta: float | None = None) -> Report:
        """What the releases so far cost, computed on the host in float64 from the ledger.

        Args:
          state: of a run.
          delta: total δ in (0, 1); by default `default_delta(m)`, at most 1/(10 m).
        """
        delta = default_delta(self.num_clients) if delta is None else delta
        state = self.setup.with_account(state)
        return report(
            ledger.charged(state.privacy),
            delta,
            self.setup.accountant,
            draws=ledger.drawn(state.privacy),
            assumed=self.setup.public,
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


def with_parts(
    simulation: Simulation,
    *,
    algorithm: Algorithm | None = None,
    mechanism: Mechanism | None = None,
) -> Simulation:
    """Return the simulation with another algorithm or mechanism, and all else the same."""
    other = copy.copy(simulation)
    other._use(simulation.setup.with_parts(algorithm, mechanism))
    return other


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of the public function or class that made a function, or of its module."""
    name = getattr(function, "__qualname__", type(function).__qualname__).partition(".")[0]
    return function.__module__.rpartition(".")[2] if name.startswith("_") else name
