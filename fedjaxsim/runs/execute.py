"""One run, watched and kept: from a built experiment to its files."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Self

import jax
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.privacy import calibration, ledger
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.report.files import Record, strict
from fedjaxsim.report.progress import RunProgress, number
from fedjaxsim.runs.build import Experiment
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.simulation import Segment, SimulationState


def execute(
    experiment: Experiment, directory: RunDirectory | None, stop: Event, *, quiet: bool = False
) -> tuple[Record, Report]:
    """Runs an experiment, watches it and writes its files.

    Args:
      experiment: from `prepare`.
      directory: where the files go; None writes none.
      stop: once it is set, the run ends after the segment in flight, with all files.
      quiet: no progress bar.

    Returns:
      The summary, as `summary.json` holds it, and the privacy report.
    """
    config, simulation, hparams = experiment.config, experiment.simulation, experiment.hparams
    if directory is not None:
        directory.write_config(experiment.resolved())
    records: list[Record] = []
    round_seconds = 0.0
    with (
        RunProgress(experiment.title, config.rounds, quiet=quiet) as progress,
        _Clock().running() as clock,
    ):

        def keep(record: Record, rounds_per_second: float | None = None) -> None:
            records.append(record)
            if directory is not None:
                directory.append_metrics(record)
            progress.update(strict(record), rounds_per_second)

        def on_segment(state: SimulationState, segment: Segment) -> bool:
            nonlocal round_seconds
            round_seconds += clock.lap()
            record = {
                "round": segment.round,
                "train_loss": _train_loss(segment),
                **segment.evaluation.summary(),
                "epsilon": _epsilon(experiment, state),
            }
            keep(record, segment.round / round_seconds)
            clock.lap()
            return not stop.is_set()

        state = simulation.init(config.seed, hparams, common_noise=config.common_noise)
        evaluation = simulation.evaluate(state, hparams)
        keep({"round": 0, "train_loss": None, **evaluation.summary(), "epsilon": 0.0})
        clock.lap()
        state, history = simulation.run(
            state, hparams, config.rounds, eval_every=config.eval_every, on_segment=on_segment
        )
    report = simulation.guarantee(state, experiment.delta)
    last = dict(records[-1])
    done = last.pop("round")
    summary = {
        "algorithm": config.algorithm,
        "data": config.data,
        "model": config.model,
        "clients": simulation.num_clients,
        "rounds": done,
        "rounds_planned": config.rounds,
        "interrupted": done < config.rounds,
        "diverging": diverges([record["train_loss"] for record in records]),
        **last,
        "epsilon_replace": report.find("replace", "joint_dp").epsilon,
        "delta": experiment.delta,
        "noise_multiplier": experiment.noise_multiplier,
        "rounds_per_second": done / round_seconds,
        "compile_seconds": clock.compile_seconds,
    }
    if directory is not None:
        directory.write_state(state)
        directory.write_clients(_clients(simulation.population, history[-1].evaluation))
        directory.write_guarantee(report.to_json())
        from fedjaxsim.report import plots

        figure = plots.run_figure(strict(records), _figure_title(experiment))
        plots.save(figure, directory.path / "curves.png")
        directory.write_summary(summary)
    return strict(summary), report


def diverges(losses: Sequence[float | None]) -> bool:
    """Whether the last training loss is not finite, or ten times the lowest one.

    Accuracy can look healthy for long while a model grows without bound.
    """
    known = [loss for loss in losses if loss is not None]
    if not known:
        return False
    return not math.isfinite(known[-1]) or known[-1] > 10 * min(known)


def _train_loss(segment: Segment) -> float | None:
    """The mean of the local losses during the segment, every participation with equal weight."""
    weights = segment.metrics["participants"]
    losses = np.where(weights > 0, segment.metrics["loss"], 0.0)
    return float(losses @ weights / weights.sum()) if weights.sum() else None


def _epsilon(experiment: Experiment, state: SimulationState) -> float:
    """ε so far, zero-out and joint DP: that number of the report alone, the others take longer."""
    [(scheme, event, charged, _)] = ledger.charged(state.privacy)
    if not charged:
        return 0.0
    [entry] = charged  # z and p are constant here.
    return calibration.spent(*entry, experiment.delta, scheme, event)


def _clients(population: Population, evaluation: Evaluation) -> dict[str, np.ndarray]:
    """The columns of the table of clients, each (m,)."""
    return {
        "name": population.names,
        "train_rows": population.splits["train"].count,
        "test_rows": evaluation.count,
        **{f"test_{name}": values for name, values in evaluation.values.items()},
    }


def _figure_title(experiment: Experiment) -> str:
    config = experiment.config
    clients = f"{experiment.simulation.num_clients} clients"
    if config.algorithm == "local":
        privacy = "nothing released"
    elif experiment.noise_multiplier == 0:
        privacy = "no privacy"
    else:
        privacy = f"z = {number(experiment.noise_multiplier)}"
    return f"{experiment.title}, {clients}, {privacy}"


class _Clock:
    """Tells the time spent compiling from the time spent computing.

    Attributes:
      compile_seconds: tracing, lowering and compiling, while the clock runs.
    """

    def __init__(self):
        self.compile_seconds = 0.0
        self._last = 0.0, 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Listens to the compiler."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self.lap()
        try:
            yield self
        finally:
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def lap(self) -> float:
        """Seconds since the last lap, without those of compilation."""
        now = time.perf_counter(), self.compile_seconds
        seconds = (now[0] - self._last[0]) - (now[1] - self._last[1])
        self._last = now
        return max(seconds, 1e-9)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event.startswith("/jax/core/compile/"):
            self.compile_seconds += duration_secs
