"""A federated run as repeated application of one pure function. Start reading here.

`Simulation` checks that an algorithm (written for one client), a population, a sampler and a
mechanism fit together, and calls the compiled functions of their `Program` (`engine/program.py`).
The rounds between two evaluations are one compiled `lax.scan` whose state is donated.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from fedjaxsim import checks, divergence, keys
from fedjaxsim.algorithm import Algorithm, Metrics, row_shapes
from fedjaxsim.checks import Name, SettingError, SettingWarning
from fedjaxsim.clock import RoundWork
from fedjaxsim.data.aligned import aligned_with, numbers_of
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population, adapted_alike
from fedjaxsim.engine import accounts, trained
from fedjaxsim.engine.evaluation import (
    SAMPLE,
    Evaluation,
    EvaluationPlan,
    measure_with,
    prepare_release,
    sample_of,
    summary_of,
)
from fedjaxsim.engine.fixed import Fixed
from fedjaxsim.engine.layout import ChunkMap, Plan, plan_of, workload_of
from fedjaxsim.engine.loop import Callbacks, History, RunLoop, run_segments
from fedjaxsim.engine.part_checks import (
    TracedRound,
    check_part_types,
    operations,
    require_key,
    require_same_shapes,
    require_stamps,
    require_state,
    require_values,
    trace_round,
)
from fedjaxsim.engine.personal_errors import (
    PersonalFunctions,
    personal_errors_of,
    personal_functions,
)
from fedjaxsim.engine.planned_noise import PlannedNoise
from fedjaxsim.engine.processes import (
    agree,
    mesh_of,
    require_devices,
    spans_processes,
    to_host,
)
from fedjaxsim.engine.program import ClientMetrics, Program, algorithm_of_run, mechanism_of_run
from fedjaxsim.engine.purity import assumptions_of, digest_of
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.shard import CLIENTS, shard
from fedjaxsim.engine.standard_errors import linear_round_of, standard_errors_of
from fedjaxsim.engine.state import AllClients, SimulationState, evaluated_part
from fedjaxsim.engine.stream import stream
from fedjaxsim.engine.traced_once import TracedOnce
from fedjaxsim.engine.trained import (
    on_host,
    predictions_of,
    published_metrics,
    trained_functions,
    training_rows,
)
from fedjaxsim.engine.transfers import moves_data
from fedjaxsim.engine.work import INTEGER, row_of
from fedjaxsim.factories import maker
from fedjaxsim.hyperparameters import (
    USUAL_CLIP,
    USUAL_STEP,
    Hyperparameters,
    Value,
    compose,
    fill,
    per_client,
)
from fedjaxsim.kernels import backend
from fedjaxsim.keys import Stream
from fedjaxsim.own_code import is_own, is_stamped
from fedjaxsim.privacy import calibration, ledger
from fedjaxsim.privacy.accounting.in_loop import rdp_epsilon_in_jit
from fedjaxsim.privacy.assumptions import (
    DECLARED_ROWS,
    JOINED,
    MOST_ROWS,
    NEW_CLIENTS,
    OF_CLIENTS,
    UNCHECKED,
    default_delta,
    no_guarantee,
)
from fedjaxsim.privacy.entries import MOST_ROUNDS
from fedjaxsim.privacy.events import Examples, Prepared, PrivacyLimit, PrivacySpend
from fedjaxsim.privacy.guarantee import Report, report
from fedjaxsim.privacy.mechanisms import Mechanism, check_noise, check_statistics, gaussian
from fedjaxsim.privacy.mechanisms import law as mechanism_law
from fedjaxsim.privacy.samplers import Sampling
from fedjaxsim.privacy.samplers.law import check_own
from fedjaxsim.privacy.schedule import CONSTANT, Schedule, entries
from fedjaxsim.tasks.in_source import TaskInSource
from fedjaxsim.tasks.task import check_rows

PyTree = Any

_MOST_VARYING_ROUNDS = 100_000
"""Most rounds of a budget whose noise differs from round to round."""


@moves_data
@dataclasses.dataclass(eq=False, repr=False)
class Simulation(Fixed):
    """A federated simulation.

    In all methods `hparams` comes from `hyperparameters`, `state` from `init` or `run`, and `delta`
    is δ in (0, 1), by default `default_delta(m)`, at most 1/(10 m). Only `run` uses a state up. All
    raise ValueError for numbers out of range, wrong shapes, parts or functions that do not fit
    together, and a state that is of other shapes or used up.

    Args:
      algorithm: e.g. `pmtl(task)`; its task must accept the population.
      population: all clients' data.
      sampling: `poisson(0.1)`, `full_participation()`, or another sampling.
      minibatches: local steps or epochs, and the batch size; by default one epoch of batches of 10.
      mechanism: by default `gaussian()`; `no_release()` for an algorithm that sends nothing.
      chunk_size: clients run together, at least 2. By default 16 in a scan and 64 in a batch; on an
        accelerator as many as fit a quarter of the memory left by rows and states.
      chunk_map: "scan" or "vmap" inside a chunk; by default "scan" on a CPU for models above 4 kB.
      devices: JAX devices over which the clients are divided; by default the first one. A CPU has
        one for each core after `fjs.use_all_cores()`.
      streamed: whether a device holds the rows and states of one cohort; see `engine/stream.py`.
      unchecked: whether functions may call back to Python, such as `jax.debug.print`, to be
        debugged. Then no ε is reported for any round.

    Attributes:
      reported: the task in the terms of the population's source.
      accounts: the scheme and the event of each account that rounds are charged to.
      records: the hyperparameters that the parts declare; keys are names.
      program: the pure functions on one device; `transformed` is the program sharded or streamed as
        asked for, and `compiled` has its compiled functions.

    Example:
      >>> rng = np.random.default_rng(0)
      >>> clients = [{"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n)} for n in (8, 12)]
      >>> population = fjs.data.split(fjs.Population.from_clients(clients), test=0.25, seed=0)
      >>> task = fjs.tasks.squared(fjs.models.linear((3,), 1))
      >>> sim = fjs.Simulation(fjs.fedavg(task), population, fjs.full_participation())
      >>> hparams = sim.calibrate(sim.hyperparameters(clip=1.0), epsilon=2.0, rounds=3)
      >>> state, history = sim.run(sim.init(0, hparams), hparams, rounds=3)
      >>> history[-1].round, sim.guarantee(state).find("zero_out").epsilon <= 2.0
      (3, True)
    """

    algorithm: Algorithm
    population: Population
    sampling: Sampling
    minibatches: Minibatches = dataclasses.field(default_factory=lambda: Minibatches(10, epochs=1))
    mechanism: Mechanism = dataclasses.field(default_factory=gaussian)
    _: dataclasses.KW_ONLY
    chunk_size: int | None = None
    chunk_map: ChunkMap | None = None
    devices: Sequence[Any] | None = None
    streamed: bool = False
    unchecked: bool = False

    def __post_init__(self):
        algorithm, mechanism = self.algorithm, self.mechanism
        check_part_types(
            algorithm=algorithm,
            task=getattr(algorithm, "task", None),
            warm_start=getattr(algorithm, "warm_start", None),
            population=self.population,
            sampling=self.sampling,
            minibatches=self.minibatches,
            mechanism=mechanism,
        )
        if algorithm.task.examples is not None:
            check_part_types(examples=algorithm.task.examples)
        require_stamps(algorithm, mechanism)
        m = self.num_clients
        self.task, self.sampler = algorithm.task, self.sampling.sampler(m)
        check_part_types(sampler=self.sampler)
        check_part_types(scheme=self.sampler.scheme)
        if self.sampler.availability is not None:
            check_part_types(availability=self.sampler.availability)
        scheme, event = self.sampler.scheme, mechanism.event
        for part, count in (
            ("sampler draws from", scheme.clients),
            ("mechanism is for", mechanism.num_clients),
        ):
            if count not in (None, m):
                raise ValueError(f"the {part} {count} clients, but the population has {m}")
        parts = algorithm, mechanism, self.sampling, self.task.examples
        self.records = compose(part.hyperparameters for part in parts if part is not None)
        if event.releases and event.known:
            event.check_scheme(scheme)
        if self.devices is not None:
            require_devices(self.devices)
        if self.streamed and self.devices is not None:
            raise ValueError("a streamed simulation runs on the first device: leave devices out")
        once = self._once = TracedOnce(self.task.frozen, unchecked=self.unchecked)
        self._use(self.population)
        self._lawful: set[str] = set()
        no_epsilon = UNCHECKED if self.unchecked else "; ".join(self.population.voids_epsilon)
        self.accounts = accounts.accounts_of(
            algorithm, mechanism, self.sampler, self.examples, no_epsilon
        )
        self._traced: dict[Any, TracedRound] = {}
        self._operations: dict[Any, int] = {}
        self._starts: dict[int, tuple[Program, Callable[..., Any]]] = {}
        self._noises: dict[Any, PlannedNoise] = {}
        self.program = Program(
            once.algorithm(
                algorithm_of_run(algorithm, self.sampler, self.population.fields, self.examples)
            ),
            once.mechanism(mechanism_of_run(mechanism, self.records.values())),
            once.sampler(self.sampler),
            once.of(measure_with(self.task)),
            self.minibatches,
            plan_of(
                workload_of(
                    self.task,
                    self.population,
                    self.sampling,
                    self.minibatches,
                    (self.chunk_size, self.chunk_map),
                ),
                backend.current(self.devices),
                self.chunk_size,
                self.chunk_map,
                len(self.devices or (None,)),
            ),
            AllClients(m),
            self.accounts,
            accounts.no_charges(self.accounts, self.prepared),
            examples=self.examples,
            records=tuple(self.records.values()),
            assumed=assumptions_of(algorithm, mechanism, self.sampler, self.population.generate),
        )
        if self.streamed:
            self.transformed = stream(self.program)
        elif self.devices is not None:
            self.transformed = shard(self.program, mesh_of(self.devices, CLIENTS))
        else:
            self.transformed = self.program
        self.compiled = self.transformed.compiled()
        # Compiled when first called, and shared with `with_population`.
        self._answers = mechanism_law.answers_of(self.program.mechanism, m)
        self._linear_round = jax.jit(linear_round_of(self.program))
        self._personal = PersonalFunctions(*map(jax.jit, personal_functions(self.program)))
        self._trained = trained_functions(self.program)

    def _use(self, population: Population) -> None:
        """Check and set the population; rows go to the device when they are first needed."""
        reported = TaskInSource.of(self.task, population)
        if population.generate is not None and (
            self.minibatches.steps is None or self.minibatches.passes is not None
        ):
            raise ValueError(
                "a population that generates its minibatches has no epochs or passes; give steps, "
                f"got {self.minibatches}"
            )
        for of_population in ("population", "reported", "examples", "rows", "placed", "public"):
            self.__dict__.pop(of_population, None)
        self.population, self.reported = population, reported
        self.examples = accounts.example_event(self.algorithm, self.minibatches, population)
        self._once.watch(population)
        self._summaries: dict[str, Callable[[ClientMetrics, Any], Evaluation]] = {}
        self._facts: dict[Any, dict[str, str]] = {}

    def __repr__(self) -> str:
        """Name the parts, the population, the placement and the plan."""
        minibatches, scheme = self.minibatches, self.sampler.scheme
        count = minibatches.epochs or minibatches.steps
        what = "epoch" if minibatches.epochs else "step"
        taken = f"{count} {what}{'s' * (count != 1)}"
        where = "in memory of one device"
        if self.streamed:
            where = "streamed: a device holds the rows and states of one cohort"
        elif self.devices is not None:
            where = f"clients divided over {len(self.devices)} devices"
        cohort = "all clients" if scheme.kind == "full" else f"at most {scheme.capacity:,} clients"
        return "\n".join([
            f"Simulation of a {repr(self.population).splitlines()[0]}",
            f"  algorithm: clients by {maker(self.algorithm.client)}, server by "
            f"{maker(self.algorithm.server)}; reads {', '.join(self.records) or 'nothing'}",
            f"  round: {scheme.kind} sampling of {cohort}, {taken} of minibatches of "
            f"{minibatches.size} rows, {self.mechanism.event.kind} mechanism",
            f"  placement: {where}",
            f"  plan: {self.program.plan}",
        ])  # fmt: skip

    def with_population(self, population: Population) -> Self:
        """Return the simulation on other data of as many clients, sharing compiled code.

        If fields and rows agree in shapes and types, nothing is compiled again, unless examples are
        protected and clients have other numbers of rows.
        """
        if population.num_clients != self.num_clients:
            raise ValueError(
                f"the population must have {self.num_clients} clients, got {population.num_clients}"
            )
        alike = adapted_alike(population, self.population)
        if alike and row_shapes(population.fields) == row_shapes(self.population.fields):
            other = copy.copy(self)
            other._use(population)
            if other.examples == self.examples:
                return other
        return dataclasses.replace(self, population=population)

    @functools.cached_property
    def rows(self) -> dict[str, Rows]:
        """Each split's rows on the first device, by its name."""
        self.check_in_memory()
        return self.program.place(self.population)

    @functools.cached_property
    def placed(self) -> dict[str, Any]:
        """Each split's rows where the transformed program reads them, by its name."""
        alike = self.transformed is self.program
        return self.rows if alike else self.transformed.place(self.population)

    @functools.cached_property
    def public(self) -> tuple[str, ...]:
        """Assumptions of every guarantee: public numbers, declared or made of data."""
        parts = (self.population, self.task, self.algorithm, self.mechanism)
        most = self.population.max_rows
        rows = MOST_ROWS if most is None else DECLARED_ROWS.format(most)
        named = dict.fromkeys([rows, *(sentence for part in parts for sentence in part.public)])
        generate = self.population.generate
        return (*named, *assumptions_of(self.algorithm, self.mechanism, self.sampler, generate))

    @property
    def bounds_steps(self) -> bool:
        """Return whether the curvature of local steps is bounded, by the loss's and ‖x‖.

        Exposures, which no range bounds, multiply it.
        """
        has_curvature = self.task.curvature is not None and self.algorithm.curvature is not None
        return (
            has_curvature
            and self.reported.largest_row < math.inf
            and self.task.exposure not in self.population.fields
        )

    def step_size(self, hparams: Hyperparameters) -> Any:
        """Return the default learning rate: 1/L where the curvature is bounded by L."""
        if not self.bounds_steps:
            return USUAL_STEP
        of_loss, of_step = self.task.curvature, self.algorithm.curvature
        assert of_loss is not None
        assert of_step is not None
        return 1 / of_step(of_loss(self.reported.largest_row**2), hparams)

    @property
    def bounds_messages(self) -> bool:
        """Return whether `clip_norm` follows from bounds on rows and, in regressions, targets."""
        bounded = self.reported.bounds_targets and self.bounds_steps
        return bounded and self.algorithm.typical_message is not None

    @property
    def clip_norm(self) -> float:
        """Default C of a private run: of a small message where rows are bounded, else 1."""
        of_loss, typical = self.task.curvature, self.algorithm.typical_message
        if not self.bounds_messages or of_loss is None or typical is None:
            return USUAL_CLIP
        return typical(of_loss(self.reported.largest_row**2))

    @property
    def num_clients(self) -> int:
        """Number of clients m."""
        return self.population.num_clients

    # --- what users call --------------------------------------------------------------------------

    def hyperparameters(self, **values: Value) -> Hyperparameters:
        """Return the hyperparameters of a run: the given values, and defaults for the rest.

        Each value is () or, as its record declares, one per round (T,) or per client (m,). Values
        of clients are public, so they may not follow from private rows. A ValueError names a
        missing or unknown name, with the nearest one that is read.
        """
        return fill(
            self.records, values, self.sampler.rate, self.step_size, clients=self.num_clients
        )

    def calibrate(
        self,
        hparams: Hyperparameters,
        *,
        epsilon: float,
        rounds: int,
        delta: float | None = None,
        noise_schedule: Schedule = CONSTANT,
        complete: Callable[[Hyperparameters], Hyperparameters] = lambda hparams: hparams,
    ) -> Hyperparameters:
        """Return `hparams` with the least noise multiplier that meets a target ε.

        It covers all `rounds`, in nats (zero-out, joint DP), at the noise that the mechanism itself
        says it draws. Raises ValueError if there is no noise to calibrate, or no noise multiplier
        meets the target.

        Args:
          hparams: hyperparameters; their noise multiplier is not read.
          epsilon: target ε.
          rounds: number of rounds.
          delta: δ of the target.
          noise_schedule: shares of the rounds in the cost.
          complete: `(hparams) -> hparams`, fills in what follows from the noise multiplier.
        """
        if "noise_multiplier" not in self.records:
            raise ValueError("the mechanism adds no noise, so no ε can be aimed at")

        def completed(z):
            return complete(hparams.replace(noise_multiplier=noise_schedule.noise(z, rounds)))

        def drawn(z):
            return self.planned(completed(z), 0, rounds).entries

        try:
            z = calibration.noise_multiplier(
                epsilon,
                self._delta(delta),
                rounds=rounds,
                sampling_rate=float(self.sampler.rate(hparams.as_arrays())),
                scheme=self.sampler.scheme,
                event=self.accounts[0][1],
                noise_schedule=noise_schedule,
                drawn=drawn,
                before=self.prepared,
            )
        except ValueError as error:
            self.check(completed(1.0))  # says what another hyperparameter forbids
            if why := no_guarantee(self.planned(completed(1.0), 0, rounds)):
                raise ValueError(f"noise cannot be calibrated: {why}") from error
            raise
        calibrated = completed(z)
        self.check(calibrated)
        return calibrated

    def init(self, key: jax.Array | int, hparams: Hyperparameters) -> SimulationState:
        """Return the state before the first round, from a seed or a key `jax.random.key(seed)`.

        All random numbers of a run follow from the key, so two runs with one seed share cohorts and
        noise whatever else differs. Publish at most one of them, and keep its seed secret.
        """
        key, hparams = self.check_start(key, hparams)
        state = self.compiled.init(key, hparams)
        return self.announce(state, hparams)

    def budget(
        self,
        hparams: Hyperparameters,
        *,
        epsilon: float,
        delta: float | None = None,
        evaluate_privately: EvaluationPlan | None = None,
        eval_every: int = 1,
    ) -> PrivacyLimit:
        """Compute the budget of as many planned rounds as cost at most (ε, δ), for zero-out.

        `hparams` has the least noise and the largest p of any round. Evaluations that the run
        releases every `eval_every` rounds are planned, too. Raises ValueError if the mechanism has
        no guarantee, or one round costs more.
        """
        hparams = self.check(hparams)
        first_round = self.planned(hparams, 0, 1)
        if why := no_guarantee(first_round) if first_round.entries else "nothing is released":
            raise ValueError(f"no budget bounds the rounds: {why}")
        noise = np.asarray(hparams.noise_multiplier)

        def plan(rounds: int) -> list[PrivacySpend]:
            planned = [*self.prepared, self.planned(hparams, 0, rounds)]
            if evaluate_privately is not None:  # before the first round and after the last, too
                evaluations = rounds // eval_every + 2
                planned.append(evaluate_privately.spend(self.num_clients, evaluations))
            return planned

        most = MOST_ROUNDS
        if self._planned_noise(hparams).varies:
            most = len(noise) if noise.ndim else _MOST_VARYING_ROUNDS
        return calibration.budget(epsilon, self._delta(delta), plan, most=most)

    def with_budget(self, state: SimulationState, budget: PrivacyLimit) -> SimulationState:
        """Return the state, of `init`, with a budget that it and all stages from it keep.

        A round uses up a planned one with no more noise and no smaller p. If none is left, `run`
        ends and `round` changes nothing. So noise and number of rounds may follow from what was
        released; see `privacy/filter.py`. Raises ValueError if the state has another budget, or has
        released something without one.
        """
        limit = state.privacy.limit
        if limit == budget:
            return state
        charged = ledger.charged(state.privacy)
        rounds = [spend for spend in charged if not isinstance(spend.event, Prepared)]
        if limit is not None or any(spend.entries for spend in rounds):
            raise ValueError(
                "a budget must be set before the first release, and stays as it is: start from a "
                f"state of `init` for epsilon {budget.epsilon}"
            )
        return dataclasses.replace(state, privacy=dataclasses.replace(state.privacy, limit=budget))

    def start_from(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        earlier: "Simulation | None" = None,
        earlier_hparams: Hyperparameters | None = None,
    ) -> SimulationState:
        """Return the state before the first round of a stage that continues another run.

        The ledger goes along: `guarantee` composes the charges of all stages. Rounds are counted
        from 0 again, with new random numbers, and the mechanism starts anew.

        Args:
          state: of a run on the same clients or, with `earlier`, on some of them.
          hparams: of this stage.
          earlier: the simulation of `state` if its algorithm or its clients differ: clients then
            start from the models that they predicted with, and the server and clients who join
            from the published model; without one, the server from the task's `init`. Clients are
            known by their names. By default server and personal states are taken as they are.
          earlier_hparams: hyperparameters of that simulation; by default `hparams`.

        Raises:
          ValueError: the clients are others than before, or some join and the stage before
            published no model, protected examples, or gave clients privacy levels.
        """
        other_counts = {charges.scheme.clients for charges in state.privacy.charges} - {
            self.num_clients
        }
        if other_counts and earlier is None:
            raise ValueError(
                f"the state must be of {self.num_clients} clients, as those here, got "
                f"{other_counts.pop()}: if clients join, give `earlier`, its simulation"
            )
        if earlier is not None and self.algorithm.warm_start.start is None:
            raise ValueError("the algorithm has no `warm_start`: it cannot start from models")
        origin = None if earlier is None else self._origin(earlier, state)
        key, hparams = self.check_start(trained.stage_key(state.key, state.round), hparams)
        if earlier is None:
            shared, personal = jax.tree.map(jnp.copy, (state.shared, state.personal))
        else:
            before = hparams if earlier_hparams is None else earlier_hparams.as_arrays()
            begin = self._start_of(earlier.program)
            parts = state.shared, state.personal
            shared, personal = begin(key, hparams, parts, before, origin)
            if origin is not None:
                joined = JOINED.format(np.sum(origin < 0), self.num_clients)
                state = state.announce(sentences=(joined,))
        begun = self._begun(key, hparams, shared, personal, state.privacy)
        if state.consumed is not None and begun.consumed is not None:
            begun = dataclasses.replace(begun, consumed=jnp.copy(state.consumed))
        return begun

    def _start_of(self, earlier: Program) -> Callable[..., tuple[PyTree, PyTree]]:
        """Return the compiled function of first states after a program; all calls share it."""
        cached = self._starts.get(id(earlier))
        if cached is not None:
            return cached[1]
        algorithm, population, task = self.program.algorithm, self.population, self.task
        warm_start, predict = earlier.algorithm.warm_start, earlier.algorithm.predict

        @jax.jit
        def begin(key, hparams, state, before, origin):
            shared, personal = state
            published = warm_start.published(shared)
            if published is None and algorithm.warm_start.required:
                raise ValueError(
                    "the algorithm needs the model that the stage before published, as FedAvg's w "
                    "or PMTL's w̃, but that stage published none"
                )
            if published is None and origin is not None:
                raise ValueError(
                    "clients who join start from the model that the stage before published, but it "
                    "published none"
                )
            if published is None:
                published = task.init(keys.stream(key, Stream.INIT))
            return trained.first_states(
                algorithm,
                population.num_clients,
                key,
                hparams,
                published,
                personal,
                lambda personal, client_id: predict(shared, personal, before, client_id),
                origin,
            )

        self._starts[id(earlier)] = earlier, begin  # the program stays, so that its id does
        return begin

    def _origin(self, earlier: "Simulation", state: SimulationState) -> np.ndarray | None:
        """Return the number of each client in `earlier`, −1 if it joins; None if all are as there.

        Costs of examples, of privacy levels and of passes are of given clients, so none may join.
        """
        names, before = (sim.population.names.astype(str) for sim in (self, earlier))
        if np.array_equal(names, before):
            return None
        origin = numbers_of(earlier.population, self.population.names)
        if len({*before} - {*names}):
            raise ValueError(
                f"all {len(before)} clients of the stage before must be here, known by their "
                f"names, but {min({*before} - {*names})!r} is not"
            )
        charges = state.privacy.charges
        examples = [self.examples, *(charge.event for charge in charges)]
        if any(isinstance(event, Examples) for event in examples):
            raise ValueError("an ε of examples is about the silos of one run: none may join")
        if self.sampler.scheme.levels or any(charge.scheme.levels for charge in charges):
            raise ValueError("privacy levels are for all clients of a run: none may join")
        if state.consumed is not None:
            raise ValueError("passes belong to the clients who began the run: none may join")
        return origin

    def _begun(self, key, hparams, shared, personal, privacy) -> SimulationState:
        begun = self.compiled.init(key, hparams)
        require_same_shapes("server state", begun.shared, shared)
        require_same_shapes("personal states", begun.personal, personal)
        privacy = jax.tree.map(jnp.copy, privacy)
        begun = dataclasses.replace(begun, shared=shared, personal=personal, privacy=privacy)
        rounds = np.size(hparams.get("noise_multiplier", 0.0))
        return self.announce(begun, hparams, rounds, stage=begun.key)

    def start_new_clients(
        self, state: SimulationState, hparams: Hyperparameters, earlier: "Simulation"
    ) -> SimulationState:
        """Return the state before the first round of clients who took no part in `earlier`'s run.

        They start from the model that it published and send nothing: its guarantee stays as it is.
        """
        if self.mechanism.event.releases:
            raise SettingError(
                "new clients send nothing: give their simulation an algorithm such as finetune, "
                "and ",
                Name("no_release()"),
            )
        events = [self.examples, *(charge.event for charge in state.privacy.charges)]
        if any(isinstance(event, Examples) for event in events):
            raise ValueError(
                "an ε of examples is about the silos of one run: new clients may follow no rounds "
                "that protect examples, and protect none"
            )
        published = earlier.program.algorithm.warm_start.published(state.shared)
        if self.algorithm.warm_start.start is None or published is None:
            raise ValueError(
                "new clients start from the model that the stage before published, as FedAvg's w "
                "or PMTL's w̃, with an algorithm that has a `warm_start`"
            )
        # Their minibatches differ from those of the clients who have the same numbers.
        key = keys.stream(trained.stage_key(state.key, state.round), Stream.NEW_CLIENTS)
        key, hparams = self.check_start(key, hparams)
        shared, personal = trained.first_states(
            self.program.algorithm,
            self.num_clients,
            key,
            hparams,
            jax.tree.map(jnp.copy, published),
        )
        state = state.announce(sentences=(NEW_CLIENTS.format(self.num_clients),))
        return self._begun(key, hparams, shared, personal, state.privacy)

    def round(
        self, state: SimulationState, hparams: Hyperparameters
    ) -> tuple[SimulationState, Metrics]:
        """Run one round, as a pure function that may be mapped, differentiated and composed.

        Returns the next state, and a dict of the round's metrics (see `Segment`), each ().
        """
        state, hparams = self.announce(state, hparams), self.check(hparams)
        self._require_own(state, hparams)
        self._agree(state, hparams)
        step = accounts.charged_alone(self.compiled.step, self.accounts)
        return step(state, hparams, self.placed["train"])

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
        evaluate_privately: EvaluationPlan | None = None,
        eval_clients: int | None = SAMPLE,
    ) -> tuple[SimulationState, History]:
        """Run rounds, with evaluations on the test split; return the last state and the history.

        The last evaluation in the history reads all clients. Earlier ones read a sample drawn
        from the run's key, the same clients each time, if there are more than `eval_clients`.

        Args:
          state: state to start from; its buffers are reused, so it cannot be used afterwards.
          hparams: hyperparameters; a noise schedule (T,) is indexed by the state's `round`.
          rounds: number of rounds, at least 1.
          eval_every: rounds between evaluations, one compiled segment; by default all rounds.
          callbacks: called after each evaluation, in this order: from `fjs.callbacks`, or
            functions `(state, segment)`. One that returns False stops the run.
          delta: δ of the ε that callbacks read.
          keep: number of segments to return, the last ones; by default all.
          evaluate_privately: a metric that each evaluation releases with noise, on the validation
            split, and charges to the state: `Segment.private`. It reads all clients.
          eval_clients: number of clients in that sample; None for all clients.
        """
        require_state(state)
        require_values("run", state, hparams)
        done = int(state.round)
        self.check_rounds(hparams, done, rounds, eval_every, eval_clients)
        hparams = self.check(hparams)
        self._require_own(state, hparams)
        state = self.announce(state, hparams, rounds)
        self._agree(state, hparams)
        if evaluate_privately is not None:
            self.check_evaluated("validation", None)
            state = prepare_release(state, evaluate_privately, self.num_clients, self.task.records)
        advance = accounts.charged_alone(self.compiled.rounds, self.accounts)
        rows = self.placed["train"]
        run = RunLoop(
            lambda state, split, clients: self.evaluate(state, hparams, split, clients),
            done + rounds,
            self._delta(delta),
            plan=evaluate_privately,
            sample=sample_of(state.key, self.num_clients, eval_clients),
        )
        state, history = run_segments(
            lambda state, length: advance(state, hparams, rows, rounds=length),
            run,
            state,
            eval_every,
            callbacks,
            keep,
        )
        noised = bool(np.any(np.asarray(hparams.get("noise_multiplier", 0.0)) > 0))
        if warning := divergence.warning_in(run.course, run.nonfinite, noised):
            warnings.warn(warning, divergence.DivergingWarning, stacklevel=3)
        return state, history

    def evaluate(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        split: str = "test",
        clients: np.ndarray | None = None,
    ) -> Evaluation:
        """Compute per-client metrics of the models the clients predict with.

        Given (k,) increasing ids of `clients`, the metrics are theirs alone.
        """
        require_state(state)
        require_values("evaluate", state, hparams)
        clients, hparams = self.check_evaluated(split, clients), hparams.as_arrays()
        self._require_own(state, hparams)
        state = evaluated_part(state)
        measured = self.compiled.evaluate(state, hparams, self.placed[split], clients)
        return self.summarize(split, measured, clients)

    def evaluate_published(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        population: Population | None = None,
        split: str = "test",
    ) -> Evaluation:
        """Compute metrics of the model that the run published: the server's, for all clients alike.

        On the run's own population that compares the global model with `evaluate`'s personal ones.
        A central test set is a population of one client: `Population.from_flat(fields, [n])`, whose
        rows are in the split "train". Columns and classes of other rows are found by their names,
        and numbers converted to the run's units.

        Raises:
          ValueError: no model was published, or a column or class is not of the run.
        """
        require_state(state)
        run_population = self.population
        rows = run_population if population is None else aligned_with(population, run_population)
        checks.one_of(sorted(rows.splits), split=split)
        check_rows(self.task, rows.fields)
        with self._near_rows():
            measured = published_metrics(
                self._trained, self.program, state, hparams.as_arrays(), rows, split
            )
        return summary_of(rows, split, self.reported, measured.sums)(measured, None)

    def models(self, state: SimulationState, hparams: Hyperparameters) -> Any:
        """Return the parameters that each client predicts with, leaves (m, ...) on the host.

        A client's personal model is its own: a guarantee covers it against the other clients, not
        against its owner, and publishing it is another release. See `guarantee`.
        """
        require_state(state)
        with self._near_rows():
            rows = training_rows(self.program, self.population)
            return to_host(self._trained.models(on_host(state), hparams.as_arrays(), rows))

    def predict(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        population: Population | None = None,
        *,
        model: Literal["personal", "published"] = "personal",
    ) -> dict[str, np.ndarray]:
        """Predict rows, each by its client's model: a dict of (N, ...) in their source's order.

        That is the order of the data frame or file from which `population` was read, by default the
        run's own. Its clients and columns are known by their names, and no model reads a label. New
        clients predict with the model that the run published, and all do if `model` is "published".

        Returns:
          "client", its name; "row", the row's position in the source; "split", the run's, or "new"
          for another population; "prediction", in a regression a number in the units of the target
          as read, in a classification a class (its name, if it has one; None or −1 where the model
          gives NaN), with its "probability", or after `tasks.logistic` and `tasks.multilabel` the
          positive class's; "clipped", for other rows than the run's, whether a feature was beyond
          its range and was clipped; "target", if rows have one, in the terms of "prediction": of
          scaled rows the one that metrics read, clipped to its range.

        Raises:
          ValueError: a client is new and no model was published, columns differ, or the task says
            nothing of rows.
        """
        require_state(state)
        checks.one_of(("personal", "published"), model=model)
        rows, published = self.population if population is None else population, model != "personal"
        of_run = self._trained, self.program, self.reported, self.population
        with self._near_rows():
            return predictions_of(
                *of_run, state, hparams.as_arrays(), rows, published_alone=published
            )

    def coefficients(
        self, state: SimulationState, hparams: Hyperparameters
    ) -> dict[str, np.ndarray]:
        """Return the coefficients of clients' linear models in the units of the columns as read.

        The arrays, (m,) or for c > 1 outputs (m·c,), are a table: "client", its name; "class", or
        "target" of several targets, if there are several outputs; "intercept"; and one for each
        column of x. A prediction, or the score of a class, is the intercept and the sum of
        coefficients times columns.

        Raises:
          ValueError: the models are not linear in columns x (N, d).
        """
        return self.reported.coefficients(self.models(state, hparams), self.population.names)

    def standard_errors(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        *,
        model: Literal["published", "personal"] = "published",
    ) -> dict[str, np.ndarray]:
        """Return linear models' coefficients with standard errors, by source.

        "noise" comes from the mechanism in all rounds of this stage, and "cohorts" from which
        clients took part; both spread from round to round as they do near the last state, so what
        early rounds did before the model settled is not in them.
        "sampling" is, by the model:

        * "published": the error over clients. The released mean message is an estimating equation,
          whose root is the model, so the error is the sandwich of the clients' messages, as
          cluster-robust errors of least squares are, with the same correction for few clients.
        * "personal": the error of a client's rows, given the published state. A client with n rows
          estimates the minimum of its expected loss and its pull of strength λ: a shrunk model,
          whose distance from the unshrunk one, a bias, is not in the error. The sandwich is
          (H + λI)⁻¹ S (H + λI)⁻¹/n with the Hessian H of the mean loss, and the mean S of
          s sᵀ/(1 − h)² over rows' gradients s and leverages h: for λ = 0, HC3.
          f = tr (H + λI)⁻¹H coefficients are fitted.
          A lasting error of the centre counts λ(H + λI)⁻¹ times.

        Errors are computed from private rows, and publishing them is another release. A client's
        sampling error reads its own rows alone and stays with it, as its model does. Noise and
        cohorts read all clients' rows.

        Returns:
          arrays in the units of the columns as read, a line for each coefficient, of each client
          for personal models: "client", "coefficient", "class" or "target" of several outputs,
          "estimate", "sampling", "noise", "cohorts", and "low" and "high", the 95 % interval of all
          three by Student's t with m − 1 or n − f degrees of freedom; NaN if n ≤ f.

        Raises:
          ValueError: models are not linear, clients send something else than changes of one
            published model or, for personal ones, do not descend their own loss and a pull, the
            mechanism is not Gaussian, or the model began from an earlier stage.
        """
        require_state(state)
        checks.one_of(("published", "personal"), model=model)
        hparams = hparams.as_arrays()
        z = self._planned_noise(hparams).values(hparams, 0, int(state.round))
        if model == "personal":
            models = self.models(state, hparams)
            of_run = self.program, self._personal, self.reported, self.population, state, hparams
            with self._near_rows():
                return personal_errors_of(*of_run, z, models)
        with self._near_rows():
            of_run = self.program, self._linear_round, self.reported, self.population
            return standard_errors_of(*of_run, state, hparams, z)

    def guarantee(
        self,
        state: SimulationState,
        delta: float | None = None,
        *,
        planned: int | None = None,
        later: Sequence[PrivacySpend] = (),
    ) -> Report:
        """Compute the guarantees of all releases so far, on the host in float64 from the ledger.

        Protected examples are charged for all of T `planned` rounds, to be given if the time to
        stop may follow from releases; so are charges of `later` releases.
        """
        require_values("guarantee", state)
        if not self._traced:  # the state may come from `program` alone
            zeros = {name: jnp.zeros(record.shape) for name, record in self.records.items()}
            hparams = Hyperparameters(**zeros)
            self.message_shapes(keys.seed_key(0), hparams)
        privacy = self.announce(state).privacy
        charges = ledger.charged(privacy)
        most = max(charged.scheme.clients for charged in charges)
        return report(
            charges,
            default_delta(most) if delta is None else delta,
            draws=ledger.drawn(privacy),
            assumed=privacy.public,
            limit=privacy.limit,
            minibatches=accounts.minibatches_taken(self.examples, state.consumed),
            left=None if planned is None else max(0, planned - int(state.round)),
            later=later,
        )

    def epsilon(self, state: SimulationState, delta: float | None = None) -> jax.Array:
        """Return an upper bound on ε (zero-out), a scalar; works inside jit; ∞ without a guarantee.

        The RDP bound, for display, control and derivatives: a little above `guarantee`'s, or, for a
        state with a budget, what it spent of it.
        """
        return rdp_epsilon_in_jit(state.privacy, self._delta(delta))

    def _delta(self, delta: float | None) -> float:
        return default_delta(self.num_clients) if delta is None else delta

    # --- what sweeps, derivatives, audits and commands need besides -------------------------------

    def plan_for(self, hparams: Hyperparameters) -> Plan:
        """Return the plan of rounds, with the chunks that fit one device's memory, from shapes.

        Rounds may use another size that suits a form of messages, or divides a cohort.
        """
        hparams, program = hparams.as_arrays(), self.program
        if not program.plan.asks_memory:
            return program.plan
        devices = len(self.devices or (None,))
        rows = Rows.shapes(self.population, "train", self.algorithm)
        state = self.state_shapes(hparams)
        held = bytes_of(rows) // devices + bytes_of(state.of_clients) // devices
        slots = min(self.sampler.scheme.capacity, -(-self.num_clients // devices))
        return program.plan.in_memory(slots, held, program.client_bytes(hparams, rows))

    def summarize(
        self, split: str, measured: ClientMetrics, clients: np.ndarray | None = None
    ) -> Evaluation:
        """Summarize metrics of each client, (m,) or, of S runs, (m, S)."""
        if split not in self._summaries:
            self._summaries[split] = summary_of(
                self.population, split, self.reported, measured.sums
            )
        return self._summaries[split](to_host(measured), clients)

    def announce(
        self,
        state: SimulationState,
        hparams: Hyperparameters | None = None,
        rounds: int = 0,
        *,
        stage: jax.Array | None = None,
    ) -> SimulationState:
        """Return a state of any simulation with all that rounds of this one need of its ledger.

        These are accounts, assumptions, and places for the noise of `rounds` more rounds, or of the
        first ones of a `stage` that begins with this key.
        """
        require_state(state)
        accounts.require_protection(state.privacy, self.accounts)
        releases = [PrivacySpend(*account, ()) for account in self.accounts]
        if hparams is not None and rounds and self.accounts[0][1].releases:
            done = int(state.round)
            if self._planned_noise(hparams).known:
                releases[0] = self.planned(hparams, done, done + rounds)
        return state.announce(
            [*self.prepared, *releases],
            (*self.public, *self.assumed_of(hparams)),
            places=accounts.places_for(hparams),
            stage=stage,
        )

    def assumed_of(self, hparams: Hyperparameters | None) -> tuple[str, ...]:
        """Return the assumption on hyperparameters with a value for each client, if any."""
        names = () if hparams is None else per_client(self.records.values(), hparams)
        return (OF_CLIENTS.format(", ".join(names)),) if names else ()

    @property
    def prepared(self) -> tuple[PrivacySpend, ...]:
        """The charges of releases before round 1, to which the population was adapted."""
        return tuple(map(ledger.spend_of, self.population.preparations))

    def planned(
        self, hparams: Hyperparameters, begin: int = 0, end: int | None = None
    ) -> PrivacySpend:
        """Return the charges of rounds `begin` to `end`; by default of one, or of a schedule.

        Their noise is the mechanism's own: NaN, which has no ε, if it follows from
        messages or from the mechanism's state, which releases change.
        """
        scheme, event = self.accounts[0]
        hparams = hparams.as_arrays()
        of_schedule = max(begin + 1, *np.shape(hparams.get("noise_multiplier", 0.0)), 0)
        last = of_schedule if end is None else end
        if not event.releases:
            return PrivacySpend(scheme, event, ())
        noise, rate = self._planned_noise(hparams), float(self.sampler.rate(hparams))
        z = noise.values(hparams, begin, last)
        rounds = entries(z if noise.varies else z[0], rate, last - begin)
        return PrivacySpend(scheme, event, rounds)

    def noise_reads(self, hparams: Hyperparameters) -> tuple[str, ...]:
        """Return the names of the hyperparameters that the mechanism's z follows from."""
        reads = self._planned_noise(hparams).leaves
        return tuple(name for name, is_read in zip(hparams, reads, strict=True) if is_read)

    def _planned_noise(self, hparams: Hyperparameters) -> PlannedNoise:
        """Return the noise of the mechanism's releases, traced once for shapes of `hparams`."""
        kind = _shapes_of(hparams.as_arrays())
        if kind not in self._noises:
            message = self.message_shapes(keys.seed_key(0), hparams)
            self._noises[kind] = PlannedNoise.of(self.program, message, hparams)
        return self._noises[kind]

    def check(self, hparams: Hyperparameters) -> Hyperparameters:
        """Return the hyperparameters as arrays, if they suit the parts."""
        if not isinstance(hparams, Hyperparameters) or set(hparams) != set(self.records):
            names = list(hparams) if isinstance(hparams, Hyperparameters) else hparams
            raise ValueError(
                f"hparams must come from `hyperparameters` of this simulation, which reads "
                f"{', '.join(self.records) or 'none'}; got {names}"
            )
        for name, record in self.records.items():
            record.check(getattr(hparams, name), self.num_clients)
        check_noise(hparams)
        if self.task.track is not None and self.algorithm.averages_statistics:
            check_statistics(hparams)
        for part in (self.algorithm, self.mechanism, self.sampler):
            part.check(hparams)
        # In one order, so that one program serves them wherever they were made.
        ordered = {name: getattr(hparams, name) for name in self.records}
        return Hyperparameters(**ordered).as_arrays()

    def check_start(
        self, key: jax.Array | int, hparams: Hyperparameters
    ) -> tuple[jax.Array, Hyperparameters]:
        """Return the key and, as arrays, the hyperparameters with which a run may start."""
        key = require_key(key)
        hparams = self.check(hparams)
        check_own(self.sampling, self.program.sampling, hparams, self._lawful)
        message = self.message_shapes(key, hparams)
        event = self.mechanism.event
        if event.releases and event.known and not is_stamped(self.mechanism):
            mechanism_law.check_own(self._answers, message, hparams)
        return key, hparams

    def check_rounds(
        self,
        hparams: Hyperparameters,
        done: int,
        rounds: int,
        eval_every: int | None,
        eval_clients: int | None = None,
    ) -> None:
        """Check that a run can go on for `rounds` rounds after `done`; traced noise is skipped."""
        counts = {"rounds": rounds, "eval_every": eval_every, "eval_clients": eval_clients}
        checks.count(**{name: count for name, count in counts.items() if count is not None})
        last, z = done + rounds, hparams.get("noise_multiplier", 0.0)
        if advice := self.advise_on_noise(hparams, last):
            warnings.warn(advice, stacklevel=1)
        if np.ndim(z) and np.shape(z)[0] < last:
            raise ValueError(
                f"the noise schedule has {np.shape(z)[0]} values, too few for {last} rounds"
            )

    def advise_on_noise(self, hparams: Hyperparameters, rounds: int) -> SettingWarning | None:
        """Name the message that leaves less noise in the server's state at the same ε.

        None if there is none, or none for so few rounds.
        """
        algorithm, z = self.algorithm, hparams.get("noise_multiplier", 0.0)
        adds_up = algorithm.noise_adds_up
        traced = any(isinstance(value, core.Tracer) for value in jax.tree.leaves(hparams))
        if adds_up is None or traced or is_own(algorithm.server):  # which may forget noise
            return None
        p = float(self.sampler.answer_rate(self.sampler.rate(hparams)))
        if not np.any(np.asarray(z) > 0) or rounds <= max(1, adds_up.outgrown(p, hparams)):
            return None
        name = maker(algorithm.client) if is_own(algorithm.client) else adds_up.algorithm
        what = f"{name}'s server state adds up the noise of all {rounds} rounds"
        remedy = adds_up.remedy if " " in adds_up.remedy else Name(adds_up.remedy)
        return SettingWarning(f"{what}; at the same ε, ", remedy, " forgets it")

    def _near_rows(self) -> contextlib.AbstractContextManager[Any]:
        """Compute on the host if rows and states of all clients are there and fit no device."""
        if self.streamed:
            return jax.default_device(jax.local_devices(backend="cpu")[0])
        return contextlib.nullcontext()

    def check_evaluated(self, split: str, clients: Any) -> np.ndarray | None:
        """Check split and clients; return the ids as int32, or None for all."""
        checks.one_of(sorted(self.population.splits), split=split)
        if clients is None:
            return None
        ids = np.asarray(clients)
        are_integers = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in "iu"
        if (
            not are_integers
            or np.any(np.diff(ids) <= 0)
            or ids[0] < 0
            or ids[-1] >= self.num_clients
        ):
            got = checks.described(clients)
            raise ValueError(f"clients must be increasing ids below {self.num_clients}, got {got}")
        return ids.astype(np.int32)

    def check_in_memory(self) -> None:
        """Check that rows may be on devices."""
        if self.streamed:
            raise ValueError("sweeps and derivatives need all rows in memory: they do not stream")

    def message_shapes(self, key: jax.Array, hparams: Hyperparameters) -> PyTree:
        """Return the shapes of one client's message; the first call checks all functions."""
        return self._trace(key, hparams).message

    def state_shapes(self, hparams: Hyperparameters) -> SimulationState:
        """Return the shapes of a run's first state; the first call checks all functions."""
        return self._trace(keys.seed_key(0), hparams.as_arrays()).state

    def metric_shapes(self, hparams: Hyperparameters) -> ClientMetrics:
        """Return the shapes of one client's metrics in an evaluation."""
        program, state = self.program, self.state_shapes(hparams)
        rows = Rows.shapes(self.population, "validation", self.algorithm)
        reading = program.plan_of_evaluation(state).reading
        return jax.eval_shape(
            lambda *args: program.measure_client(*args, reading),
            state, row_of(state.personal), hparams.as_arrays(), INTEGER, rows,
        )  # fmt: skip

    def bytes_sent(self, hparams: Hyperparameters) -> float:
        """Return the expected bytes of the messages of one round, of all clients who take part."""
        message = self.message_shapes(keys.seed_key(0), hparams)
        rate = self.sampler.answer_rate(self.sampler.rate(hparams.as_arrays()))
        return bytes_of(message) * float(np.mean(np.asarray(rate))) * self.num_clients

    def round_work(self, hparams: Hyperparameters) -> RoundWork:
        """Return the work of a round, from which `Clock` tells its expected seconds."""
        message, values = self.message_shapes(keys.seed_key(0), hparams), hparams.as_arrays()
        sampler, at_work = self.sampler, self.algorithm.at_work
        scheme, rate = sampler.scheme, float(np.mean(np.asarray(sampler.rate(values))))
        coins = {
            "poisson": (self.num_clients, rate),
            "allocation": (self.num_clients, rate),
            "cyclic": (scheme.group_size, scheme.in_turn(rate)),
            "groups": (scheme.group_size, 1.0),
        }
        draws, drawn = coins.get(scheme.kind, (scheme.capacity, 1.0))
        rows, most = Rows.shapes(self.population, "train"), self.population.bound("train")
        kind = most, *_shapes_of((values, rows.fields))
        if kind not in self._operations:
            self._operations[kind] = operations(self.program, rows, values, most)
        return RoundWork(
            float(self._operations[kind]),
            float(bytes_of(message)),
            draws,
            float(sampler.answer_rate(jnp.asarray(np.asarray(drawn)))),
            None if at_work is None else float(np.mean(np.asarray(at_work(values)))),
        )

    def facts(self, hparams: Hyperparameters) -> dict[str, str]:
        """Return named digests of what all processes of a run must have in common."""
        kind = _shapes_of(hparams.as_arrays())
        if kind not in self._facts:
            state = self._trace(keys.seed_key(0), hparams.as_arrays()).state
            if self.transformed is self.program:
                rows = Rows.shapes(self.population, "train", self.algorithm)
            else:
                rows = self.placed["train"]
            self._facts[kind] = facts_of(self.transformed, state, hparams, rows)
        return self._facts[kind]

    def _agree(self, state: SimulationState, hparams: Hyperparameters) -> None:
        """Check that all processes go on with one round of one run: they have one ledger."""
        if self.devices is None or not spans_processes(self.devices):
            return
        traced = any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves((state, hparams)))
        agree(self.facts(hparams) | ({} if traced else facts_of_state(state, hparams)))

    def _trace(self, key: jax.Array, hparams: Hyperparameters) -> TracedRound:
        rows = Rows.shapes(self.population, "train")
        kind = _shapes_of((hparams, rows.fields))
        if kind not in self._traced:  # shared with simulations of other data
            self._traced[kind] = trace_round(
                self.program, rows, key, hparams, pure=not self.unchecked
            )
        return self._traced[kind]

    def _require_own(self, state: SimulationState, hparams: Hyperparameters) -> None:
        """Check that a state has the shapes that `init` gives, and all functions."""
        initial = self._trace(keys.seed_key(0), hparams).state
        require_same_shapes("server state", initial.shared, state.shared)
        require_same_shapes("personal states", initial.personal, state.personal)


def _shapes_of(tree: PyTree) -> tuple[Any, ...]:
    """Return the shapes and types of a pytree's leaves, by which a trace is known."""
    return tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree))


def facts_of(
    program: Program, state: SimulationState, hparams: Hyperparameters, rows: Rows
) -> dict[str, str]:
    """Return a digest of a round, traced for the devices that run it, by its name in words.

    State and rows may be shapes.
    """
    traced = jax.make_jaxpr(program.step)(state, hparams.as_arrays(), rows)
    return {"code of a round": digest_of(traced)}


def facts_of_state(state: SimulationState, hparams: Hyperparameters) -> dict[str, str]:
    """Return named digests of all that the next rounds' bounds, noise and ledger follow from."""
    budget = np.frombuffer(repr(state.privacy.limit).encode(), np.uint8)
    begun = {
        "key, ledger or hyperparameters": (
            state.round, jax.random.key_data(state.key), state.privacy, budget, hparams.as_arrays(),
        ),
        "state of the mechanism": state.mechanism,
    }  # fmt: skip
    return {name: _digest_of_values(to_host(values)) for name, values in begun.items()}


def _digest_of_values(tree: PyTree) -> str:
    values = repr([(leaf.shape, leaf.tobytes()) for leaf in jax.tree.leaves(tree)])
    return hashlib.sha256(values.encode()).hexdigest()
