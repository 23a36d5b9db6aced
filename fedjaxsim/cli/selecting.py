"""The command `fedjaxsim sweep --select-privately`: the best of a random number of runs."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjaxsim import keys, store
from fedjaxsim.callbacks import StopOnInterrupt
from fedjaxsim.cli.messages import say
from fedjaxsim.cli.stopping import stoppable
from fedjaxsim.cli.sweeping import families_of
from fedjaxsim.engine import processes
from fedjaxsim.engine.evaluation import EvaluationPlan
from fedjaxsim.privacy import selection
from fedjaxsim.privacy.assumptions import no_guarantee
from fedjaxsim.privacy.guarantee import Guarantee, Report
from fedjaxsim.report.files import make_directory, strict, write_json
from fedjaxsim.report.progress import print_guarantee
from fedjaxsim.runs.build import Experiment, draws_of
from fedjaxsim.runs.directory import GUARANTEE
from fedjaxsim.runs.sweep_runs import SweepRuns, read_sweep
from fedjaxsim.signals import stopped

SELECTION, MODEL = "selection.json", "model.npz"
_UNREPLACED = "the price of a selection is known for zero-out"
_ASSUMED = (
    "Published are the best run's release, settings and score. The number of runs and all other "
    "runs stay secret, as do metrics without noise."
)


def prepare_selection(
    file: Path, out: Path, data: str | None, *, spec: str, noise: float, largest: float,
    overwrite: bool,
) -> Callable[[], int]:  # fmt: skip
    """Check all input of a selection; return a function that runs it and gives the exit code.

    Args:
      file: TOML file of a sweep, whose runs are the candidates.
      out: directory of the results.
      data: source of the clients, in place of the file's.
      spec: distribution of the number of runs, for `selection.parse`.
      noise: z of the score that each run releases at its end.
      largest: public bound of a client's score.
      overwrite: whether results in the directory are replaced.
    """
    runs, plan = selection.parse(spec), read_sweep(file, data)
    if "seed" in plan.keys:
        raise ValueError("select-privately gives each run a seed of its own: leave out seed")
    if processes.several():
        raise ValueError("select-privately runs in one process: leave out processes")
    candidates = _candidates(plan, noise, largest)
    report = _report(runs, candidates, noise, largest)
    if report.find("zero_out").epsilon is None:
        raise ValueError(f"there is nothing to select privately: {report.short()}")
    make_directory(out, (SELECTION, MODEL, GUARANTEE), "selection", overwrite=overwrite)

    def work() -> int:
        seed = candidates[0].config.seed
        rng = np.random.default_rng([seed, keys.SELECTION])
        drawn = [int(rng.integers(len(candidates))) for _ in range(runs.draw(rng))]
        # Without a bar or lines: a log would tell the number of runs, which is secret.
        with stoppable(lambda: "nothing was selected") as stop:
            best: tuple[float, int, Any, Any] | None = None
            for number, index in enumerate(drawn):
                if stop.is_set():
                    break
                found = _run(candidates[index], _key(seed, number), noise, largest, stop)
                if found is not None and (best is None or found[0] > best[0]):
                    best = (found[0], index, *found[1:])
            interrupted = stop.is_set()
        if interrupted:
            # The runs so far may not be published: how many finished is not a random number.
            name, code = stopped([stop.number])
            say(f"stopped by {name}: nothing was selected; run the same command again")
            return code
        content: dict[str, Any] = {"number_of_runs": spec, "candidates": len(candidates)}
        if best is not None:
            _, index, score, shared = best
            content |= {"settings": plan.values(index), f"private_{score.name}": score.mean}
            leaves, _ = jax.tree_util.tree_flatten_with_path(shared)
            arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
            stream = io.BytesIO()
            np.savez(stream, allow_pickle=False, **arrays)
            store.write(out / MODEL, stream.getvalue())
        write_json(out / GUARANTEE, report.to_json())
        write_json(out / SELECTION, strict(content))
        print("  ".join(f"{key} {value}" for key, value in content.items()))
        print_guarantee(report, out / GUARANTEE, explain=False)
        print(f"files in {out}")
        return 0

    return work


def _candidates(plan: SweepRuns, noise: float, largest: float) -> list[Experiment]:
    """Prepare all runs, and check that each may be published."""
    by_run = {k: each for family in families_of(plan) for k, each in family.experiments.items()}
    found = [experiment for _, experiment in sorted(by_run.items())]
    for experiment in found:
        charges = (*experiment.simulation.prepared, experiment.planned())
        if why := next(filter(None, map(no_guarantee, charges)), ""):
            raise ValueError(f"a candidate has no guarantee: {why}")
        if not experiment.simulation.population.splits["validation"].count.any():
            raise ValueError("select-privately needs rows to validate on: validation-fraction")
    shared = {
        "delta": {experiment.delta for experiment in found},
        "number of clients": {experiment.simulation.num_clients for experiment in found},
        "sampling": {experiment.simulation.sampler.scheme.kind for experiment in found},
    }
    for name, values in shared.items():
        if len(values) > 1:
            raise ValueError(f"candidates must have one {name}, got {sorted(values)}")
    return found


def _plan(experiment: Experiment, noise: float, largest: float) -> EvaluationPlan:
    return EvaluationPlan(noise, experiment.judging, largest)


def _report(
    runs: selection.Runs, candidates: list[Experiment], noise: float, largest: float
) -> Report:
    charges = [
        [
            *each.simulation.prepared,
            each.planned(),
            _plan(each, noise, largest).spend(each.simulation.num_clients),
        ]
        for each in candidates
    ]
    first = candidates[0]
    epsilon = selection.epsilon(runs, charges, first.delta)
    alone = first.simulation.guarantee(first.init(), first.delta).guarantees
    public = dict.fromkeys(
        sentence
        for each in candidates
        for sentence in (*each.simulation.public, *each.config.public)
    )
    return Report(
        tuple(
            Guarantee(
                epsilon if each.adjacency == "zero_out" else None,
                first.delta,
                each.adjacency,
                each.view,
                first.simulation.sampler.scheme.kind,
                "rdp_selection",
                "upper_bound" if each.adjacency == "zero_out" else "none",
                tuple(dict.fromkeys((*each.assumptions, *public, _ASSUMED))),
                "" if each.adjacency == "zero_out" else _UNREPLACED,
            )
            for each in alone
            if each.unit == "client"  # the theorem gives examples no ε here
        ),
        first.delta,
        draws=(draws_of(_of_all_runs(first.config.seed), 1),),  # of a secret number of keys
    )


def _of_all_runs(seed: int) -> jax.Array:
    """Return the key that the keys of all runs come from."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), keys.SELECTION)


def _key(seed: int, number: int) -> jax.Array:
    """Return the key of one run, which no plain run of the seed draws from."""
    return jax.random.fold_in(_of_all_runs(seed), number)


def _run(experiment: Experiment, key: jax.Array, noise: float, largest: float, stop: Any) -> Any:
    """Run one candidate; return its score (larger is better), release and server state."""
    simulation, hparams = experiment.simulation, experiment.hparams
    state, history = simulation.run(
        simulation.init(key, hparams),
        hparams,
        experiment.config.rounds,
        callbacks=[StopOnInterrupt(stop)],
        keep=1,
        evaluate_privately=_plan(experiment, noise, largest),
    )
    score = history[-1].private if len(history) else None
    if score is None:
        return None
    sign = 1 if score.larger_is_better else -1
    return sign * score.mean, score, jax.tree.map(np.asarray, state.shared)
