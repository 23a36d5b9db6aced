"""One run, watched and kept: from a built experiment to its files."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import NamedTuple

import jax
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.processes import is_first
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.extras import missing
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.report.files import Record, strict
from fedjaxsim.report.loggers import open_logger
from fedjaxsim.report.progress import RunProgress, number
from fedjaxsim.runs.build import Experiment, versions
from fedjaxsim.runs.directory import CURVES, RunDirectory
from fedjaxsim.runs.loop import (
    Cadence,
    OneRun,
    advance,
    digest,
    diverged,
    epsilon,
    fingerprint_of,
    stopped_early,
)
from fedjaxsim.runs.memory import device_peak_bytes, peak_bytes, traffic
from fedjaxsim.runs.settings import RunConfig

_OF_SWEEPS = ("run", "epsilon_replace", "delta")
"""What a record of one run leaves out: it is the same in all of them, or in the summary."""


STOPPING = (
    "The guarantee covers the rounds done. It does not cover when to stop, which was chosen by "
    "reading validation rows of the run's own clients without noise."
)


class Executed(NamedTuple):
    """What came of a run.

    Attributes:
      summary: as `summary.json` holds it.
      report: its guarantee.
      state: after the last round.
    """

    summary: Record
    report: Report
    state: SimulationState


def execute(
    experiment: Experiment,
    directory: RunDirectory | None,
    stop: Event,
    *,
    quiet: bool = False,
    log: str | None = None,
    cadence: Cadence = Cadence(),  # noqa: B008 - it is frozen
    rounds: int | None = None,
    begin: SimulationState | None = None,
    earlier: Sequence[Record] = (),
) -> Executed:
    """Runs an experiment, watches it and writes its files; of several processes, the first does.

    Args:
      experiment: from `prepare`.
      directory: where the files go; None writes none. A run that it holds a checkpoint of goes on.
      stop: once it is set, the run ends after the segment in flight, with all files.
      quiet: no progress bar.
      log: the name of a logger, see `report/loggers.py`.
      cadence: when checkpoints are written.
      rounds: how many are done at the end; by default those of the settings.
      begin: the state before the first round, where this is a stage after others.
      earlier: the stages before, as `stage_of` describes them.
    """
    config, simulation, hparams = experiment.config, experiment.simulation, experiment.hparams
    rounds = config.rounds if rounds is None else rounds
    fingerprints = {} if directory is None else about(experiment)
    checkpoints = None if directory is None else directory.checkpoints(fingerprints)
    if not is_first():
        directory, log, quiet = None, None, True
    if directory is not None:
        tables = experiment.resolved()
        tables["resolved"] |= {"rounds": rounds, "data_fingerprint": fingerprints["data"]}
        if earlier:
            tables["stages"] = list(earlier)
        directory.write_config(tables)
    with contextlib.ExitStack() as watching:
        progress = watching.enter_context(RunProgress(experiment.title, rounds, quiet=quiet))
        logger = None
        if log is not None:
            path = None if directory is None else directory.path
            spent = functools.partial(_spent, experiment)
            found = open_logger(log, experiment.title, config.settings(), path, spent)
            logger = watching.enter_context(found)

        def on_start(rows: list[Record]) -> None:
            if directory is not None:
                directory.write_metrics(map(_own, rows))

        def on_rows(rows: list[Record], rounds_per_second: float | None) -> None:
            [record] = map(_own, rows)
            if directory is not None:
                directory.append_metrics(record)
            progress.update(strict(record), rounds_per_second)

        outcome = advance(
            OneRun(simulation, hparams),
            [experiment],
            rounds,
            stop=stop,
            begin=begin,
            checkpoints=checkpoints,
            cadence=cadence,
            extra={"versions": versions()},
            on_start=on_start,
            on_rows=on_rows,
            on_segment=logger,
        )
    report = simulation.guarantee(outcome.state, experiment.delta).resting_on(_chosen(config))
    if earlier:
        stages = describe(earlier, config.algorithm, outcome.round)
        report = report.resting_on(
            [
                *(sentence for stage in earlier for sentence in stage["public"]),
                f"The charges of all stages are composed: {stages}.",
            ]
        )
    records = [_own(row) for row in outcome.rows]
    last = dict(records[-1])
    done = last.pop("round")
    stopped = stopped_early(records, config.patience)
    summary = {
        "algorithm": config.algorithm,
        "data": config.data,
        "model": config.model,
        "clients": simulation.num_clients,
        "rounds": done,
        "rounds_planned": rounds,
        "interrupted": done < rounds and not stopped,
        "stopped_early": done < rounds and stopped,
        "diverging": list(diverged(records))[-1],
        **last,
        "epsilon_replace": _replacing(report),
        "delta": experiment.delta,
        "noise_multiplier": experiment.noise_multiplier,
        "rounds_per_second": done / outcome.seconds,
        "compile_seconds": outcome.compile_seconds,
        **traffic(simulation, hparams),
        "peak_bytes": peak_bytes(),
        "device_peak_bytes": device_peak_bytes(simulation.devices or jax.devices()[:1]),
    }
    if directory is not None:
        directory.write_clients(_clients(simulation.population, outcome.evaluation))
        directory.write_guarantee(report.to_json())
        if missing("plots") is None:
            from fedjaxsim.report import plots

            figure = plots.run_figure(strict(records), _figure_title(experiment))
            plots.save(figure, directory.path / CURVES)
        directory.write_summary(summary)
    return Executed(strict(summary), report, outcome.state)


def stage_of(experiment: Experiment, rounds: int, directory: Path | None) -> Record:
    """What the next stages keep of a run, as `config.toml` lists it.

    Args:
      experiment: the run.
      rounds: how many were done.
      directory: its own.

    Returns:
      `algorithm`, `rounds`, `public`, sentences that the guarantee of all stages rests on, and
      `directory`, where there is one.
    """
    return {
        **({} if directory is None else {"directory": str(directory)}),
        "algorithm": experiment.config.algorithm,
        "rounds": rounds,
        "public": [*experiment.simulation.public, *_chosen(experiment.config)],
    }


def _chosen(config: RunConfig) -> Sequence[str]:
    """What was chosen by reading the clients' data, which no ε covers."""
    return () if config.patience is None else (STOPPING,)


def _spent(experiment: Experiment, state: SimulationState) -> float | None:
    """ε so far."""
    charged = tuple(ledger.charged(state.privacy))
    return epsilon(charged, experiment.delta, accountant=experiment.simulation.accountant)


def spent_in_all(experiment: Experiment, begin: SimulationState) -> float:
    """The ε of a stage that is yet to run and of all before it; ∞ where nothing is promised.

    Args:
      experiment: the stage.
      begin: the state before its first round.
    """
    charged = (*ledger.charged(begin.privacy), experiment.planned())
    return epsilon(charged, experiment.delta, accountant=experiment.simulation.accountant)


def describe(earlier: Sequence[Record], algorithm: str, rounds: int) -> str:
    """All stages in words, as in `fedavg (100 rounds), then pmtl (50 rounds)`."""
    stages = [(stage["algorithm"], stage["rounds"]) for stage in earlier]
    return ", then ".join(f"{name} ({n} rounds)" for name, n in [*stages, (algorithm, rounds)])


def about(experiment: Experiment) -> Mapping[str, str]:
    """What a run's states follow from, as fingerprints."""
    return {
        "settings": digest(experiment.config.settings()),
        "data": fingerprint_of(experiment.simulation.population),
    }


def _replacing(report: Report) -> float | None:
    """ε for replacement; None where nothing is promised or the accountant knows none."""
    found = [g for g in report.guarantees if (g.adjacency, g.view) == ("replace", "joint_dp")]
    return found[0].epsilon if found else None


def _own(row: Record) -> Record:
    return {name: value for name, value in row.items() if name not in _OF_SWEEPS}


def _clients(population: Population, evaluation: Evaluation) -> dict[str, np.ndarray]:
    """The columns of the table of clients, each (m,)."""
    return {
        "name": population.names,
        "train_rows": population.splits["train"].count,
        "test_rows": population.splits["test"].count,
        **{f"test_{name}": values for name, values in evaluation.values.items()},
    }


def _figure_title(experiment: Experiment) -> str:
    config = experiment.config
    clients = f"{experiment.simulation.num_clients} clients"
    if not config.system.sends:
        privacy = "nothing released"
    elif experiment.noise_multiplier == 0:
        privacy = "no privacy"
    else:
        privacy = f"z = {number(experiment.noise_multiplier)}"
        if not config.spread.is_constant:
            privacy += f" on average, budget {config.spread}"
    return f"{experiment.title}, {clients}, {privacy}"
