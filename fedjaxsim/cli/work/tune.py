"""The command `fedjaxsim tune`: a descent, its path in files, and the run that it leads to."""

import dataclasses
import difflib
import math
import sys
from collections.abc import Callable, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedjaxsim.callbacks import Cadence
from fedjaxsim.cli.start import INTERRUPTED
from fedjaxsim.extras import missing
from fedjaxsim.gradients.whole_run import EPSILON, check_names
from fedjaxsim.hyperparameters import Hyperparameter, Hyperparameters
from fedjaxsim.privacy.budget import equally_costly
from fedjaxsim.privacy.guarantee import SHARED_SEED
from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import (
    can_draw,
    number,
    print_guarantee,
    print_table,
    stop_on_interrupt,
)
from fedjaxsim.report.symbols import remember
from fedjaxsim.runs.build import draws_of, prepare, versions
from fedjaxsim.runs.directory import GUARANTEE, RunDirectory
from fedjaxsim.runs.execute import about, execute
from fedjaxsim.runs.fingerprints import digest, fingerprint_of
from fedjaxsim.runs.settings import RunConfig, flag
from fedjaxsim.tune import descent
from fedjaxsim.tune.descent import Measured, Point, Step, descend
from fedjaxsim.tune.files import PICTURE, RUN, TuneDirectory
from fedjaxsim.tune.objective import Grid, SeedGradient, grid_around, measure_grid
from fedjaxsim.tune.rules import Optax, Quadratic, Rule
from fedjaxsim.tune.source import Source, find_source, keys_of, metric_of
from fedjaxsim.tune.watch import TuneProgress, print_points

if TYPE_CHECKING:
    from fedjaxsim.cli.tune import Tune

RULES: dict[str, Rule] = {"adam": Optax(), "quadratic": Quadratic()}
FAILED = 1
_ASKED = ("wrt", "seeds", "steps", "rule", "metric", "public_data", "compare_grid")
"""What a tuning follows from, besides the settings of a run."""
BOUNDS = 1e4
"""Hyperparameters stay within this factor of their start."""


def tunable(config: RunConfig) -> tuple[str, ...]:
    """The hyperparameters that a run reads, but for those that set the guarantee."""
    return tuple(name for name, record in config.records.items() if record.scale == "log")


def prepare_tune(command: "Tune") -> Callable[[], int]:
    """Checks all input of a tuning; what is returned does it and gives the exit code.

    Raises:
      FileNotFoundError: if there are no data where the settings say.
      ValueError: naming what is wrong, what is allowed and what was got.
    """
    config = command.settings
    if config.out is None:
        raise ValueError("tune needs a directory for its results, --out DIR")
    names = _names(command.wrt, config)
    for name, least in (("seeds", 2), ("steps", 1), ("compare_grid", 2)):
        value = getattr(command, name)
        if value is not None and value < least:
            raise ValueError(f"{flag(name)} must be at least {least}, got {value}")
    settings = {name: config.records[name].setting for name in names}
    start = {
        name: config.clip_norm if name == "clip_norm" else float(config.get(setting))
        for name, setting in settings.items()
    }
    remember(config.records.values())
    for name, value in start.items():
        if not 0 < value < math.inf:
            raise ValueError(
                f"{flag(settings[name])} must be positive and finite to be tuned on a "
                f"logarithmic scale, got {value}"
            )
    source = find_source(config, command.public_data, clips="clip_norm" in names)
    simulation = source.simulation
    metric = metric_of(simulation.task, simulation.population, command.metric)
    simulation.check_start(config.seed, source.hparams)
    cadence = Cadence.parse(command.checkpoint_every)
    asked = [config.settings(), *(getattr(command, name) for name in _ASKED)]
    data = [fingerprint_of(each.population) for each in (simulation, source.final.simulation)]
    directory = TuneDirectory.open(config.out, digest(asked, data), overwrite=config.overwrite)

    def work() -> int:
        can_draw()
        with stop_on_interrupt() as stop:
            return _Tuning(command, source, start, metric, directory, stop, cadence).run()

    return work


def _names(wrt: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    """The hyperparameters that are tuned, by field name.

    Raises:
      ValueError: if there are none, or one is unknown, discrete, read by no one, given twice, or
        what the guarantee depends on.
    """
    names = tuple(name.replace("-", "_") for name in wrt)
    allowed = ", ".join(map(flag, tunable(config)))
    if not names:
        raise ValueError(f"wrt must name at least one of {allowed}, got nothing")
    for name in names:
        if name in (EPSILON, "noise_multiplier"):
            raise ValueError(
                f"{flag(name)} is not tuned: it sets the guarantee, and no metric says what that "
                "is worth; give it a value"
            )
    for index, name in enumerate(names):
        if name == "sampling_rate":
            check_names(names, Hyperparameters())
        if name not in tunable(config):
            close = difflib.get_close_matches(name, tunable(config), n=1)
            hint = f" (did you mean {flag(close[0])!r}?)" if close else ""
            raise ValueError(
                f"{flag(name)} cannot be tuned with {config.algorithm}{hint}; it can be tuned in "
                f"{allowed}"
            )
        if name in names[:index]:
            raise ValueError(f"wrt names {flag(name)} twice")
    return names


@dataclasses.dataclass
class _Tuning:
    """One tuning, whose input has been checked."""

    command: "Tune"
    source: Source
    start: Point
    metric: str
    directory: TuneDirectory
    stop: Event
    cadence: Cadence

    def run(self) -> int:
        """Descends, compares, runs, writes and prints; gives the exit code."""
        config, source = self.command.settings, self.source
        keys = keys_of(config.seed, self.command.seeds)
        at: dict[str, Any] = {"metric": self.metric, "split": source.split}
        measure = SeedGradient(
            source.simulation, source.hparams, config.rounds, tuple(self.start), keys, **at
        )
        record = self._record(measure, keys)
        known, known_grid = self.directory.known()
        seen: list[Step] = []
        measured: list[Measured] = []

        def remembered(point: Point) -> Measured:
            """What was measured before this command was interrupted is not measured again."""
            if known and known[0][0] == point:
                measured.append(known.pop(0)[1])
            else:
                known.clear()
                measured.append(measure(point))
            return measured[-1]

        with TuneProgress(self.metric, self.command.steps, quiet=config.quiet) as progress:

            def on_step(step: Step) -> bool:
                seen.append(step)
                if not known:
                    self.directory.write_path(record, seen, measured)
                progress.update(step)
                return bool(known) or not self.stop.is_set()

            path = descend(
                remembered,
                self.start,
                steps=self.command.steps,
                rule=RULES[self.command.rule],
                bounds={
                    name: _bounds(config.records[name], value) for name, value in self.start.items()
                },
                cost=measure.runs,
                on_step=on_step,
            )
        grid = None
        if self.command.compare_grid is not None and not self.stop.is_set():
            points = grid_around(self.start, self.command.compare_grid)
            if known_grid is not None:
                return self._finish(record, path, measured, Grid(points, *known_grid))
            print(f"grid: {len(points)} points, {len(points) * len(keys)} runs", flush=True)
            grid = measure_grid(
                source.simulation, source.hparams, config.rounds, points, keys,
                stop=self.stop, **at,
            )  # fmt: skip
        return self._finish(record, path, measured, grid)

    def _record(self, measure: SeedGradient, keys: jax.Array) -> Record:
        """What was done, as the file of the path says it."""
        config, final = self.command.settings, self.source.final
        return {
            "statement": self.source.statement,
            "shared_seed": SHARED_SEED,
            "draws": [draws_of(key, config.rounds)._asdict() for key in keys],
            "tuned_on": self.source.kind,
            "metric": self.metric,
            "split": self.source.split,
            "seeds": self.command.seeds,
            "rounds": config.rounds,
            "rule": self.command.rule,
            "mode": measure.mode,
            "runs_per_step": measure.runs,
            "clients": {
                "tuning": self.source.simulation.num_clients,
                "run": final.simulation.num_clients,
            },
            "noise_multiplier": {
                "tuning": equally_costly(
                    np.asarray(self.source.hparams.get("noise_multiplier", 0.0))
                ),
                "run": final.noise_multiplier,
            },
            "asked": {name: getattr(self.command, name) for name in _ASKED},
            "guarantee": f"{RUN}/guarantee.json",
            "versions": versions(),
        }

    def _finish(
        self, record: Record, path: descent.Path, measured: Sequence[Measured], grid: Grid | None
    ) -> int:
        """Writes what was found, and runs with it unless that makes no sense any more."""
        directory, source, best = self.directory, self.source, path.best
        gain, error = path.gain
        record |= {
            "stopped": path.stopped,
            "best": path.steps.index(best),
            "gain": {"value": gain, "standard_error": error},
            "grid": None if grid is None else _grid_record(grid),
        }
        directory.write_path(record, path.steps, measured)
        if missing("plots") is None:
            from fedjaxsim.report import plots
            from fedjaxsim.tune.figure import path_figure

            title = f"Tuning of {source.final.title}, {self.command.seeds} seeds"
            plots.save(path_figure(path, self.metric, title, grid), directory.path / PICTURE)
        if path.stopped == descent.NOT_FINITE:
            print(f"fedjaxsim: {path.stopped}: start elsewhere", file=sys.stderr)
            return FAILED
        tuned = tuned_settings(source.final.config, best.point)
        directory.write_tuned(tuned, source.statement)
        rows = {
            "start": _row(path.steps[0], path.steps[0].runs),
            "tuned": _row(best, path.steps[-1].runs),
        }
        if grid is not None:
            values = grid.values[grid.best]
            rows["grid"] = (
                grid.points[grid.best], float(values.mean()), descent.standard_error(values),
                float(grid.runs),
            )  # fmt: skip
        print_points(self.metric, rows)
        print(
            f"{self.metric} fell by {number(gain)} ± {error:.2g} (standard error over "
            f"{self.command.seeds} seeds); ended: {path.stopped}"
        )
        code = INTERRUPTED if self.stop.is_set() else self._run(tuned)
        print(source.statement)
        print(SHARED_SEED)
        print(f"files in {directory.path}")
        if code == INTERRUPTED:
            print("stopped by Ctrl-C; the path so far is kept", end="; ", file=sys.stderr)
            print("the same command goes on from here", file=sys.stderr)
        return code

    def _run(self, config: RunConfig) -> int:
        """The final run, with its report."""
        experiment = prepare(config, self.source.final.simulation)
        try:
            self.directory.run.checkpoints(about(experiment)).last()
        except ValueError:  # It is damaged, or of what other versions have found.
            RunDirectory.create(self.directory.run.path, overwrite=True)
        summary, report, _ = execute(
            experiment, self.directory.run, self.stop, quiet=config.quiet, cadence=self.cadence
        )
        print_table([{"run": config.algorithm, **summary}])
        print_guarantee(report, self.directory.run.path / GUARANTEE, explain=self.command.explain)
        return INTERRUPTED if summary["interrupted"] else 0


def tuned_settings(config: RunConfig, point: Point) -> RunConfig:
    """The settings of a run with hyperparameters that a tuning found.

    Args:
      config: the settings that the tuning started from.
      point: the hyperparameters.
    """
    changes: dict[str, Any] = {config.records[name].setting: value for name, value in point.items()}
    if "clip_norm" in point and not config.clips:
        # At ε = ∞ a run does not clip, unless it is told that z = 0.
        changes |= {"noise_multiplier": 0.0}
        changes |= {"epsilon": None} if "epsilon" in config.given() else {}
    return config.replace(**changes)


def _bounds(record: Hyperparameter, start: float) -> tuple[float, float]:
    least, most = record.range
    return max(least, start / BOUNDS), min(most, start * BOUNDS)


def _row(step: Step, runs: float) -> tuple[Point, float, float, float]:
    return step.point, step.value, step.standard_error, runs


def _grid_record(grid: Grid) -> Record:
    return {
        "points": list(grid.points),
        "values": grid.values,
        "best": grid.best,
        "runs": grid.runs,
    }
