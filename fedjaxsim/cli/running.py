"""The work of `fedjaxsim run` and `fedjaxsim resume`."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjaxsim import checks
from fedjaxsim.cli.flags import Work
from fedjaxsim.cli.messages import say
from fedjaxsim.cli.printing import (
    print_comparison,
    print_guarantee,
    print_table,
    warn_if_no_matplotlib,
)
from fedjaxsim.cli.process import end_stopped, stoppable
from fedjaxsim.data.tables.describe import clipped_in_words, ranges_in_words
from fedjaxsim.data.transforms import clipped_shares
from fedjaxsim.divergence import DIVERGES, LESS_NOISE, MORE_STEPS, NOT_FINITE
from fedjaxsim.engine import processes
from fedjaxsim.privacy.assumptions import NO_RELEASE, STOPPING
from fedjaxsim.privacy.entries import epsilon_text
from fedjaxsim.privacy.guarantee import Report, tight_epsilon
from fedjaxsim.report.files import SEVERAL_RUNS, check_place
from fedjaxsim.report.labels import short_name
from fedjaxsim.report.progress import number
from fedjaxsim.runs.build import Experiment
from fedjaxsim.runs.comparison import compare
from fedjaxsim.runs.directory import GUARANTEE, RunDirectory, read_run
from fedjaxsim.runs.execute import Executed, Stage, describe_stages, execute
from fedjaxsim.runs.output import RunOutput
from fedjaxsim.runs.public import PUBLIC
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.starting import prepare_run, warn_above
from fedjaxsim.runs.sweep_files import MOST_RUNS

RESUME = "fedjaxsim resume"


def work_of(prepared: Stage | RunDirectory, output: RunOutput) -> Work:
    """Return the work of a run whose input is checked; a finished one is shown."""
    if isinstance(prepared, RunDirectory):
        return lambda: _show(prepared, output)
    return lambda: _begin(prepared, output)


def seeds_work(
    config: RunConfig,
    out: Path,
    seeds: int,
    output: RunOutput,
    *,
    overwrite: bool,
    labels: Mapping[str, Any],
) -> Work:
    """Check the input of runs with seeds from `config`'s on; return the work."""
    if config.has_secret_seed:
        raise ValueError("seeds and seed secret exclude each other")
    checks.count(1, MOST_RUNS, seeds=seeds)
    check_place(out, SEVERAL_RUNS)
    runs = {
        out / f"seed-{seed}": config.replace(seed=seed)
        for seed in range(config.seed, config.seed + seeds)
    }
    (path, first), *later = runs.items()
    how: dict[str, Any] = {"overwrite": overwrite, "labels": labels}
    begin = work_of(prepare_run(first, path, None, output, **how), output)

    def work() -> int | None:
        code = begin()
        for path, run in later:
            code = code or work_of(prepare_run(run, path, None, output, **how), output)()
        if not code:
            print_comparison(compare(runs))
        return code

    return work


def _show(directory: RunDirectory, output: RunOutput) -> None:
    """Print the results of a finished run again."""
    run = read_run(directory.path.name, directory)
    print_table([{"run": run.name, **run.summary}], metrics=run.metrics)
    print_guarantee(directory.report(), directory.path / GUARANTEE, explain=output.explain)
    done = f"the run in {directory.path} is finished"
    print(f"{done}: resume --rounds N extends it, and --overwrite runs it again")


def _begin(stage: Stage, output: RunOutput) -> int:
    """Print the warnings of a run, do it, and return the exit code."""
    for warning in stage.warnings:
        _warn(warning)
    return _run(stage, output)


def _run(stage: Stage, output: RunOutput) -> int:
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
        done = execute(stage, stop, output)
    print_results(stage, done, explain=output.explain)
    if path is not None:
        print(_where(path, stage.experiment.config, done.report))
    if not done.summary["interrupted"]:
        return 0
    again = "" if path is None else f"; to resume: {RESUME} {shlex.quote(str(path))}"
    after = f" after {done.summary['rounds']} rounds{again}"
    return end_stopped(processes.from_all(stop.number), after)


def _where(path: Path, config: RunConfig, report: Report) -> str:
    """Return where the files of a run are, and which of them may be handed on."""
    public = path / PUBLIC
    if not public.is_dir():
        return f"files in {path}, all private"
    chosen = ""
    if STOPPING in report.assumed:
        chosen = "; that its rounds ended there tells something of validation rows, without an ε"
    if config.hides_noise:
        return f"files in {path}, all private but {public}, which may be handed on{chosen}"
    guessed = f"seed ({config.seed})"
    if config.has_secret_seed:
        guessed = f"partition-seed ({config.partition_seed})"
    return (
        f"files in {path}, all private: whoever guesses the {guessed} knows "
        f"the noise, so {public} may be handed on from a run with --seed secret alone{chosen}"
    )


def print_results(stage: Stage, done: Executed, *, explain: bool) -> None:
    """Print a run's results, warnings about it, and the guarantee of all stages."""
    config = stage.experiment.config
    clients = "of held-out clients" if config.clients_used == "held-out" else None
    name = " ".join(filter(None, (short_name(config.algorithm), config.get("penalty"), clients)))
    print_table([{"run": name, **done.summary}], metrics=stage.experiment.metrics)
    _warn_of(stage, done)
    simulation, hparams = stage.experiment.simulation, stage.experiment.hparams
    if config.get("learning_rate", 0) is None and simulation.bounds_steps:
        least = number(float(np.min(hparams.learning_rate)))
        up_to = " while no rate exceeds 2e times the prior" if config.loss == "poisson" else ""
        print(f"learning rate {least}: 1/L, so no step expands{up_to}")
    if config.get("clip", 0) is None and config.clips and simulation.bounds_messages:
        print(f"clip norm {number(simulation.clip_norm)}: from the columns' bounds, not from rows")
    if config.get("lam_intercept", 0) is None and config.get("lam") is None:
        ratios = f"lam {number(hparams.lam)} and lam-intercept {number(hparams.lam_intercept)}"
        private = (float(hparams.lam), float(hparams.lam_intercept)) == (1, 1)
        print(f"{ratios}: " + ("no ε covers an estimate" if private else "estimated from rows"))
    if shares := clipped_shares(simulation.population):
        print(clipped_in_words(shares))
    if prepared := simulation.prepared:
        spent = epsilon_text(tight_epsilon(prepared, stage.experiment.delta))
        print(f"private ranges cost ε {spent}: {ranges_in_words(simulation.population)}")
    if done.audit is not None:
        print(done.audit)
    if stage.earlier:
        stages = describe_stages(stage.earlier, config.algorithm, done.summary["rounds"])
        print(f"stages: {stages}; the guarantee covers all of them")
    if done.summary["budget_spent"]:
        print(f"stopped after {done.summary['rounds']} rounds: one more would exceed the budget")
    file = None if stage.path is None else stage.path / GUARANTEE
    print_guarantee(done.report, file, explain=explain)
    if not explain:
        parts = stage.experiment.simulation.public
        choices = [sentence for sentence in done.state.privacy.public if sentence not in parts]
        for sentence in (*choices, *({NO_RELEASE} & {*done.report.assumed})):
            print(sentence)


def _warn_of(stage: Stage, done: Executed) -> None:
    """Warn of messages that are not finite, and of a run that diverges or overspends."""
    summary, asked = done.summary, stage.experiment.config.target_epsilon
    if summary["nonfinite"]:
        _warn(NOT_FINITE.format(summary["nonfinite"]))
    if summary["diverging"] is not None:
        _warn(DIVERGES.format(summary["diverging"]))
    if (worse := summary["worse_than_constant"]) is not None:
        noise = stage.experiment.noise_multiplier > 0
        remedy = _less_noise(stage.experiment) if noise else MORE_STEPS
        _warn(f"the models are of no use yet: {worse}; {remedy}")
    if summary["epsilon"] is not None:
        of = "stages" if stage.earlier else f"{summary['rounds']} rounds"
        for warning in warn_above(asked, summary["epsilon"], f"all {of} together spend"):
            _warn(warning)


def _less_noise(experiment: Experiment) -> str:
    """Say how to lose less to noise; on bounded rows their bounds suggest a clip norm."""
    simulation, clip = experiment.simulation, ""
    if simulation.bounds_messages and simulation.clip_norm < experiment.hparams.get("clip", 0.0):
        clip = f" such as {simulation.clip_norm:.2g}"
    return LESS_NOISE.format(clip)


def _warn(text: str) -> None:
    if processes.is_first():
        say(f"warning: {text}")
