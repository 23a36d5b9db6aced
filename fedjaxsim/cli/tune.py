"""`fedjaxsim tune`."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes

from fedjaxsim.cli.shared_flags import (
    CheckpointEvery,
    ConfigFile,
    Machines,
    OnFullDisk,
    WithSettings,
)
from fedjaxsim.runs.fields import listed, optional
from fedjaxsim.runs.settings import RunConfig


@dataclasses.dataclass(frozen=True)
class Tune(WithSettings):
    """Tune hyperparameters by gradient descent through whole runs, at a fixed guarantee.

    Settings are those of `run`; tuned ones start there. Without --held-out-clients or
    --public-data, tuning uses validation rows of the run's own clients, which no ε covers: 0.2 of
    the training rows, unless --validation-fraction says otherwise. --out is needed.
    """

    settings: OmitArgPrefixes[RunConfig]
    config: ConfigFile = None
    """TOML file with the same settings; flags win over it."""
    wrt: Annotated[tuple[str, ...], listed("NAME")] = ()
    """Positive hyperparameters to tune, as learning-rate,clip-norm; without it, the error lists
    those of the algorithm."""
    seeds: int = 4
    """S, runs per point, whose mean is minimized; all points share the seeds."""
    steps: int = 20
    """Most points to try besides the start."""
    rule: Literal["adam", "lion"] = "adam"
    """Optimizer of optax that proposes the steps."""
    metric: Annotated[str | None, optional("NAME", "loss")] = None
    """Smooth metric to minimize."""
    public_data: Annotated[str | None, optional("SPEC", "none")] = None
    """Data to tune on instead of the run's; they are read without protection."""
    checkpoint_every: CheckpointEvery = None
    """Rounds (10) or time (30s, 5min, 2h) between checkpoints of the final run; every step of the
    tuning is kept."""
    on_full_disk: OnFullDisk = "stop"
    """End with the last step or checkpoint, or wait until there is space."""
    explain: bool = False
    """Print the whole guarantee of the final run and its assumptions."""

    def prepare(self) -> Callable[[], int]:
        """Check all input; return a function that tunes."""
        Machines().start()
        from fedjaxsim.commands.tune import Question, prepare_tune

        question = Question(
            self.wrt, self.seeds, self.steps, self.rule, self.metric, self.public_data,
        )  # fmt: skip
        return prepare_tune(
            self.settings, question, checkpoint_every=self.checkpoint_every,
            on_full_disk=self.on_full_disk, explain=self.explain,
        )  # fmt: skip
