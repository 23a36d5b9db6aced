"""A federated run as repeated application of one pure function. Start reading here.

`Simulation` checks that an algorithm (written for one client), a population, a sampler and a
mechanism fit together, and calls the compiled functions of their `Program` (`engine/program.py`).
The rounds between two evaluations are one compiled `lax.scan` whose state is donated.
"""

import copy
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np

from fedjaxsim.algorithm import Algorithm, Metrics
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.divergence import DivergingWarning, diverging_from, is_finite, warning_of
from fedjaxsim.engine import private_evaluation
from fedjaxsim.engine.accounts import minibatches_taken
from fedjaxsim.engine.checks import require_state, rounds_done
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.layout import ChunkMap
from fedjaxsim.engine.loop import Callbacks, RunLoop
from fedjaxsim.engine.predictions import coefficients_of, models_of, predictions_of
from fedjaxsim.engine.private_evaluation import EvaluationPlan
from fedjaxsim.engine.segments import History
from fedjaxsim.engine.setup import LEDGER_ENTRIES, Setup
from fedjaxsim.engine.stages import start_new_clients, start_stage
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters, Value, fill
from fedjaxsim.privacy import calibration, ledger
from fedjaxsim.privacy.accounting.in_loop import epsilon_in_jit
from fedjaxsim.privacy.assumptions import default_delta, no_guarantee
from fedjaxsim.privacy.events import MOST_ROUNDS, PrivacyLimit, PrivacySpend
from fedjaxsim.privacy.guarantee import Report, report
from fedjaxsim.privacy.mechanisms import Mechanism, gaussian
from fedjaxsim.privacy.samplers import Sampling


class Simulation:
    """A federated simulation.

    Args:
      algorithm: e.g. `pmtl(task)`; its task must accept the population.
      population: all clients' data.
      sampling: `poisson(0.1)`, `full_participation()`, or another sampling.
      minibatches: local steps or epochs, and the batch size; by default one epoch of batches of 10.
      mechanism: by default `gaussian()`; `no_release()` for an algorithm that sends nothing.
      accountant: accountant of `guarantee`, by name; by default the tightest sound one.
      ledger_entries: number of distinct (z, p) the run may be charged for.
      chunk_size: clients run together, at least 2. By default 16 in a scan and 64 in a batch; on an
        accelerator as many as fit a quarter of the memory left by rows and states.
      chunk_map: "scan" or "vmap" inside a chunk; by default "scan" on a CPU for models above 4 kB.
      devices: JAX devices over which the clients are divided; by default the first one. A CPU has
        one for each core after `fjs.use_all_cores()`.
      streamed: whether a device holds the rows and states of one cohort; see `engine/stream.py`.

    Attributes:
      algorithm, task, population, mechanism, minibatches: the parts.
      sampling: the sampler of cohorts of this population's clients.
      num_clients: m.
      records: the hyperparameters that the parts declare, by name.
      program: the pure functions on one device, which `shard`, `batch` and `stream` transform.
      setup: checks, rows on devices and shapes; see `engine/setup.py`.

    Raises:
      ValueError: if parts do not fit together: function and arguments, accountant and sampler or
        mechanism, data and task.
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
            accountant,
            ledger_entries,
            chunk_size,
            chunk_map,
            devices,
            streamed,
        )
        self._use(setup)

    def _use(self, setup: Setup) -> None:
        self.setup, self.program, self.records = setup, setup.program, setup.records
        self.algorithm, self.task, self.population = setup.algorithm, setup.task, setup.population
        self.sampling, self.mechanism = setup.sampler, setup.mechanism
        self.minibatches, self.num_clients = setup.minibatches, setup.num_clients

    def __repr__(self) -> str:
        return repr(self.setup)

    def hyperparameters(self, **values: Value) -> Hyperparameters:
        """Return the hyperparameters of a run: the given values, and defaults for the rest.

        Args:
          **values: by name, each () or, where its record declares a schedule, one per round (T,).

        Raises:
          ValueError: for a name that no part reads (with the nearest one that is read), a missing
            value without a default, a wrong shape or a value out of range.
        """
        return fill(self.records, values, self.sampling.rate, self.setup.step_size)

    def calibrate(
        self, hparams: Hyperparameters, *, epsilon: float, rounds: int, delta: float | None = None
    ) -> Hyperparameters:
        """Return the hyperparameters with the least noise multiplier that meets a target ε.

        Args:
          hparams: of the run.
          epsilon: target ε in nats of all rounds (zero-out, joint DP).
          rounds: T.
          delta: δ in (0, 1); by default `default_delta(m)`.

        Raises:
          ValueError: if there is no noise to calibrate, or no noise multiplier meets the target.
        """
        if "noise_multiplier" not in self.records:
            raise ValueError("the mechanism adds no noise, so no ε can be aimed at")
        z = calibration.noise_multiplier(
            epsilon,
            self._delta(delta),
            rounds=rounds,
            sampling_rate=float(self.sampling.rate(self.setup.check(hparams))),
            scheme=self.sampling.scheme,
            event=self.mechanism.event,
            accountant=self.setup.accountant,
            before=self.setup.prepared,
        )
        calibrated = hparams.replace(noise_multiplier=z)
        self.setup.check(calibrated)
        return calibrated

    def with_population(self, population: Population) -> Self:
        """Return the simulation on other data of as many clients, sharing compiled code.

        Where fields and rows agree in shape, nothing is compiled again.

        Raises:
          ValueError: for another number of clients, or data that do not suit the task.
        """
        return self._with(self.setup.with_population(population))

    def _with(self, setup: Setup) -> Self:
        other = copy.copy(self)
        other._use(setup)
        return other

    def init(self, key: jax.Array | int, hparams: Hyperparameters) -> SimulationState:
        """Return the state before the first round.

        All random numbers of a run follow from the key, so two runs with one seed share cohorts and
        noise whatever else differs. Publish at most one of them, and keep its seed secret.

        Args:
          key: a threefry key (`jax.random.key(seed)`) or a seed.
          hparams: hyperparameters.

        Raises:
          ValueError: if a hyperparameter is out of range, the key is of another kind, the mechanism
            does not suit what the algorithm sends, or a function returns what does not fit.
        """
        state = self.setup.compiled.init(*self.setup.check_start(key, hparams))
        return self.setup.with_account(state)

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

        Args:
          hparams: of the planned rounds, with the least noise and the largest p of any round.
          epsilon: ε > 0 in nats.
          delta: δ in (0, 1); by default `default_delta(m)`.
          evaluate_privately: evaluations that the run releases besides.
          eval_every: planned rounds between them.

        Raises:
          ValueError: if a number is out of range, the mechanism has no guarantee, or one round
            costs more.
        """
        hparams = self.setup.check(hparams)
        one = self.setup.planned(hparams, 0, 1)
        if why := no_guarantee(one) if one.entries else "nothing is released":
            raise ValueError(f"no budget bounds the rounds: {why}")
        noise = np.asarray(hparams.noise_multiplier)

        def plan(rounds: int) -> list[PrivacySpend]:
            planned = [*self.setup.prepared, self.setup.planned(hparams, 0, rounds)]
            if evaluate_privately is not None:  # before the first round and after the last, too
                evaluations = rounds // eval_every + 2
                planned.append(evaluate_privately.spend(self.num_clients, evaluations))
            return planned

        most = len(noise) if noise.ndim else MOST_ROUNDS
        return calibration.budget(
            epsilon, self._delta(delta), plan, most=most, accountant=self.setup.accountant
        )

    def with_budget(self, state: SimulationState, budget: PrivacyLimit) -> SimulationState:
        """Return the state with a budget that it and all stages from it keep.

        A round uses up a planned one with no more noise and no smaller p. If none is left, `run`
        ends and `round` changes nothing. So noise and number of rounds may follow from what was
        released; see `privacy/filter.py`.

        Args:
          state: from `init`, or after rounds without a release.
          budget: from `Simulation.budget`.

        Raises:
          ValueError: if the state has another budget, or has released something without one.
        """
        known = state.privacy.limit
        if known == budget:
            return state
        rounds = [each for each in ledger.charged(state.privacy) if each not in self.setup.prepared]
        if known is not None or any(each.entries for each in rounds):
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
          state: of a run on the same clients; it stays usable.
          hparams: of this stage.
          earlier: the simulation of `state` if its algorithm differs: clients then start from the
            models that they predicted with, and the server from the published model, or the task's
            `init`. By default server and personal states are taken as they are.
          earlier_hparams: hyperparameters of that simulation; by default `hparams`.

        Raises:
          ValueError: as `init`; if states, models or the number of clients do not fit, or the
            algorithm cannot start from these models.
        """
        return start_stage(
            self.setup, state, hparams, earlier and earlier.algorithm, earlier_hparams
        )

    def start_new_clients(
        self, state: SimulationState, hparams: Hyperparameters, earlier: "Simulation"
    ) -> SimulationState:
        """Return the state before the first round of clients who took no part in another run.

        They start from the model that it published and send nothing: its ε stays as it is, and so
        does everybody's model. `guarantee` of the state is that of the others.

        Args:
          state: of the run of `earlier`; it stays usable.
          hparams: of this simulation of the new clients.
          earlier: the simulation of `state`.

        Raises:
          ValueError: as `init`; if this simulation has a mechanism that releases, the other run
            published no model, or models do not fit.
        """
        return start_new_clients(self.setup, state, hparams, earlier.algorithm)

    def round(
        self, state: SimulationState, hparams: Hyperparameters
    ) -> tuple[SimulationState, Metrics]:
        """Run one round, as a pure function that may be mapped, differentiated and composed.

        Returns:
          The next state, and the round's metrics by name (see `Segment`), each ().

        Raises:
          ValueError: if a hyperparameter is out of range, or the simulation is streamed: its states
            change in place.
        """
        state, hparams = self.setup.with_account(state), self.setup.check(hparams)
        self.setup.message_shapes(state.key, hparams)
        return self.setup.compiled.step(state, hparams, self.setup.placed["train"])

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
    ) -> tuple[SimulationState, History]:
        """Run rounds, with evaluations on the test split.

        Args:
          state: state to start from; its buffers are reused, so it cannot be used afterwards.
          hparams: hyperparameters; a noise schedule (T,) is indexed by the state's `round`.
          rounds: number of rounds, at least 1.
          eval_every: rounds in one compiled segment, an evaluation after each multiple of it and
            after the last round; by default all rounds.
          callbacks: called after each evaluation, in this order: those of `fjs.callbacks`, or
            functions `(state, segment)`. One that returns False stops the run.
          delta: δ of the ε that callbacks read; by default 1/(10 m).
          keep: number of segments to return, the last ones; by default all.
          evaluate_privately: a metric that each evaluation releases with noise, on the validation
            split, and charges to the state: `Segment.private`.

        Returns:
          The state after the last round, and the history: a sequence of segments.

        Raises:
          ValueError: if a number is out of range, or a noise schedule is too short for the rounds
            or has more distinct values than the ledger has places.
        """
        done = rounds_done(state)
        self.setup.check_rounds(hparams, done, rounds, eval_every)
        hparams = self.setup.check(hparams)
        self.setup.message_shapes(state.key, hparams)
        state = self.setup.with_room(state, hparams, rounds)
        if evaluate_privately is not None:
            self.setup.check_split("validation")
            state = private_evaluation.prepared(
                state, evaluate_privately, self.num_clients, self.task.records
            )
        compiled, rows = self.setup.compiled, self.setup.placed["train"]
        run = RunLoop(
            lambda state, length: compiled.rounds(state, hparams, rows, rounds=length),
            lambda state, split: self.evaluate(state, hparams, split),
            done + rounds,
            self._delta(delta),
            self.setup.accountant,
            plan=evaluate_privately,
        )
        state, history = run.segments(state, eval_every, callbacks, keep)
        start = diverging_from(run.course)
        noised = np.any(np.asarray(hparams.get("noise_multiplier", 0.0)) > 0)
        if start is not None and not (noised and is_finite(run.course[-1]["train_loss"])):
            warnings.warn(warning_of(start, self.population), DivergingWarning, stacklevel=2)
        return state, history

    def evaluate(
        self, state: SimulationState, hparams: Hyperparameters, split: str = "test"
    ) -> Evaluation:
        """Compute per-client metrics of the models the clients predict with.

        Args:
          state: of a run.
          hparams: hyperparameters.
          split: "train", "validation" or "test".

        Raises:
          ValueError: if there is no such split.
        """
        require_state(state)
        self.setup.check_split(split)
        compiled, rows = self.setup.compiled, self.setup.placed[split]
        measured = compiled.evaluate(state, hparams.as_arrays(), rows)
        return self.setup.summarize(split, measured)

    def models(self, state: SimulationState, hparams: Hyperparameters) -> Any:
        """Return the parameters that each client predicts with.

        A client's personal model is its own: a guarantee covers it against the other clients, not
        against its owner, and publishing it is another release. See `guarantee`.

        Args:
          state: of a run; it stays usable.
          hparams: hyperparameters.

        Returns:
          Params of the task, leaves (m, ...) on the host.

        Raises:
          ValueError: if the simulation is streamed, or the state is none.
        """
        require_state(state)
        self.setup.check_in_memory()
        return models_of(self.program, self.population, state, hparams.as_arrays())

    def coefficients(
        self, state: SimulationState, hparams: Hyperparameters
    ) -> dict[str, np.ndarray]:
        """Return the table of the clients' linear models, in the units of the data as read.

        Like `models`, each client's rows are its own.

        Args:
          state: of a run; it stays usable.
          hparams: hyperparameters.

        Returns:
          Columns "client", "feature" ("(intercept)" first), "coefficient" and, with several
          outputs, "class", a row for each client, class and feature.

        Raises:
          ValueError: as `models`; if models are not linear, or columns have no names.
        """
        return coefficients_of(self.population, self.models(state, hparams))

    def predict(
        self,
        state: SimulationState,
        hparams: Hyperparameters,
        population: Population | None = None,
    ) -> dict[str, np.ndarray]:
        """Predict rows, each by its client's model.

        Args:
          state: of a run; it stays usable.
          hparams: hyperparameters.
          population: rows of clients, known by their names, whose labels are not read; by default
            the run's population, all splits. Columns are found by name, in any units. New clients
            predict with the model that the run published.

        Returns:
          By name, each (N, ...) in the order of the population's rows: "prediction" (a class, −1
          where the model gives NaN; or a number in the units of the target as read), and in
          classifications its "probability".

        Raises:
          ValueError: if a client is new and no model was published, columns differ, the task says
            nothing of rows, the simulation is streamed, or the state is none.
        """
        require_state(state)
        self.setup.check_in_memory()
        rows = self.population if population is None else population
        return predictions_of(self.program, self.population, state, hparams.as_arrays(), rows)

    def guarantee(
        self,
        state: SimulationState,
        delta: float | None = None,
        *,
        planned: int | None = None,
        later: Sequence[PrivacySpend] = (),
    ) -> Report:
        """Compute the guarantees of all releases so far, on the host in float64 from the ledger.

        Args:
          state: of a run.
          delta: total δ in (0, 1); by default `default_delta(m)`, at most 1/(10 m).
          planned: T, the planned number of rounds, if the time to stop may follow from releases:
            protected examples are then charged for all of them.
          later: charges of other releases that were planned for the rounds left.

        Raises:
          ValueError: as `init`, if a function of one client has a way to others.
        """
        self.setup.require_checked()
        privacy = self.setup.with_account(state).privacy
        charges = ledger.charged(privacy)
        most = max(charged.scheme.clients for charged in charges)
        return report(
            charges,
            default_delta(most) if delta is None else delta,
            self.setup.accountant,
            draws=ledger.drawn(privacy),
            assumed=privacy.public,
            limit=privacy.limit,
            minibatches=minibatches_taken(self.setup.examples, state.consumed),
            left=None if planned is None else max(0, planned - int(state.round)),
            later=later,
        )

    def epsilon(self, state: SimulationState, delta: float | None = None) -> jax.Array:
        """Compute an upper bound on ε (zero-out), (), inside jit; ∞ where there is none.

        The RDP bound, for display, control and derivatives: a little above `guarantee`'s, or, for a
        state with a budget, what it spent of it.

        Args:
          state: of a run.
          delta: δ in (0, 1); by default `default_delta(m)`.
        """
        return epsilon_in_jit(state.privacy, self._delta(delta))

    def _delta(self, delta: float | None) -> float:
        return default_delta(self.num_clients) if delta is None else delta


def with_parts(simulation: Simulation, **parts: Any) -> Simulation:
    """Return the simulation with other parts, such as `algorithm`; see `Setup`."""
    return simulation._with(dataclasses.replace(simulation.setup, **parts))
