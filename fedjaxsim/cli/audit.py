"""`fedjaxsim audit`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.cli.start import start_jax
from fedjaxsim.privacy.hypothetical import OptionalInt
from fedjaxsim.runs.settings import RunConfig


@dataclasses.dataclass(frozen=True)
class Audit:
    """Attack simulations with canaries; the exit code is 1 if that refutes the reported ε."""

    settings: OmitArgPrefixes[RunConfig]
    config: Positional[Annotated[Path | None, tyro.conf.arg(metavar="[CONFIG.toml]")]] = None
    """A TOML file with the same settings; flags win over it."""
    canaries: OptionalInt = None
    """n, clients of each run that are canaries; half of what is possible by default."""
    runs: int = 20
    """How many runs; time grows with them, and what can be found out with n times them."""
    confidence: float = 0.99
    """Probability, at least, with which a sound simulation is not refuted."""
    json: bool = False
    """Print JSON instead of text."""

    def prepare(self) -> Callable[[], int]:
        """Audits; what is returned prints the result and says in its exit code what came of it.

        Raises:
          FileNotFoundError, ValueError: for bad input.
        """
        start_jax()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from fedjaxsim.audit.canaries import audit
        from fedjaxsim.report.files import print_json
        from fedjaxsim.runs.build import prepare

        config = self.settings
        if config.out is not None:
            raise ValueError(
                f"out must not be given, as an audit writes no files, got {config.out}"
            )
        experiment = prepare(config)
        console = Console(stderr=True)
        with Progress(
            TextColumn("audit"), BarColumn(bar_width=12), TextColumn("run {task.completed}"),
            TextColumn("of {task.total}"), TimeRemainingColumn(compact=True),
            console=console, transient=True, disable=config.quiet or not console.is_terminal,
        ) as progress:  # fmt: skip
            bar = progress.add_task("audit", total=self.runs)
            result = audit(
                experiment.simulation,
                experiment.hparams,
                config.rounds,
                canaries=self.canaries,
                runs=self.runs,
                confidence=self.confidence,
                delta=experiment.delta,
                seed=config.seed,
                on_run=lambda done, _: progress.update(bar, completed=done),
            )

        def work() -> int:
            if self.json:
                print_json(result.to_json())
            else:
                print(result)
            return int(result.violated)

        return work
