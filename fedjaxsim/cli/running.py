"""The work of `fedjaxsim run` and `fedjaxsim resume`."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjaxsim import store
from fedjaxsim.cli.compare import print_comparison
from fedjaxsim.cli.flags import Work
from fedjaxsim.cli.machines import Course
from fedjaxsim.cli.messages import say
from fedjaxsim.cli.process import checked, stoppable
from fedjaxsim.data.describe import clipped_in_words
from fedjaxsim.data.transforms import clipped_shares
from fedjaxsim.divergence import DIVERGES, NOT_FINITE
from fedjaxsim.engine import processes
from fedjaxsim.factories import flag
from fedjaxsim.privacy.assumptions import NO_RELEASE, STOPPING
from fedjaxsim.privacy.entries import MOST_ROUNDS, epsilon_text
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.report.labels import short_name
from fedjaxsim.report.progress import number, print_guarantee, warn_if_no_matplotlib
from fedjaxsim.report.results import print_table
from fedjaxsim.runs.assemble import data_warnings
from fedjaxsim.runs.baseline import worse_than_constant
from fedjaxsim.runs.build import Experiment, check_own_code, versions
from fedjaxsim.runs.comparison import compare
from fedjaxsim.runs.directory import (
    CONFIG,
    GUARANTEE,
    RunDirectory,
    fingerprint_of,
    read_run,
    settings_digest,
)
from fedjaxsim.runs.execute import (
    FIXED,
    NO_LABELS,
    Executed,
    Stage,
    about,
    code_of,
    describe_stages,
    execute,
    spent_in_all,
    start_from,
)
from fedjaxsim.runs.loggers import find_logger
from fedjaxsim.runs.public import PUBLIC
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.signals import stopped

RESUME = "fedjaxsim resume"
_MORE_STEPS = "try more --rounds, another --learning-rate, or ranges of columns (--range)"
_SAME_NOISE = "and would draw the same noise again"
_ANEW = "begin anew with another seed and --out"


def prepare_run(
    config: RunConfig,
    out: Path | None,
    start: Path | None,
    course: Course,
    overwrite: bool,
    labels: Mapping[str, Any] = NO_LABELS,
) -> Work:
    """Check all input of a run, or of a stage after that in `start`; return the work."""
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
            return lambda: _show(directory, course)
        return prepare_resume(out, None, course)
    experiment = checked(config, quiet=course.quiet)
    check_own_code(experiment)
    _agree(experiment, None if start is None else RunDirectory(start), out=out is not None)
    begin, earlier = None, []
    if start is not None:
        begin, earlier = start_from(start, experiment)
    elif experiment.simulation.algorithm.warm_start.required:
        raise ValueError(f"algorithm {config.algorithm} starts from another run: give --from DIR")
    directory = None
    _check_loggers(course, out)
    if out is not None:
        directory = RunDirectory.create(out, overwrite=overwrite)
    _agree_on_files(directory)
    stage = Stage(experiment, directory, config.rounds, begin, earlier, labels)
    doubted = data_warnings(config, experiment.simulation.population)

    def work() -> int:
        for doubt in doubted:
            _warn(doubt)
        if begin is not None and begin.privacy.limit is None:
            spent = spent_in_all(experiment, begin)
            _warn_above(config.target_epsilon, spent, "this and earlier stages will spend")
        return _run(stage, course)

    return work


def _check_loggers(course: Course, out: Path | None) -> None:
    """Check that the loggers can be made."""
    if course.logger and out is None:
        raise ValueError("logger needs out, the directory that keeps what was logged")
    for name in course.logger:
        find_logger(name)


def prepare_seeds(
    config: RunConfig,
    out: Path,
    seeds: int,
    course: Course,
    labels: Mapping[str, Any],
    *,
    overwrite: bool,
) -> Work:
    """Check the input of runs with seeds from that of `config` on; return the work."""
    if config.has_secret_seed:
        raise ValueError("seeds and seed secret exclude each other")
    runs = {
        out / f"seed-{seed}": config.replace(seed=seed)
        for seed in range(config.seed, config.seed + seeds)
    }
    (path, first), *others = runs.items()
    begin = prepare_run(first, path, None, course, overwrite, labels)

    def work() -> int:
        code = begin()
        for path, run in others:
            code = code or prepare_run(run, path, None, course, overwrite, labels)()
        if not code:
            print_comparison(compare(runs))
        return code

    return work


def _check_same(config: RunConfig, out: Path, start: Path | None) -> None:
    """Check that the run in a directory is the one that is asked for: then it goes on."""
    saved, stages = read_toml(out / CONFIG), RunDirectory(out).config().get("stages", [])
    theirs, ours = saved.settings(), config.settings()
    if saved.has_secret_seed and config.has_secret_seed:  # drawn for this command
        ours["seed"] = theirs["seed"]
    theirs["from"] = stages[-1]["directory"] if stages else None
    ours["from"] = None if start is None else str(start)
    other = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if other:
        known = ", ".join(
            f"{flag(name)} {theirs.get(name)} there and {ours.get(name)} here" for name in other[:3]
        )
        more = f", and {len(other) - 3} others" if len(other) > 3 else ""
        raise ValueError(
            f"{out} already holds a run with other settings ({known}{more}): choose another "
            "directory or say --overwrite"
        )


def _show(directory: RunDirectory, course: Course) -> int:
    """Print the results of a finished run again."""
    run = read_run(directory.path.name, directory)
    print_table([{"run": run.name, **run.summary}], metrics=run.metrics)
    print_guarantee(directory.report(), directory.path / GUARANTEE, explain=course.explain)
    done = f"the run in {directory.path} is finished"
    print(f"{done}: resume --rounds N extends it, and --overwrite runs it again")
    return 0


def prepare_resume(path: Path, rounds: int | None, course: Course) -> Work:
    """Check that a run can resume, to a total of `rounds`; return the work."""
    directory = RunDirectory(path)
    _check_loggers(course, path)
    tables = directory.config()
    if processes.is_first():
        store.hold(path)
    resolved, earlier = tables.get("resolved", {}), tables.get("stages", [])
    config = read_toml(path / CONFIG)
    experiment = checked(config, quiet=course.quiet)
    _agree(experiment, directory, rounds=rounds)
    facts, code = about(experiment), code_of(experiment)
    last = directory.checkpoints(facts).last()
    for what in FIXED if last is None else ():
        if resolved.get(f"{what}_fingerprint", facts[what]) != facts[what]:
            raise ValueError(f"{path} began with other {what}, {_SAME_NOISE}: {_ANEW}")
    if earlier and last is None:
        raise ValueError(f"{path} has no checkpoint: run the first command again with --overwrite")
    done = 0 if last is None else last.round
    released = max(done, directory.released())
    if released > done and resolved.get("code_fingerprint", code) != code:
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
        schedule = config.get("schedule", "constant")
        why = ""
        if schedule != "constant":
            why = f"schedule {schedule}, as its learning rate is 0 then"
        elif not config.noise_schedule.is_constant:
            why = f"noise_schedule {config.noise_schedule}, or add a stage by run --from"
        if why:
            raise ValueError(f"rounds must be at most {config.rounds} with {why}, got {total}")
    simulation = experiment.simulation
    simulation.check_rounds(experiment.hparams, 0, total, config.eval_every)
    labels = tables.get("known_as", {})
    stage = Stage(experiment, directory, total, earlier=earlier, labels=labels)

    def work() -> int:
        if total > config.rounds and config.get("budget_epsilon") is None:
            more = spent_in_all(experiment, rounds=total)
            _warn_above(config.target_epsilon, more, f"{total} rounds will spend")
        if last is None:
            _warn(f"{path} has no checkpoint: the run begins anew")
        here, there = versions(), {} if last is None else last.note["versions"]
        if last is not None and there != here:
            other = ", ".join(f"{k} {v}" for k, v in there.items() if here.get(k) != v)
            _warn(f"{last.file} was written with {other}: numbers may differ in their last digits")
        return _run(stage, course)

    return work


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
    processes.agree({**facts, "clients' rows": fingerprint_of(experiment.simulation.population)})


def _agree_on_files(directory: RunDirectory | None) -> None:
    """Check that all processes see the files that the first has made."""
    if directory is not None and processes.several():
        processes.agree({})
        last = directory.checkpoints().last()
        processes.agree({f"checkpoints in {directory.path}": str(last and last.round)})


def _run(stage: Stage, course: Course) -> int:
    """Do a run and return the exit code."""
    path = stage.path
    if path is not None and processes.is_first():
        warn_if_no_matplotlib()

    def kept() -> str:
        if path is None:
            return "no round is kept: the same command runs it again"
        rounds = RunDirectory(path).checkpoints().rounds()
        again = f"{RESUME} {shlex.quote(str(path))}"
        if not rounds:
            return f"no round is kept; {again} runs it again"
        return f"round {rounds[-1]} is kept; {again} continues"

    with stoppable(kept) as stop:
        how: dict[str, Any] = {
            "quiet": course.quiet, "client_table": not course.no_client_table,
            "loggers": {name: find_logger(name) for name in course.logger},
            "profile": course.profile, "picture_format": course.format,
        }  # fmt: skip
        done = execute(stage, stop, checkpoint_every=course.checkpoint_every, **how)
    print_results(stage, done, explain=course.explain)
    if path is not None:
        print(_where(path, stage.experiment.config, done.report))
    if not done.summary["interrupted"]:
        return 0
    name, code = stopped(processes.from_all(stop.number))
    said = f"stopped by {name} after {done.summary['rounds']} rounds"
    if path is not None:
        said += f"; to resume: {RESUME} {shlex.quote(str(path))}"
    print(said, file=sys.stderr)
    return code


def _where(path: Path, config: RunConfig, report: Report) -> str:
    """Return where the files of a run are, and which of them may be handed on."""
    public = path / PUBLIC
    if not public.is_dir():
        return f"files in {path}, all private"
    known = "" if config.has_secret_seed else ", if nobody can guess the seed (--seed secret)"
    chosen = ""
    if STOPPING in report.assumed:
        chosen = "; that its rounds ended there tells something of validation rows, without an ε"
    return f"files in {path}, all private but {public}, which may be handed on{known}{chosen}"


def print_results(stage: Stage, done: Executed, *, explain: bool) -> None:
    """Print a run's results, warnings about it, and the guarantee of all stages."""
    config = stage.experiment.config
    new = "of held-out clients" if config.clients_used == "held-out" else None
    name = " ".join(filter(None, (short_name(config.algorithm), config.get("penalty"), new)))
    print_table([{"run": name, **done.summary}], metrics=stage.experiment.metrics)
    _warn_of(stage, done)
    simulation, hparams = stage.experiment.simulation, stage.experiment.hparams
    if config.get("learning_rate", 0) is None and simulation.bounds_steps:
        least = number(float(np.min(hparams.learning_rate)))
        print(f"learning rate {least}: 1/L, so no step expands")
    if config.get("clip", 0) is None and config.clips and simulation.bounds_messages:
        print(f"clip norm {number(simulation.clip_norm)}: of the bounds of rows, no data")
    if shares := clipped_shares(simulation.population):
        print(clipped_in_words(shares))
    if done.audit is not None:
        print(done.audit)
    if stage.earlier:
        stages = describe_stages(stage.earlier, config.algorithm, done.summary["rounds"])
        print(f"stages: {stages}; the guarantee is of all of them")
    if done.summary["budget_spent"]:
        print(f"stopped after {done.summary['rounds']} rounds: one more would exceed the budget")
    file = None if stage.path is None else stage.path / GUARANTEE
    print_guarantee(done.report, file, explain=explain)
    if not explain:
        parts = stage.experiment.simulation.public
        choices = [each for each in done.state.privacy.public if each not in parts]
        for sentence in (*choices, *({NO_RELEASE} & {*done.report.assumed})):
            print(sentence)


def _warn_of(stage: Stage, done: Executed) -> None:
    """Warn of messages that are not finite, and of a run that diverges or overspends."""
    summary, asked = done.summary, stage.experiment.config.target_epsilon
    if summary["nonfinite"]:
        _warn(NOT_FINITE.format(summary["nonfinite"]))
    if summary["diverging"] is not None:
        _warn(DIVERGES.format(summary["diverging"]))
    population = stage.experiment.simulation.population
    if (worse := worse_than_constant(population, summary)) is not None:
        noise = stage.experiment.noise_multiplier > 0
        remedy = _less_noise(stage.experiment) if noise else _MORE_STEPS
        _warn(f"the models are of no use yet: {worse}; {remedy}")
    if summary["epsilon"] is not None:
        of = "stages" if stage.earlier else f"{summary['rounds']} rounds"
        _warn_above(asked, summary["epsilon"], f"all {of} together spend")


def _less_noise(experiment: Experiment) -> str:
    """Say how to lose less to noise; on bounded rows their bounds suggest a clip norm."""
    simulation, clip = experiment.simulation, ""
    if simulation.bounds_messages and simulation.clip_norm < experiment.hparams.get("clip", 0.0):
        clip = f" such as {simulation.clip_norm:.2g}"
    return (
        f"with noise, try a smaller --clip{clip}, a larger --sampling-rate or --epsilon, or "
        "--algorithm local, which sends nothing"
    )


def _warn_above(asked: float, spent: float, who: str) -> None:
    if spent > asked:
        _warn(f"{who} ε {epsilon_text(spent)}, more than the {asked:g} asked")


def _warn(text: str) -> None:
    if processes.is_first():
        say(f"warning: {text}")
