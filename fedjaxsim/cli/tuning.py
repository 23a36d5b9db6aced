"""The command `fedjaxsim tune`: a descent, its test on fresh seeds, and the run with its result."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from fedjaxsim.callbacks import Cadence
from fedjaxsim.cli.messages import say
from fedjaxsim.cli.question import Question
from fedjaxsim.cli.running import print_results
from fedjaxsim.cli.stopping import stoppable
from fedjaxsim.extras import missing
from fedjaxsim.privacy.assumptions import SHARED_SEED
from fedjaxsim.privacy.schedule import equally_costly
from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import can_draw, number, print_rows
from fedjaxsim.report.results import Estimate, difference
from fedjaxsim.report.symbols import remember
from fedjaxsim.runs.build import draws_of, prepare, versions
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.execute import Stage, about, execute
from fedjaxsim.runs.fingerprints import fingerprint_of, settings_digest
from fedjaxsim.runs.own_check import check_own_code
from fedjaxsim.runs.settings import RunConfig, flag
from fedjaxsim.signals import Stop, stopped
from fedjaxsim.tune.descent import (
    NOT_FINITE,
    OPTIMIZER,
    ObjectiveValue,
    Point,
    Step,
    TuningTrace,
    descend,
)
from fedjaxsim.tune.files import PICTURE, RUN, TuneDirectory, array_of
from fedjaxsim.tune.objective import SeedGradient
from fedjaxsim.tune.source import Source, find_source, keys_of, metric_of
from fedjaxsim.tune.watch import TuneProgress, over_seeds

RULES = {"adam": OPTIMIZER, "lion": optax.lion(1.0, weight_decay=0.0)}
BOUNDS = 1e4
"""Largest factor between a hyperparameter and its start."""
_REASONS = {
    "epsilon": "it sets the guarantee, and no metric says what that is worth",
    "noise_multiplier": "it sets the guarantee, and no metric says what that is worth",
    "sampling_rate": "it decides who takes part, which is discrete",
}


def prepare_tune(
    config: RunConfig, question: Question, *, checkpoint_every: str | None, explain: bool
) -> Callable[[], int]:
    """Check all input of a tuning; return a function that tunes and gives the exit code."""
    if config.out is None:
        raise ValueError("tune needs a directory for its results, --out DIR")
    names = _names(question.wrt, config)
    for name, least in (("seeds", 2), ("steps", 1)):
        value = getattr(question, name)
        if value < least:
            raise ValueError(f"{flag(name)} must be at least {least}, got {value}")
    remember(config.records.values())
    source = find_source(config, question.public_data, clips="clip" in names)
    start: Point = {}
    for name in names:
        value = float(np.asarray(source.hparams.get(name)))
        if not 0 < value < math.inf:
            raise ValueError(
                f"{flag(name)} must be positive and finite to be tuned on a logarithmic scale, "
                f"got {value}"
            )
        start[name] = value
    check_own_code(source.final)
    simulation = source.simulation
    metric = metric_of(simulation.task, simulation.population, question.metric)
    keys, fresh = keys_of(config.seed, question.seeds)
    measure = SeedGradient(
        simulation, source.hparams, config.rounds, names, keys, metric=metric, split=source.split
    )
    cadence = Cadence.parse(checkpoint_every)
    asked = [config.settings(), dataclasses.asdict(question)]
    data = [fingerprint_of(each.population) for each in (simulation, source.final.simulation)]
    directory = TuneDirectory.open(
        config.out, settings_digest(asked, data), overwrite=config.overwrite
    )

    def work() -> int:
        can_draw()
        kept = "the steps so far are kept; the same command continues"
        with stoppable(lambda: kept) as stop:
            tuning = _Tuning(
                config, question, source, start, metric, measure, directory, stop, cadence, explain
            )
            return tuning.run(keys, fresh)

    return work


def _names(wrt: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    """Return the fields of the hyperparameters that are tuned."""
    names = tuple(name.replace("-", "_") for name in wrt)
    tunable = [name for name, record in config.records.items() if record.scale == "log"]
    allowed = ", ".join(map(flag, tunable))
    if not names:
        raise ValueError(f"wrt must name at least one of {allowed}, got nothing")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"wrt names {flag(name)} twice")
        if name not in tunable:
            why = f" ({_REASONS[name]})" if name in _REASONS else ""
            raise ValueError(
                f"{flag(name)} cannot be tuned with {config.algorithm}{why}; it can be tuned in "
                f"{allowed}"
            )
    return names


@dataclasses.dataclass
class _Tuning:
    """A tuning with checked input."""

    config: RunConfig
    question: Question
    source: Source
    start: Point
    metric: str
    measure: SeedGradient
    directory: TuneDirectory
    stop: Stop
    cadence: Cadence
    explain: bool

    def run(self, keys: jax.Array, fresh: jax.Array) -> int:
        """Descend, test on fresh keys, and run with the result; return the exit code."""
        record = self._record([*keys, *fresh])
        path, test = self._descend(record), None
        if path.best is not path.steps[0] and not self.stop.is_set():
            test = self._test(path, fresh)
        return self._finish(record, path, test)

    def _descend(self, record: Record) -> TuningTrace:
        """Descend; points measured before an interruption are not measured again."""
        config, steps, known = self.config, [], self.directory.measured()

        def remembered(point: Point) -> ObjectiveValue:
            if known and known[0][0] == point:
                return known.pop(0)[1]
            known.clear()
            return self.measure(point)

        def on_step(step: Step) -> bool:
            steps.append(step)
            if not known:
                self.directory.write_path(record, steps)
            progress.update(step)
            return bool(known) or not self.stop.is_set()

        bounds = {}
        for name, value in self.start.items():
            least, most = config.records[name].range
            bounds[name] = max(least, value / BOUNDS), min(most, value * BOUNDS)
        with TuneProgress(self.metric, self.question.steps, quiet=config.quiet) as progress:
            return descend(
                remembered,
                self.start,
                steps=self.question.steps,
                optimizer=RULES[self.question.rule],
                bounds=bounds,
                cost=self.measure.runs,
                on_step=on_step,
            )

    def _test(self, path: TuningTrace, fresh: jax.Array) -> Record:
        """Compare the start with the result on seeds that the descent has not seen."""
        points = {"start": path.steps[0].point, "tuned": path.best.point}
        saved = self.directory.saved.get("test")
        values = {
            name: array_of(saved[name]) if saved else self.measure(point, fresh).values
            for name, point in points.items()
        }
        fell, p = difference(values["start"].tolist(), values["tuned"].tolist())
        found = {"gain": fell.mean, "half": fell.half, "failed": fell.failed, "p": p}
        return {**values, **found, "runs": 2 * self.measure.runs}

    def _record(self, keys: Sequence[jax.Array]) -> Record:
        """Return the settings of the tuning, as the file of the path says them."""
        config, source, question = self.config, self.source, self.question
        noise = np.asarray(source.hparams.get("noise_multiplier", 0.0))
        final, tuning = source.final.simulation.num_clients, source.simulation.num_clients
        return {
            "statement": source.statement,
            "shared_seed": SHARED_SEED,
            "draws": [draws_of(key, config.rounds)._asdict() for key in keys],
            "tuned_on": source.kind,
            "metric": self.metric,
            "split": source.split,
            "seeds": question.seeds,
            "rounds": config.rounds,
            "rule": question.rule,
            "mode": type(self.measure.mode).__name__.lower(),
            "runs_per_step": self.measure.runs,
            "clients": {"tuning": tuning, "run": final},
            "noise_multiplier": {
                "tuning": equally_costly(noise),
                "run": source.final.noise_multiplier,
            },
            "asked": dataclasses.asdict(question),
            "guarantee": f"{RUN}/guarantee.json",
            "versions": versions(),
        }

    def _finish(self, record: Record, path: TuningTrace, test: Record | None) -> int:
        """Write and print the result, and run with it unless that makes no sense any more."""
        directory, source, best = self.directory, self.source, path.best
        record |= {"stopped": path.stopped, "best": path.steps.index(best), "test": test}
        directory.write_path(record, path.steps)
        if missing("plots") is None:
            from fedjaxsim.report import plots
            from fedjaxsim.tune.figure import trace_figure

            title = f"Tuning of {source.final.title}, {self.question.seeds} seeds"
            plots.save(trace_figure(path, self.metric, title), directory.path / PICTURE)
        if path.stopped == NOT_FINITE:
            say(f"{path.stopped}: start elsewhere")
            return 1
        tuned = tuned_settings(source.final.config, best.point)
        tuned = tuned.replace(public=(*tuned.public, source.statement))
        directory.write_tuned(tuned)
        names = [f"{self.metric} on the tuning's seeds", "on fresh ones"]
        headings = ["", *map(flag, self.start), *names]
        rows = [
            [name, *map(number, step.point.values()), str(over_seeds(step.objective.values)),
             str(over_seeds((test or {}).get(name, [])))]
            for name, step in (("start", path.steps[0]), ("tuned", best))
        ]  # fmt: skip
        print_rows(headings, rows, padding=(0, 1, 0, 0))
        if test is None:
            print(f"{self.metric} was not tested on fresh seeds; ended: {path.stopped}")
        else:
            count, p = self.question.seeds, number(test["p"])
            gain = Estimate(test["gain"], test["half"], None, count, test["failed"])
            fell = f"{self.metric} fell by {gain} on {count} fresh seeds"
            print(f"{fell} (95 %; paired t test, p = {p}); ended: {path.stopped}")
        finished = not self.stop.is_set() and self._run(tuned)
        print(SHARED_SEED)
        print(f"files in {directory.path}")
        if finished:
            return 0
        name, code = stopped([self.stop.number])
        print(f"stopped by {name}; the path so far is kept", end="; ", file=sys.stderr)
        print("run the same command again to resume", file=sys.stderr)
        return code

    def _run(self, config: RunConfig) -> bool:
        """Make the final run, with its report; return whether it was finished."""
        experiment = prepare(config, self.source.final.simulation)
        directory = RunDirectory(self.directory.path / RUN)
        try:
            directory.checkpoints(about(experiment)).last()
        except ValueError:  # The checkpoint is damaged, or has other hyperparameters.
            RunDirectory.create(directory.path, overwrite=True)
        stage = Stage(experiment, directory)
        done = execute(stage, self.stop, quiet=config.quiet, cadence=self.cadence)
        print_results(stage, done, explain=self.explain)
        return not done.summary["interrupted"]


def tuned_settings(config: RunConfig, point: Point) -> RunConfig:
    """Return settings with the hyperparameters of a point."""
    changes: dict[str, Any] = {**point}
    if "clip" in point and not config.clips:
        # At ε = ∞ a run clips only where z = 0 is given.
        changes |= {"noise_multiplier": 0.0}
        changes |= {"epsilon": None} if "epsilon" in config.given() else {}
    return config.replace(**changes)
