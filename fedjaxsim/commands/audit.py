"""The attack of `fedjaxsim audit`."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedjaxsim.audit import canaries as attack
from fedjaxsim.report.files import print_json
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import RunConfig


def prepare_audit(
    config: RunConfig, canaries: int | None, runs: int, confidence: float, json: bool
) -> Callable[[], int]:
    """Audit; return a function that prints the result and gives 1 if it refutes the reported ε.

    Raises:
      FileNotFoundError, ValueError: for bad input.
    """
    if config.out is not None:
        raise ValueError(f"out must not be given, as an audit writes no files, got {config.out}")
    config.require_no_canaries("an audit of many runs")
    if config.get("budget_epsilon") is not None:
        raise ValueError("an audit runs all rounds: leave out budget-epsilon")
    experiment = prepare(config)
    console = Console(stderr=True)
    with Progress(
        TextColumn("audit"), BarColumn(bar_width=12), TextColumn("run {task.completed}"),
        TextColumn("of {task.total}"), TimeRemainingColumn(compact=True),
        console=console, transient=True, disable=config.quiet or not console.is_terminal,
    ) as progress:  # fmt: skip
        bar = progress.add_task("audit", total=runs)
        result = attack.audit(
            experiment.simulation,
            experiment.hparams,
            config.rounds,
            canaries=canaries,
            runs=runs,
            confidence=confidence,
            delta=experiment.delta,
            seed=config.seed,
            on_run=lambda done, _: progress.update(bar, completed=done),
        )

    def work() -> int:
        if json:
            print_json(result.to_json())
        else:
            print(result)
        return int(result.violated)

    return work
