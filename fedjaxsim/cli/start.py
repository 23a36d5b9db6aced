"""What a command does before the first computation, and how programs end."""

from typing import Annotated, Literal

from fedjaxsim.runs.settings import optional

CheckpointEvery = Annotated[str | None, optional("N|TIME", "1min, at most a twentieth of the time")]
"""Of the commands that write checkpoints; `Cadence.parse` reads it."""

Log = Annotated[
    Literal["tensorboard", "wandb", "mlflow", "trackio"] | None,
    optional("{tensorboard,wandb,mlflow,trackio}", "none"),
]
"""Of the commands that run a single run; `report/loggers.py` has them."""

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


def start_jax() -> None:
    """Imports JAX and sets it up as a program wants it; to be called before it computes."""
    from fedjaxsim.cli.compiled import keep_compiled_programs
    from fedjaxsim.engine.devices import use_all_cores

    use_all_cores()
    keep_compiled_programs()
