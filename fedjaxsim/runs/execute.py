"""Execute one run, or a stage after another run: from a built experiment to its files."""

import collections
import contextlib
import functools
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjaxsim import callbacks, store
from fedjaxsim.audit.bounds import AuditResult, result
from fedjaxsim.data.population import Population
from fedjaxsim.divergence import DivergingWarning, Record, diverging_from
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.loop import PhaseTimes, Segment
from fedjaxsim.engine.processes import from_all, is_first
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.extras import missing
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.metrics import SAMPLED
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.guarantee import Report, tight_epsilon
from fedjaxsim.privacy.guarantee import report as guarantees_of
from fedjaxsim.report.files import strict, write_csv, write_json
from fedjaxsim.report.progress import doing, number
from fedjaxsim.runs.assemble import population_of, simulation_of
from fedjaxsim.runs.baseline import worse_than_constant
from fedjaxsim.runs.build import Experiment, prepare, versions
from fedjaxsim.runs.directory import (
    CHECKPOINTS,
    CLIENTS,
    CONFIG,
    CURVES,
    GUARANTEE,
    METRICS,
    SUMMARY,
    RunDirectory,
)
from fedjaxsim.runs.loggers import FOLDER as LOGS
from fedjaxsim.runs.loggers import Factory
from fedjaxsim.runs.memory import device_peak_bytes, peak_bytes, traffic
from fedjaxsim.runs.output import USUAL_OUTPUT, RunOutput
from fedjaxsim.runs.parts import run_user_code
from fedjaxsim.runs.public import PUBLIC, is_covered, write_public
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.signals import Stop
from fedjaxsim.simulation import Simulation

NO_LABELS: Mapping[str, Any] = MappingProxyType({})


class Stage(NamedTuple):
    """A run to execute.

    Attributes:
      directory: directory of its files; None writes none. A run with a checkpoint there resumes.
      rounds: rounds at the end; None for the settings'.
      begin: state before the first round, if this is a stage after others.
      earlier: the stages before, from `stage_of`.
      labels: the name and the tags that the user gives it.
      loggers: a dict of trackers' factories, for a run with a directory.
      warnings: sentences that the user should read before it runs.
    """

    experiment: Experiment
    directory: RunDirectory | None
    rounds: int | None = None
    begin: SimulationState | None = None
    earlier: Sequence[Record] = ()
    labels: Mapping[str, Any] = NO_LABELS
    loggers: Mapping[str, Factory] = NO_LABELS
    warnings: Sequence[str] = ()

    @property
    def path(self) -> Path | None:
        """Path of the directory."""
        return None if self.directory is None else self.directory.path


class Executed(NamedTuple):
    """Results of a run: content of `summary.json`, guarantee, last state, the audit inside it."""

    summary: Record
    report: Report
    state: SimulationState
    audit: AuditResult | None = None


def execute(stage: Stage, stop: Stop, output: RunOutput = USUAL_OUTPUT) -> Executed:
    """Run an experiment, and write its files from the first of several processes.

    Setting `stop` ends the run after the segment in flight, with all files.
    """
    experiment, directory, rounds, begin, earlier, labels, *_ = stage
    config, simulation, hparams = experiment.config, experiment.simulation, experiment.hparams
    rounds = config.rounds if rounds is None else rounds
    state = experiment.init() if begin is None else begin
    state = state.announce(sentences=config.public)
    quiet, every, profile = output.quiet, output.checkpoint_every, output.profile
    recorded, patience, watching = _watching(stage, quiet=quiet)
    if directory is not None:
        remembering = [recorded] if patience is None else [patience, recorded]
        folder, note = directory.checkpoints(experiment.fingerprints), {"versions": versions()}
        checkpoints = callbacks.Checkpoints(folder, remembering, every=every, note=note)
        watching.append(checkpoints)
        state = checkpoints.restore(state)
        if is_first():
            tables = experiment.resolved()
            tables["resolved"] |= {"rounds": rounds, **experiment.origin}
            tables |= {"stages": list(earlier)} if earlier else {}
            directory.write_config(tables | ({"known_as": dict(labels)} if labels else {}))
        if begin is not None and int(state.round) == 0:
            checkpoints.save(state)
        if is_first():
            watching += logs_of(stage.loggers, config, directory.path)
    history: Sequence[Segment] = ()
    first, phase_times = int(state.round), PhaseTimes()
    if first < rounds:
        traced = contextlib.nullcontext() if profile is None else jax.profiler.trace(str(profile))
        with traced, warnings.catch_warnings(action="ignore", category=DivergingWarning):
            state, history = simulation.run(
                state,
                hparams,
                rounds - first,
                eval_every=config.eval_every,
                callbacks=[*watching, callbacks.StopOnInterrupt(stop)],
                delta=experiment.delta,
                keep=1,
                evaluate_privately=experiment.evaluations,
                eval_clients=config.sample,
            )
        phase_times = recorded.run.phase_times
    else:
        recorded.start(state)  # the file may hold evaluations after the checkpoint
    evaluation = history[-1].evaluation if history else simulation.evaluate(state, hparams)
    with doing("computing the guarantee", quiet=quiet or not is_first()):
        report = _report_of_stages(experiment, state, rounds, recorded.released, earlier)
    audit = None if config.audit_canaries is None else result([state], report)
    if audit is not None:
        report = report.assuming([f"{audit}."])
    rows = recorded.rows if is_first() else []
    last = from_all(_last_record(rows) if rows else None)[0]
    for name in ("round", "epsilon_tight"):
        last.pop(name)
    if last.pop(SAMPLED, None) is not None:
        last |= _of_all(simulation, state, hparams, evaluation, last)
    out_of_patience = patience is not None and patience.exhausted
    # Before the last look at `stop`, so that no signal between them ends the writing.
    stop.is_writing = True
    summary = {
        **_progress(experiment, state, rounds, out_of_patience, any(from_all(stop.is_set()))),
        **last,
        **report.epsilons(),
        "delta": experiment.delta,
        "noise_multiplier": experiment.noise_multiplier,
        "rounds_per_second": (int(state.round) - first) / max(phase_times.seconds["rounds"], 1e-9),
        "load_seconds": experiment.load_seconds,
        "worse_than_constant": worse_than_constant(simulation.population, last),
        **traffic(simulation, hparams),
        "peak_bytes": peak_bytes(),
        "device_peak_bytes": device_peak_bytes(simulation.devices or jax.devices()[:1]),
    }
    if audit is not None:
        summary |= {"audit_epsilon": audit.epsilon, "audit_refuted": audit.refuted}
    files = directory if is_first() else None
    what = f"writing results of {simulation.num_clients:,} clients"
    with phase_times.phase("write"), doing(what, quiet=quiet or files is None):
        if files is not None:
            if not output.no_client_table:
                columns = _clients(simulation.population, evaluation, report)
                write_csv(files.path / CLIENTS, columns)
            write_json(files.path / GUARANTEE, report.to_json())
            if is_covered(report):
                publish(files, files.path / PUBLIC, state, report)
            if missing("plots") is None:
                from fedjaxsim.report import figures, plots

                z = experiment.noise_multiplier
                noise = f"z = {number(z)}" if z else "no noise"
                title = f"{experiment.title}, {simulation.num_clients} clients, {noise}"
                shown, axis = (strict(rows), title, experiment.metrics), output.axis
                picture = figures.run_figure(*shown, axis, experiment.per_round(axis))
                plots.save(picture, files.path / f"{CURVES}.{output.format}")
    summary |= {f"{phase}_seconds": value for phase, value in phase_times.seconds.items()}
    if files is not None:
        write_json(files.path / SUMMARY, summary)  # after all other files
    return Executed(strict(summary), report, state, audit)


def logs_of(
    loggers: Mapping[str, Factory], config: RunConfig, path: Path, **more: Any
) -> list[callbacks.Log]:
    """Return what forwards records to loggers, with settings and `more`; a secret seed stays here.

    `path` is the folder of what they keep.
    """
    settings = config.settings() | more
    if config.has_secret_seed:
        settings = {name: value for name, value in settings.items() if "seed" not in name}
    made = []
    for name, factory in loggers.items():
        write = run_user_code(f"logger {name}", functools.partial(factory, settings, path))
        made.append(callbacks.Log(write, _steps(path, name)))
    return made


def log_finished(
    loggers: Mapping[str, Factory], config: RunConfig, path: Path, records: Sequence[Record]
) -> None:
    """Forward the records of a finished run, each once; a logger that cannot begin is warned of."""
    for name, factory in unlogged(loggers, path, records[-1]["round"]).items():
        store.make_folder(path)
        try:
            [log] = logs_of({name: factory}, config, path)
        except ValueError as error:
            warnings.warn(f"{error}: nothing is logged", stacklevel=2)
            continue
        with contextlib.ExitStack() as closing:
            log.open(closing)
            for record in records:
                log.add(record)


def unlogged(loggers: Mapping[str, Factory], path: Path, end: int) -> dict[str, Factory]:
    """Return the loggers that have not written the last step, which is `end`."""
    return {
        name: factory
        for name, factory in loggers.items()
        if callbacks.last_step(_steps(path, name)) < end
    }


def _steps(path: Path, logger: str) -> Path:
    """Return the file with the last step that a logger wrote."""
    return path / LOGS / f"{logger.replace(':', '.')}.step"


def _watching(
    stage: Stage, *, quiet: bool
) -> tuple[callbacks.Records | callbacks.MetricsFile, callbacks.Patience | None, list[Any]]:
    """Return the record of a run, its patience, and all callbacks but the checkpoints."""
    experiment, path = stage.experiment, stage.path
    config, released = experiment.config, experiment.evaluations is not None
    recorded = callbacks.Records() if path is None else callbacks.MetricsFile(path / METRICS)
    if isinstance(recorded, callbacks.MetricsFile):
        recorded.keep_lines()
    patience = None
    if config.patience is not None:
        patience = callbacks.Patience(config.patience, released=released)
    watching: list[Any] = [recorded] if patience is None else [patience, recorded]
    validated = experiment.simulation.population.has("validation")
    if validated and patience is None and not released:
        watching.insert(0, callbacks.Validation())
    watching.append(callbacks.Progress(experiment.title, quiet=quiet))
    return recorded, patience, watching


def _progress(
    experiment: Experiment, state: SimulationState, planned: int, patient: bool, stopped: bool
) -> Record:
    """Return what a run is, and how far it came."""
    config, done = experiment.config, int(state.round)
    ended = "" if done >= planned else "patience" if patient else "stop"
    if ended == "stop" and state.privacy.limit is not None and not stopped:
        ended = "budget"
    return {
        "algorithm": config.algorithm,
        "data": config.data,
        "model": config.model,
        "clients": experiment.simulation.num_clients,
        "rounds": done,
        "rounds_planned": planned,
        "interrupted": ended == "stop",
        "stopped_early": ended == "patience",
        "budget_spent": ended == "budget",
    }


def _last_record(rows: Sequence[Record]) -> Record:
    """Return the last record, with what all of them say of divergence, messages and samples."""
    nonfinite = sum(row.get("nonfinite", 0) for row in rows)
    sampled = max(row.get(SAMPLED, 0) for row in rows)
    record = {"diverging": diverging_from(rows), "progress_sample": sampled, **rows[-1]}
    return {**record, "nonfinite": nonfinite}


def _of_all(
    simulation: Simulation,
    state: SimulationState,
    hparams: Hyperparameters,
    evaluation: Evaluation,
    last: Record,
) -> Record:
    """Return the metrics of all clients in place of a sample's, for a run that stopped early."""
    summary = dict(evaluation.summary())
    if any(name.startswith("validation_") for name in last):
        summary |= simulation.evaluate(state, hparams, "validation").summary()
    return {name: np.asarray(value).item() for name, value in summary.items() if name in last}


def spent_in_all(
    experiment: Experiment, begin: SimulationState | None = None, rounds: int | None = None
) -> float:
    """Return the ε of all stages up to a run of some rounds; inf without a guarantee."""
    before = [*experiment.simulation.prepared]
    if begin is not None:
        before = ledger.charged(experiment.simulation.announce(begin).privacy)
    return tight_epsilon([*before, experiment.planned(end=rounds)], experiment.delta)


def describe_stages(earlier: Sequence[Record], algorithm: str, rounds: int) -> str:
    """Describe all stages, as in `fedavg (100 rounds), then pmtl (50 rounds)`."""
    stages = [(stage["algorithm"], stage["rounds"]) for stage in earlier]
    return ", then ".join(f"{name} ({n} rounds)" for name, n in [*stages, (algorithm, rounds)])


def _report_of_stages(
    experiment: Experiment,
    state: SimulationState,
    planned: int,
    released: int,
    earlier: Sequence[Record],
) -> Report:
    """Compute the guarantees of a run and of the stages before it; see `_guarantee`."""
    report, config = _guarantee(experiment, state, planned, released), experiment.config
    if config.hides_noise and all(stage.get("secret_seed") for stage in earlier):
        report = report.of_secret_seed()
    if not earlier:
        return report
    stages = describe_stages(earlier, config.algorithm, int(state.round))
    return report.assuming([f"The charges of all stages are composed: {stages}."])


def publish(run: RunDirectory, path: Path, state: SimulationState, report: Report) -> None:
    """Write the part of a run that its guarantee covers to `path`."""
    write_public(path, state.shared, report, run.config(), run.metrics())


def exportable(path: Path) -> tuple[SimulationState, Report]:
    """Return the last state of the run in a directory, and the guarantee that covers a reader.

    Raises:
      ValueError: if none does.
    """
    run, last = RunDirectory(path), trained(path)
    tables = run.config()
    planned, earlier = tables["resolved"]["rounds"], tables.get("stages", [])
    report = _report_of_stages(last.experiment, last.state, planned, run.released(), earlier)
    if not is_covered(report):
        raise ValueError(f"nothing of {path} may be handed on: {report.short()}")
    return last.state, report


def _guarantee(
    experiment: Experiment, state: SimulationState, planned: int, released: int
) -> Report:
    """Compute the guarantees of a state, and of later rounds that are on record as released.

    A run that was killed has released more rounds than its checkpoint, until they are done again.
    """
    simulation, done = experiment.simulation, int(state.round)
    later = ()
    if experiment.evaluations is not None and done < planned:
        # At most one release after each multiple of `eval_every`, and one at the end.
        most = (planned - done) // experiment.config.eval_every + 2
        later = (experiment.evaluations.spend(simulation.num_clients, most),)
    report = simulation.guarantee(state, experiment.delta, planned=planned, later=later)
    if released <= done:
        return report
    more, privacy = experiment.planned(done, released), simulation.announce(state).privacy
    if any(event.releases for _, event in simulation.accounts):
        privacy = ledger.drew(privacy, state.key, released - 1)
    charges = ledger.charged(privacy)
    # Earlier stages may have an account of the same kind, whose rounds come in their own order.
    place = max(number for number, charge in enumerate(charges) if charge[:2] == more[:2])
    counts = collections.Counter[tuple[float, float]]()
    for z, p, rounds in (*charges[place].entries, *more.entries):
        counts[z, p] += rounds
    together = tuple(Entry(*z_and_p, rounds) for z_and_p, rounds in counts.items())
    charges[place] = charges[place]._replace(entries=together)
    if experiment.evaluations is not None:
        most = (released - done) // experiment.config.eval_every + 2
        charges.append(experiment.evaluations.spend(simulation.num_clients, most))
    report_of_released = guarantees_of(
        charges, experiment.delta, draws=ledger.drawn(privacy),
        assumed=report.assumed, limit=privacy.limit, left=max(released, planned) - done,
        later=later,
    )  # fmt: skip
    return report_of_released.assuming(
        [f"Rounds {done + 1} to {released} were released before an interruption, and are charged."]
    )


def _clients(
    population: Population, evaluation: Evaluation, report: Report
) -> dict[str, np.ndarray]:
    """Make the columns of the table of clients, each (m,)."""
    example_costs = report.examples
    examples = {} if example_costs is None else {
        "example_epsilon": example_costs.zero_out,
        "example_epsilon_replace": example_costs.replace,
        "example_delta": example_costs.delta,
    }  # fmt: skip
    return {
        "name": population.names,
        "train_rows": population.splits["train"].count,
        "test_rows": population.splits["test"].count,
        **{f"test_{name}": values for name, values in evaluation.values.items()},
        **examples,
    }


# --- stages ---------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """A run and its last state; `skipped` says whether a later checkpoint is damaged."""

    experiment: Experiment
    state: SimulationState
    round: int
    skipped: bool


def trained(path: Path, population: Population | None = None) -> Trained:
    """Read the last state of the run in a directory; by default, load its data."""
    directory, config = RunDirectory(path), read_toml(path / CONFIG)
    population = population_of(config) if population is None else population
    experiment = prepare(config, simulation_of(config, population))
    last = directory.checkpoints(experiment.fingerprints).last()
    if last is None:
        raise directory.missing(CHECKPOINTS)
    state = last.state(experiment.init())
    return Trained(experiment, state, last.round, bool(last.skipped))


def start_from(path: Path, experiment: Experiment) -> tuple[SimulationState, list[Record]]:
    """Return the state that begins a stage after the run in a directory, and the earlier stages.

    With the same algorithm and shapes the state is taken as it is, unless the algorithm starts from
    published models. Otherwise clients start from the models that they predicted with; see
    `Simulation.start_from`.
    """
    directory = RunDirectory(path)
    tables, config = directory.config(), read_toml(path / CONFIG)
    used, population = experiment.config.clients_used, experiment.simulation.population
    of_new_clients, grown = (
        (config.clients_used, used) == ("kept", of) for of in ("held-out", "all")
    )
    if grown:
        population = population_of(experiment.config.replace(clients_used="kept"))
    here = population.fingerprint
    if not of_new_clients and tables.get("resolved", {}).get("data_fingerprint", here) != here:
        raise ValueError(
            f"{path} ran on other data: a stage has the same data, clients and partition-seed, so "
            "leave out these settings, or run without --from"
        )
    last = trained(path, None if of_new_clients else population)
    before, state = last.experiment, last.state
    simulation, hparams = experiment.simulation, experiment.hparams
    if last.skipped or directory.released() > last.round:
        # A stage from an older state would not be charged for the rounds since.
        least = max(directory.released(), last.round)
        raise ValueError(
            f"{path} released {least} rounds, and its last whole checkpoint is of round "
            f"{last.round}: first run fedjaxsim resume {shlex.quote(str(path))} --rounds {least}"
        )
    if of_new_clients:
        earlier, later = (stage.simulation.population.names for stage in (before, experiment))
        if np.isin(later, earlier).any():
            raise ValueError(
                "held-out clients of the stage took part in the run before: data, "
                "partition-seed and held-out-clients must be as there"
            )
        state = simulation.start_new_clients(state, hparams, before.simulation)
    elif (
        config.algorithm == experiment.config.algorithm
        and not grown
        and not simulation.algorithm.warm_start.required
        and _shapes(before) == _shapes(experiment)
    ):
        state = simulation.start_from(state, hparams)
    else:
        state = simulation.start_from(state, hparams, before.simulation, before.hparams)
    state = experiment.with_budget(state)
    if experiment.config.has_secret_seed and not config.has_secret_seed:
        raise ValueError(
            f"seed secret needs a first run with it: the noise of a stage follows from {path}"
        )
    stage = {
        "directory": str(path),
        "algorithm": config.algorithm,
        "rounds": last.round,
        "secret_seed": config.has_secret_seed,
    }
    return state, [*tables.get("stages", []), stage]


def _shapes(experiment: Experiment) -> Any:
    state = experiment.state_shapes
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state.shared, state.personal))
