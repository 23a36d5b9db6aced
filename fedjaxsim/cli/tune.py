"""`fedjaxsim tune`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional
from tyro.constructors import PrimitiveConstructorSpec

from fedjaxsim.cli.start import CheckpointEvery, start_jax
from fedjaxsim.runs.settings import RunConfig, optional

_NAMES = PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME[,NAME...]",
    instance_from_str=lambda words: tuple(
        word.strip() for word in words[0].split(",") if word.strip()
    ),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda value: [",".join(value)],
)


@dataclasses.dataclass(frozen=True)
class Tune:
    """Tune hyperparameters by gradient descent through whole runs, at a fixed guarantee.

    Settings are those of `run`; what is tuned starts there. Without --held-out-clients or
    --public-data it is tuned on validation rows of the run's own clients, which no ε covers; they
    are then 0.2 of the training rows, unless --validation-fraction says otherwise. --out is needed.
    """

    settings: OmitArgPrefixes[RunConfig]
    config: Positional[Annotated[Path | None, tyro.conf.arg(metavar="[CONFIG.toml]")]] = None
    """A TOML file with the same settings; flags win over it."""
    wrt: Annotated[tuple[str, ...], _NAMES] = ()
    """What is tuned: positive hyperparameters that the algorithm reads, as learning-rate,clip-norm;
    without it, the error lists them all."""
    seeds: int = 4
    """S, the runs over whose mean is minimized; the same ones at every step."""
    steps: int = 20
    """The most points to try besides the start."""
    rule: Literal["adam", "lion"] = "adam"
    """Optimizer of optax that proposes the steps."""
    metric: Annotated[str | None, optional("NAME", "loss")] = None
    """The metric that is minimized; a smooth one."""
    public_data: Annotated[str | None, optional("SPEC", "none")] = None
    """Data to tune on instead of those of the run; they are read without protection."""
    compare_grid: Annotated[int | None, optional("N", "no grid")] = None
    """Also run a grid of N values of each hyperparameter, from a tenth to ten times the start."""
    checkpoint_every: CheckpointEvery = None
    """Rounds (10) or time (30s, 5min, 2h) between checkpoints of the final run; the path is kept
    after every step."""
    explain: bool = False
    """Print all of the final run's guarantee, and what it rests on."""

    def prepare(self) -> Callable[[], int]:
        """Check all input; see `prepare_tune`."""
        start_jax()
        from fedjaxsim.commands.tune import prepare_tune

        return prepare_tune(self)
