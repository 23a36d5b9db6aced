"""Selections: the best of a random number of runs, with one zero-out ε for all of it."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import jax
import numpy as np

from fedjaxsim import keys
from fedjaxsim.callbacks import StopOnInterrupt
from fedjaxsim.data.population import has_same_clients
from fedjaxsim.divergence import DivergingWarning, Record
from fedjaxsim.engine.evaluation import EvaluationPlan
from fedjaxsim.engine.part_checks import require_key
from fedjaxsim.keys import Stream
from fedjaxsim.privacy import ledger, selection
from fedjaxsim.privacy.assumptions import no_guarantee
from fedjaxsim.privacy.guarantee import Guarantee, Report
from fedjaxsim.report.files import check_vacant, make_directory, strict, write_json
from fedjaxsim.runs.build import Experiment, draws_of
from fedjaxsim.runs.directory import GUARANTEE
from fedjaxsim.runs.public import MODEL, write_model
from fedjaxsim.runs.sweep_runs import SweepRuns
from fedjaxsim.runs.sweeping import experiments_of, families_of

SELECTION = "selection.json"
_FILES = (SELECTION, MODEL, GUARANTEE)
_UNREPLACED = "the price of a selection is known for zero-out"
_ASSUMED = (
    "Published are the best run's release, settings and score. The number of runs and all other "
    "runs stay secret, as do metrics without noise."
)


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateSelection:
    """A selection whose input is checked.

    Attributes:
      spec: the distribution of the number of runs, in words.
      report: the guarantee of what is published.
    """

    plan: SweepRuns
    path: Path
    spec: str
    runs: selection.NegativeBinomial
    candidates: Sequence[Experiment]
    judged: Sequence[EvaluationPlan]
    report: Report

    def run(self, stop: Event) -> Record | None:
        """Run a random number of runs, and publish the best; None if `stop` was set.

        Runs show no progress: a log would tell their number, which is secret.
        """
        candidates = self.candidates
        seed = candidates[0].config.seed
        rng = np.random.default_rng([seed, Stream.SELECTION])
        drawn = [int(rng.integers(len(candidates))) for _ in range(self.runs.draw(rng))]
        best: tuple[float, int, Any, Any] | None = None
        for number, index in enumerate(drawn):
            if stop.is_set():
                break
            # No plain run of the seed draws from this key.
            key = keys.stream(_of_all_runs(seed), Stream.SELECTION, number)
            outcome = _run(candidates[index], self.judged[index], key, stop)
            if outcome is not None and (best is None or outcome[0] > best[0]):
                best = (outcome[0], index, *outcome[1:])
        if stop.is_set():
            # The runs so far may not be published: how many finished is not a random number.
            return None
        content: Record = {"number_of_runs": self.spec, "candidates": len(candidates)}
        if best is not None:
            _, index, scored, shared = best
            content |= {"settings": self.plan.swept[index], f"private_{scored.name}": scored.mean}
            write_model(self.path / MODEL, shared)
        write_json(self.path / GUARANTEE, self.report.to_json())
        write_json(self.path / SELECTION, strict(content))
        return content


def prepare_selection(
    plan: SweepRuns,
    out: Path,
    spec: str,
    score: tuple[float, float],
    *,
    overwrite: bool,
    say_how_far: Callable[[str], None],
) -> PrivateSelection:
    """Check all input of a selection among the runs of a sweep.

    `spec` is the distribution of the number of runs, for `selection.parse`; `score` has z of the
    score that each run releases at its end, and the public bound of a client's score.
    """
    runs = selection.parse(spec)
    if "seed" in plan.keys:
        raise ValueError("select-privately gives each run its own seed: leave out seed")
    if not overwrite:
        check_vacant(out, _FILES, "selection")  # before code is traced, which takes minutes
    candidates = _candidates(plan, say_how_far)
    judged = [experiment.evaluation_plan(*score) for experiment in candidates]
    report = _selection_report(runs, candidates, judged)
    if candidates[0].config.hides_noise:
        report = report.of_secret_seed()
    if report.find("zero_out").epsilon is None:
        raise ValueError(f"there is nothing to select privately: {report.short()}")
    make_directory(out, _FILES, "selection", overwrite=overwrite)
    return PrivateSelection(plan, out, spec, runs, candidates, judged, report)


def _candidates(plan: SweepRuns, say_how_far: Callable[[str], None]) -> list[Experiment]:
    """Prepare all runs, and check that each may be published."""
    by_run = experiments_of(families_of(plan, say_how_far))
    experiments = [experiment for _, experiment in sorted(by_run.items())]
    for experiment in experiments:
        if why := no_guarantee(experiment.planned()):
            raise ValueError(f"a candidate has no guarantee: {why}")
        if not experiment.simulation.population.has("validation"):
            raise ValueError("select-privately needs rows to validate on: validation-fraction")
    shared = {
        "data": {experiment.config.data for experiment in experiments},
        "delta": {experiment.delta for experiment in experiments},
        "number of clients": {experiment.simulation.num_clients for experiment in experiments},
        "sampling": {experiment.simulation.sampler.scheme.kind for experiment in experiments},
    }
    for name, values in shared.items():
        if len(values) > 1:
            raise ValueError(f"candidates must have one {name}, got {sorted(values)}")
    populations = [experiment.simulation.population for experiment in experiments]
    if not all(has_same_clients(population, populations[0]) for population in populations):
        raise ValueError(
            "candidates must have one partition: rows of a client of one candidate are spread over "
            "clients of another, and no ε would cover all of them"
        )
    return experiments


def _selection_report(
    runs: selection.NegativeBinomial,
    candidates: Sequence[Experiment],
    judged: Sequence[EvaluationPlan],
) -> Report:
    charges = [
        [candidate.planned(), plan.spend(candidate.simulation.num_clients)]
        for candidate, plan in zip(candidates, judged, strict=True)
    ]
    first = candidates[0]
    # Runs on the same ranges share their noise, and other ranges were released, too.
    prepared = dict.fromkeys(
        charge for candidate in candidates for charge in candidate.simulation.prepared
    )
    epsilon = selection.epsilon(runs, charges, first.delta, [*prepared])
    public = [sentence for candidate in candidates for sentence in candidate.public]

    def guarantee(of_run: Guarantee) -> Guarantee:
        is_zero_out = of_run.adjacency == "zero_out"
        return dataclasses.replace(
            of_run,
            epsilon=epsilon if is_zero_out else None,
            accountant="rdp_selection",
            status="upper_bound" if is_zero_out else "none",
            assumptions=tuple(dict.fromkeys((*of_run.assumptions, *public, _ASSUMED))),
            reason="" if is_zero_out else _UNREPLACED,
        )

    of_first = first.simulation.guarantee(first.init(), first.delta).guarantees
    # The theorem gives examples no ε here.
    guarantees = tuple(guarantee(of_client) for of_client in of_first if of_client.unit == "client")
    # Draws of a secret number of keys.
    return Report(guarantees, first.delta, draws=(draws_of(_of_all_runs(first.config.seed), 1),))


def _of_all_runs(seed: int) -> jax.Array:
    """Return the key that the keys of all runs come from."""
    return keys.stream(require_key(seed), Stream.SELECTION)


def _run(experiment: Experiment, plan: EvaluationPlan, key: jax.Array, stop: Event) -> Any:
    """Run one candidate; return its score (larger is better), release and server state."""
    simulation, hparams = experiment.simulation, experiment.hparams
    # A warning of messages that are not finite, or of a diverging loss, has no noise.
    with warnings.catch_warnings(action="ignore", category=DivergingWarning):
        state, history = simulation.run(
            simulation.init(key, hparams),
            hparams,
            experiment.config.rounds,
            callbacks=[StopOnInterrupt(stop)],
            keep=1,
            evaluate_privately=plan,
        )
    score = history[-1].private if len(history) else None
    if score is None:
        return None
    planned = *simulation.prepared, experiment.planned(), plan.spend(simulation.num_clients)
    selection.require_planned(planned, ledger.charged(state.privacy))
    sign = 1 if score.larger_is_better else -1
    return sign * score.mean, score, jax.tree.map(np.asarray, state.shared)
