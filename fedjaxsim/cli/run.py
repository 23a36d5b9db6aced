"""`fedjaxsim run`."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.cli.start import INTERRUPTED, start_jax
from fedjaxsim.runs.settings import RunConfig


@dataclasses.dataclass(frozen=True)
class Run:
    """Run one federated simulation."""

    settings: OmitArgPrefixes[RunConfig]
    config: Positional[Annotated[Path | None, tyro.conf.arg(metavar="[CONFIG.toml]")]] = None
    """A TOML file with the same settings; flags win over it."""
    explain: bool = False
    """Print all of the guarantee, and what it rests on."""

    def prepare(self) -> Callable[[], int]:
        """Checks all input; what is returned runs and gives the exit code.

        Raises:
          FileNotFoundError, ValueError: for bad input.
        """
        start_jax()
        from fedjaxsim.report.progress import print_guarantee, print_table, stop_on_interrupt
        from fedjaxsim.runs.build import prepare
        from fedjaxsim.runs.directory import GUARANTEE, RunDirectory
        from fedjaxsim.runs.execute import execute

        config = self.settings
        experiment = prepare(config)
        directory = None
        if config.out is not None:
            directory = RunDirectory.create(config.out, overwrite=config.overwrite)

        def work() -> int:
            with stop_on_interrupt() as stop:
                summary, report = execute(experiment, directory, stop, quiet=config.quiet)
            print_table([{"run": config.algorithm, **summary}])
            if summary["diverging"]:
                print(
                    "fedjaxsim: warning: the training loss grew to more than ten times its lowest "
                    "value, so this run diverges; for PMTL with a sampling rate p below 1, a "
                    "smaller --lam or --server-learning-rate p helps (docs/algorithms.md says why)",
                    file=sys.stderr,
                )
            place = None if directory is None else directory.path / GUARANTEE
            print_guarantee(report, place, explain=self.explain)
            if directory is not None:
                print(f"files in {directory.path}")
            if not summary["interrupted"]:
                return 0
            print(f"stopped by Ctrl-C after {summary['rounds']} rounds", file=sys.stderr)
            return INTERRUPTED

        return work
