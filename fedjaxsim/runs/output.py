"""Options of a run's report, progress, files and pictures; none changes its numbers.

The fields are flags of commands, whose help imports no numpy.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fedjaxsim.factories import Count, Options, flag

if TYPE_CHECKING:
    from fedjaxsim.clock import Axis


@dataclasses.dataclass(frozen=True)
class FigureAxis(Options):
    """The horizontal axis of curves, and the simulated clock of its seconds."""

    over: Annotated[
        Literal["rounds", "bytes", "seconds"],
        "Horizontal axis of curves: rounds, the bytes that clients sent, or the seconds that this "
        "would take by a simulated clock.",
    ] = "rounds"
    speed: Annotated[float, "Multiplications of a median client in a simulated second."] = 1e9
    bandwidth: Annotated[float, "Bytes that a median client sends in a simulated second."] = 1e6
    spread: Annotated[
        float, "Standard deviation of the logarithm of clients' times; 0 if all are alike."
    ] = 0.5

    @property
    def axis(self) -> "Axis":
        """The axis; raise a ValueError for a clock that it does not read."""
        from fedjaxsim.clock import Axis, Clock

        clock = Clock(self.speed, self.bandwidth, self.spread)
        if self.over != "seconds" and clock != Clock():
            raise ValueError("speed, bandwidth and spread set the clock of --over seconds")
        return Axis(self.over, clock)


@dataclasses.dataclass(frozen=True)
class RunOutput(FigureAxis):
    """Options of a run's report, progress and checkpoints.

    Attributes:
      explain: Print the whole guarantee and its assumptions.
      checkpoint_every: Rounds between checkpoints, each at the next evaluation; by default one a
        minute, in at most a twentieth of the time.
      no_client_table: Write no table of metrics per client.
      quiet: Print the result, warnings and errors only.
      logger: Trackers of the run's records: wandb, mlflow, tensorboard, trackio or MODULE:FACTORY.
      profile: Directory for a profile of the rounds by JAX, as for TensorBoard.
      format: Format of the picture of its curves.
    """

    explain: bool = False
    checkpoint_every: Count | None = None
    no_client_table: bool = False
    quiet: bool = False
    logger: tuple[str, ...] = ()
    profile: Path | None = None
    format: Literal["png", "pdf", "svg"] = "png"

    def validate(self, out: Path | None, **of_files: Any) -> None:
        """Check the flags; flags of files, with `of_files`, need `out`."""
        of_files |= {"checkpoint_every": self.checkpoint_every}
        of_files |= {"no_client_table": self.no_client_table, "format": self.format != "png"}
        of_files |= {"over": self.axis.over != "rounds"}
        without_effect = [flag(name) for name, value in of_files.items() if value]
        if out is None and without_effect:
            raise ValueError(f"{without_effect[0]} has no effect without out")
        folder = self.profile
        if folder is not None and any(path.is_file() for path in (folder, *folder.parents)):
            raise ValueError(f"profile must be a directory, got {folder}")


USUAL_OUTPUT = RunOutput()
