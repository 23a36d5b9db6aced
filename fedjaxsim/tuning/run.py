"""Tunings: a descent and its test on fresh seeds.

A tuning's directory holds

    path.json   every step, the test of the result on fresh seeds, and the privacy statement
    tuned.toml  the settings with the result, for `fedjaxsim run`
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjaxsim import store
from fedjaxsim.divergence import Record
from fedjaxsim.engine.checkpoint import has_x64, require_x64
from fedjaxsim.metrics import Metric
from fedjaxsim.privacy.assumptions import SHARED_SEED
from fedjaxsim.report.files import (
    check_place,
    intact,
    make_directory,
    read_json,
    strict,
    write_json,
    write_tables,
)
from fedjaxsim.report.progress import Bar, number
from fedjaxsim.report.results import difference
from fedjaxsim.runs.build import check_user_code, draws_of, versions
from fedjaxsim.runs.directory import OTHER_CODE, OTHER_DATA, other_results
from fedjaxsim.runs.execute import logs_of, unlogged
from fedjaxsim.runs.loggers import FOLDER as LOGS
from fedjaxsim.runs.loggers import Factory
from fedjaxsim.runs.settings import RunConfig, flag
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.tuning.descent import (
    NOT_FINITE,
    STOPPED,
    ObjectiveValue,
    Point,
    SeedGradient,
    Step,
    TuningTrace,
    descend,
    limits,
)
from fedjaxsim.tuning.setup import TuningSetup, keys_of, set_up, tuned_metric

PATH_JSON, TUNED = "path.json", "tuned.toml"
BOUNDS = 1e4
"""Largest factor between a hyperparameter and its start."""


class TuningResult(NamedTuple):
    """The path of a tuning, and its test.

    Attributes:
      path: the folder.
      metric: the metric that was improved, and in words its `title`.
      ended: why it ended.
      test: the start and the result on fresh seeds, with the gain; None without a better point.
      statement: what the choice means for the guarantee of the final run.
    """

    path: Path
    metric: str
    title: str
    trace: TuningTrace
    ended: str
    test: Record | None
    statement: str

    @property
    def best(self) -> Point:
        """The best hyperparameters."""
        return self.trace.best.point

    @property
    def config(self) -> RunConfig:
        """The settings of the final run, with the best hyperparameters."""
        return read_toml(self.path / TUNED)

    def __repr__(self) -> str:
        """Name the folder, why the tuning ended, the start and the best point."""
        steps = {"start": self.trace.steps[0], "best": self.trace.best}
        points = (f"\n  {name}: {_measured(step, self.title)}" for name, step in steps.items())
        return f"TuningResult({str(self.path)!r}): {self.ended}{''.join(points)}"


@dataclasses.dataclass(frozen=True, eq=False)
class Tuning:
    """A tuning whose input is checked, ready to run, or to go on in its folder.

    Attributes:
      record: what `path.json` says of the tuning as a whole.
      known: points that were measured before an interruption.
      quiet: whether no progress is shown.
      loggers: a dict of trackers' factories, which get each point that is tried.
    """

    path: Path
    setup: TuningSetup
    measure: SeedGradient
    start: Point
    bounds: dict[str, tuple[float, float]]
    fresh: jax.Array
    steps: int
    improved: Metric
    record: Record
    known: list[tuple[Point, ObjectiveValue]]
    quiet: bool = False
    loggers: Mapping[str, Factory] = dataclasses.field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The metric that is improved."""
        return self.record["metric"]

    def run(self, stop: Event) -> TuningResult:
        """Descend, and test the result on fresh seeds; setting `stop` ends it after a point."""
        path, record, measure, measured = self.path, dict(self.record), self.measure, [*self.known]
        steps: list[Step] = []
        logs = logs_of(self.loggers, self.setup.final.config, path, **record["asked"])

        def remembered(point: Point) -> ObjectiveValue:
            """Measure a point, unless it was measured before an interruption."""
            if measured and all(np.array_equal(measured[0][0][n], point[n]) for n in point):
                return measured.pop(0)[1]
            measured.clear()
            return measure(point)

        def on_step(step: Step) -> bool:
            steps.append(step)
            if not measured:
                _write(path, record, steps)
            for log in logs:
                log.add(self._logged(len(steps) - 1, step))
            bar.show(len(steps) - 1, words_of(step, self.improved.title))
            return bool(measured) or not stop.is_set()

        with contextlib.ExitStack() as closing:
            for log in logs:
                log.open(closing)
            bar = closing.enter_context(Bar("tune", self.steps, quiet=self.quiet))
            trace = descend(
                remembered,
                self.start,
                steps=self.steps,
                bounds=self.bounds,
                cost=measure.runs,
                on_step=on_step,
                larger_is_better=bool(self.improved.larger_is_better),
            )
        best, test = trace.best, None
        if best is not trace.steps[0] and not stop.is_set():
            before, after = (measure(step.point, self.fresh) for step in (trace.steps[0], best))
            worse, better = (before, after)[:: -1 if self.improved.larger_is_better else 1]
            gained, p = difference(worse.values.tolist(), better.values.tolist())
            gain = {"gain": gained.mean, "half": gained.half, "p": p}
            test = {"start": before.values, "tuned": after.values, **gain}
        ended = STOPPED if stop.is_set() else trace.stopped
        if ended != NOT_FINITE:
            tuned = tuned_settings(self.setup.final.config, best.point)
            tuned = tuned.replace(public=(*tuned.public, self.setup.statement))
            if record["asked"]["metric"] is not None:
                tuned = tuned.replace(metric=self.metric)
            write_tables(path / TUNED, tuned.settings())
        record |= {"stopped": ended, "best": trace.steps.index(best), "test": test}
        _write(path, record, trace.steps)  # the end, after all other files
        asked = self.metric, self.improved.title
        return TuningResult(path, *asked, trace, ended, test, self.setup.statement)

    def _logged(self, number: int, step: Step) -> Record:
        """Return the record of a point for loggers; of clients' values it has the mean."""
        point = {f"point/{name}": np.mean(value) for name, value in step.point.items()}
        return {"round": number, self.metric: step.value, "accepted": step.accepted, **point}


def prepare_tuning(
    config: RunConfig,
    path: Path,
    asked: dict[str, Any],
    *,
    overwrite: bool,
    quiet: bool,
    loggers: Mapping[str, Factory] = MappingProxyType({}),
) -> Tuning:
    """Check all input of a tuning before anything is computed, and open its folder.

    `asked` has wrt, seeds, steps and metric.
    """
    check_place(path, "tuning")
    store.check_free(path)
    is_there = (path / PATH_JSON).is_file() and not overwrite
    saved, measured = _read_saved(path) if is_there else ({}, [])
    seed = saved.get("settings", {}).get("seed")
    if config.has_secret_seed and isinstance(seed, str):  # drawn for this command
        config = config.replace(seed=seed)
    ours: Record = strict({"settings": config.settings(), "asked": asked})
    theirs = {name: saved.get(name, {}) for name in ours}
    if is_there and theirs != ours:
        raise other_results(
            path, "tuning", *(both["settings"] | both["asked"] for both in (theirs, ours))
        )
    require_x64(saved.get("x64"), path)
    names = _names(asked["wrt"], config)
    setup = set_up(config, clips="clip" in names)
    start, bounds = dict[str, Any](), dict[str, tuple[float, float]]()
    for name in names:
        value = start[name] = np.asarray(setup.hparams.get(name), np.float64)[()]
        least, most = config.records[name].range
        bounds[name] = max(least, np.min(value) / BOUNDS), min(most, np.max(value) * BOUNDS)
    limits(start, bounds)
    check_user_code(setup.final)
    simulation, final = setup.simulation, setup.final
    metric, improved = tuned_metric(simulation.task, simulation.population, asked["metric"])
    keys, fresh = keys_of(config.seed, asked["seeds"])
    measure = SeedGradient(
        simulation,
        setup.hparams,
        config.rounds,
        names,
        keys,
        metric=metric,
        split=setup.split,
        pooled=improved.pooled,
    )
    data = [sim.population.fingerprint for sim in (simulation, final.simulation)]
    record: Record = {
        **ours,
        "data_fingerprint": data,
        "code_fingerprint": final.code_fingerprint,
        "statement": setup.statement,
        "shared_seed": SHARED_SEED,
        "x64": has_x64(),
        "versions": versions(),
        "draws": [draws_of(key, config.rounds)._asdict() for key in (*keys, *fresh)],
        "metric": metric,
        "title": improved.title,
        "runs_per_step": measure.runs,
    }
    for what, other in (("data", OTHER_DATA), ("code", OTHER_CODE)):
        name = f"{what}_fingerprint"
        if saved.get(name, record[name]) != record[name]:
            raise other_results(path, "tuning", {}, {}, other)
    if saved and saved.get("stopped") not in (None, STOPPED):
        loggers = unlogged(loggers, path, len(measured) - 1)
    stale = (PATH_JSON, TUNED, LOGS) if overwrite else ()
    make_directory(path, stale, "tuning", overwrite=overwrite)
    return Tuning(
        path,
        setup,
        measure,
        start,
        bounds,
        fresh,
        asked["steps"],
        improved,
        record,
        measured,
        quiet,
        loggers,
    )


def _names(wrt: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    """Return the fields of the hyperparameters that are tuned."""
    names = tuple(name.replace("-", "_") for name in wrt)
    tunable = [name for name, record in config.records.items() if record.scale == "log"]
    allowed = ", ".join(map(flag, tunable))
    if not names:
        raise ValueError(f"wrt must name at least one of {allowed}, got nothing")
    for name in names:
        if name not in tunable:
            why = f"cannot be tuned with {config.algorithm}; it can be {allowed}"
            raise ValueError(f"{flag(name)} {why}")
        if names.count(name) > 1:
            raise ValueError(f"wrt must name {flag(name)} once, got {','.join(wrt)}")
    return names


def _read_saved(path: Path) -> tuple[Record, list[tuple[Point, ObjectiveValue]]]:
    """Return the content of `path.json`, and the points that it has."""
    saved, measured = read_json(path / PATH_JSON), []
    with intact(path / PATH_JSON):
        for step in saved["steps"]:
            slopes = {name: _array(values) for name, values in step["slopes"].items()}
            measured.append((step["point"], ObjectiveValue(_array(step["values"]), slopes)))
    return saved, measured


def _array(values: Any) -> np.ndarray:
    """Return numbers from JSON, with NaN for null."""
    return np.asarray(values, np.float64)


def _write(path: Path, record: Record, steps: Sequence[Step]) -> None:
    """Write the path so far."""
    names = ("runs", "accepted", "radius", "value", "point", "gradient", "gradient_error")
    rows = [
        {"step": index, **{name: getattr(step, name) for name in names},
         "values": step.objective.values, "slopes": step.objective.gradients}
        for index, step in enumerate(steps)
    ]  # fmt: skip
    write_json(path / PATH_JSON, {**record, "steps": rows})


def words_of(step: Step, title: str) -> str:
    """Describe a step that was tried, as in `loss 0.93 ± 0.018  lam 0.1  kept`."""
    return f"{_measured(step, title)}  {'kept' if step.accepted else 'taken back'}"


def _measured(step: Step, title: str) -> str:
    """Describe a point and its value."""
    point = "  ".join(f"{flag(name)} {shown(value)}" for name, value in step.point.items())
    return f"{title} {step.objective.estimate}  {point}"


def shown(value: Any) -> str:
    """Return a hyperparameter in words; the least and the largest of clients' values."""
    return " to ".join(map(number, (np.min(value), np.max(value))[: 1 + np.ndim(value)]))


def tuned_settings(config: RunConfig, point: Point) -> RunConfig:
    """Return settings with the hyperparameters of a point."""
    changes: dict[str, Any] = {name: np.asarray(value).tolist() for name, value in point.items()}
    if "clip" in point and not config.clips:
        # At ε = ∞ a run clips only where z = 0 is given.
        changes |= {"noise_multiplier": 0.0}
        changes |= {"epsilon": None} if "epsilon" in config.given() else {}
    return config.replace(**changes)
