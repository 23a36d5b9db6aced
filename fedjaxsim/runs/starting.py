"""Runs that begin, or go on in their folder: all input is checked before anything is computed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fedjaxsim import store
from fedjaxsim.data.readers import DataSpec
from fedjaxsim.engine import processes
from fedjaxsim.engine.checkpoint import require_x64
from fedjaxsim.factories import flag
from fedjaxsim.privacy.entries import MOST_ROUNDS, epsilon_text
from fedjaxsim.report.files import check_place
from fedjaxsim.runs.assemble import data_warnings, population_of
from fedjaxsim.runs.build import Experiment, check_user_code, prepare_with_progress, versions
from fedjaxsim.runs.directory import (
    CONFIG,
    OTHER_DATA,
    RunDirectory,
    other_results,
    settings_digest,
)
from fedjaxsim.runs.execute import (
    NO_LABELS,
    Stage,
    spent_in_all,
    start_from,
)
from fedjaxsim.runs.loggers import Factory, find_loggers
from fedjaxsim.runs.output import USUAL_OUTPUT, RunOutput
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import read_toml

_SAME_NOISE = "and would draw the same noise again"
_ANEW = "begin anew with another seed and --out"


def prepare_run(
    config: RunConfig,
    out: Path | None,
    start: Path | None = None,
    output: RunOutput = USUAL_OUTPUT,
    *,
    overwrite: bool = False,
    labels: Mapping[str, Any] = NO_LABELS,
) -> Stage | RunDirectory:
    """Check all input of a run, or of a stage after that in `start`.

    The run in `out` goes on if it is the same; a finished one is returned as its directory.
    """
    if start is not None:
        if config.audit_canaries is not None:
            raise ValueError("audit-canaries is for one run, not for several stages: leave it out")
        if out is not None and out.resolve() == start.resolve():
            raise ValueError(f"out must be another directory than from, got {out} for both")
        delta = RunDirectory(start).config().get("resolved", {}).get("delta")
        if config.clients_used == "held-out" and delta and config.get("delta") is None:
            config = config.replace(delta=delta)  # that of the number of new clients is another
    if out is not None and (out / CONFIG).is_file() and not overwrite:
        _check_same(config, out, start)
        directory = RunDirectory(out)
        if processes.is_first():
            directory.label(labels)
        if directory.is_finished():
            _check_same_rows(config, directory)
            return directory
        return prepare_resume(out, None, output)
    factories = _find_loggers(output.logger, out)
    if out is not None:
        check_place(out, "run")
    experiment = prepare_with_progress(config, quiet=output.quiet)
    check_user_code(experiment)
    _agree(experiment, None if start is None else RunDirectory(start), out=out is not None)
    begin, earlier = None, []
    if start is not None:
        begin, earlier = start_from(start, experiment)
    elif experiment.simulation.algorithm.warm_start.required:
        raise ValueError(f"algorithm {config.algorithm} starts from another run: give --from DIR")
    directory = None
    if out is not None:
        directory = RunDirectory.create(out, overwrite=overwrite)
    _agree_on_files(directory)
    warnings = [*data_warnings(config, experiment.simulation.population)]
    if begin is not None and begin.privacy.limit is None:
        spent = spent_in_all(experiment, begin)
        warnings += warn_above(config.target_epsilon, spent, "this and earlier stages will spend")
    run = experiment, directory, config.rounds, begin, earlier
    return Stage(*run, labels, factories, warnings)


def _find_loggers(names: Sequence[str], out: Path | None) -> dict[str, Factory]:
    """Return a dict of loggers' factories."""
    if names and out is None:
        raise ValueError("logger needs out, the directory that keeps what was logged")
    return find_loggers(names)


def _check_same(config: RunConfig, out: Path, start: Path | None) -> None:
    """Check that the run in a directory is the one that is asked for: then it goes on."""
    saved, stages = read_toml(out / CONFIG), RunDirectory(out).config().get("stages", [])
    theirs, ours = saved.settings(), config.settings()
    if saved.has_secret_seed and config.has_secret_seed:  # drawn for this command
        ours["seed"] = theirs["seed"]
    theirs["from"] = stages[-1]["directory"] if stages else None
    ours["from"] = None if start is None else str(start)
    if theirs != ours:
        raise other_results(out, "run", theirs, ours)


def _check_same_rows(config: RunConfig, finished: RunDirectory) -> None:
    """Check that a run was on the rows that its file, or the user's reader, has now."""
    spec, made = DataSpec(config.data), finished.config().get("resolved", {})
    is_there = spec.is_user_code or (spec.file is not None and spec.file.exists())
    if not is_there or "data_fingerprint" not in made or config.audit_canaries is not None:
        return
    if population_of(config).fingerprint != made["data_fingerprint"]:
        raise other_results(finished.path, "run", {}, {}, OTHER_DATA)


def prepare_resume(
    path: Path, rounds: int | None = None, output: RunOutput = USUAL_OUTPUT
) -> Stage:
    """Check that a run can resume, to a total of `rounds`."""
    directory, factories = RunDirectory(path), _find_loggers(output.logger, path)
    tables = directory.config()
    if processes.is_first():
        store.lock_folder(path)
    resolved, earlier = tables.get("resolved", {}), tables.get("stages", [])
    require_x64(resolved.get("x64"), path)
    config = read_toml(path / CONFIG)
    experiment = prepare_with_progress(config, quiet=output.quiet)
    _agree(experiment, directory, rounds=rounds)
    facts, code = experiment.fingerprints, experiment.code_fingerprint
    last = directory.checkpoints(facts).last()
    for what, digest in facts.items() if last is None else ():
        if resolved.get(f"{what}_fingerprint", digest) != digest:
            raise ValueError(f"{path} began with other {what}, {_SAME_NOISE}: {_ANEW}")
    if earlier and last is None:
        raise ValueError(f"{path} has no checkpoint: run the first command again with --overwrite")
    done = 0 if last is None else last.round
    released = max(done, directory.released())
    is_other_code = resolved.get("code_fingerprint", code) != code
    if released > done and is_other_code:
        other = f"released round {released} with other code of yours"
        raise ValueError(f"{path} {other}, {_SAME_NOISE}: restore it, or {_ANEW}")
    if rounds is not None and not max(released, 1) <= rounds <= MOST_ROUNDS:
        limits = f"at least the {released} that are done, and at most {MOST_ROUNDS}"
        raise ValueError(f"rounds must be {limits}, got {rounds}")
    planned: int = resolved.get("rounds") or config.rounds
    total = rounds or planned
    at_end = released > done and released % config.eval_every
    if experiment.evaluations is not None and at_end and total != planned:
        raise ValueError(
            f"{path} released an evaluation of round {released} and has no checkpoint of it: "
            "resume without --rounds first, so that it is charged"
        )
    if directory.is_finished():
        summary = directory.summary()
        if summary.get("stopped_early"):
            why = f"ran out of patience after {done} rounds: continue it with run --from"
            raise ValueError(f"{path} {why}")
        if summary.get("budget_spent"):
            raise ValueError(f"{path} spent its budget in {done} rounds: nothing is left to resume")
        if total == done:
            raise ValueError(f"{path} has done its {done} rounds: extend it with --rounds N in all")
    if total > config.rounds:
        schedule = config.get("schedule")
        why = ""
        if schedule != "constant":
            why = f"schedule {schedule}, as its learning rate is 0 then"
        elif not config.noise_schedule.is_constant:
            why = f"noise-schedule {config.noise_schedule}, or add a stage by run --from"
        if why:
            raise ValueError(f"rounds must be at most {config.rounds} with {why}, got {total}")
    simulation = experiment.simulation
    simulation.check_rounds(experiment.hparams, 0, total, config.eval_every)
    warnings = []
    if done and is_other_code:
        warnings.append(f"the first {done} rounds are of other code of yours")
    if total > config.rounds and config.get("budget_epsilon") is None:
        more = spent_in_all(experiment, rounds=total)
        warnings += warn_above(config.target_epsilon, more, f"{total} rounds will spend")
    if last is None:
        warnings.append(f"{path} has no checkpoint: the run begins anew")
    here, there = versions(), {} if last is None else last.note["versions"]
    if last is not None and there != here:
        other = ", ".join(f"{k} {v}" for k, v in there.items() if here.get(k) != v)
        warnings.append(
            f"{last.file} was written with {other}: numbers may differ in their last digits"
        )
    labels = tables.get("known_as", {})
    return Stage(experiment, directory, total, None, earlier, labels, factories, warnings)


def warn_above(asked: float, spent: float, who: str) -> list[str]:
    """Return the warning that `who` more ε than was asked, if so."""
    return [f"{who} ε {epsilon_text(spent)}, more than the {epsilon_text(asked)} asked"] * (
        spent > asked
    )


def _agree(experiment: Experiment, start: RunDirectory | None = None, **flags: object) -> None:
    """Check that all processes do the same run from the same checkpoint."""
    if not processes.several():
        return
    last = None if start is None else start.checkpoints().last()
    parts = {
        **{flag(name): value for name, value in experiment.config.settings().items()},
        "versions": versions(),
        "number of devices": jax.local_device_count(),
        "checkpoint": last and last.round,
        **flags,
    }
    facts = {name: settings_digest(value) for name, value in parts.items()}
    facts |= experiment.simulation.facts(experiment.hparams)
    processes.agree({**facts, "clients' rows": experiment.simulation.population.fingerprint})


def _agree_on_files(directory: RunDirectory | None) -> None:
    """Check that all processes see the files that the first has made."""
    if directory is not None and processes.several():
        processes.agree({})
        last = directory.checkpoints().last()
        processes.agree({f"checkpoints in {directory.path}": str(last and last.round)})
