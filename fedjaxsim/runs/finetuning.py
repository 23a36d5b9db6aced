"""Fine-tuning right after a run: its settings, composed of the run's and a few flags.

JAX is not imported, so that the command line knows its flags at once.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Literal

from fedjaxsim.runs.fields import optional
from fedjaxsim.runs.settings import (
    RunConfig,
    fields_of,
    flag,
    run_config,
    unread,
)

_ROUNDS = 10
_ANEW = ("sampling", "mechanism", "schedule", "passes", "origin", "penalty")
"""Settings of the run that the stage does not take over."""
_AS_IN_THE_RUN = "as in the run"


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """Flags of the stage; unset ones are as in the run."""

    finetune: Annotated[
        Literal["vanilla", "mean", "kl", "ewc"] | None, optional("{vanilla,mean,kl,ewc}", "none")
    ] = None
    """Then fine-tune every client's model, alone; it costs no privacy."""
    finetune_origin: Annotated[
        Literal["personal", "global"] | None, optional("{personal,global}", "personal")
    ] = None
    """Start of fine-tuning: clients' own models or the published ones."""
    finetune_clients_used: Annotated[
        Literal["kept", "held-out"] | None, optional("{kept,held-out}", "kept")
    ] = None
    """Clients of fine-tuning; those held out of the run start from the published model."""
    finetune_rounds: Annotated[int | None, optional("INT", str(_ROUNDS))] = None
    """Rounds of fine-tuning, in which all clients take part."""
    finetune_local_steps: Annotated[int | None, optional("INT", _AS_IN_THE_RUN)] = None
    """E of fine-tuning, as local-steps."""
    finetune_local_epochs: Annotated[int | None, optional("INT", _AS_IN_THE_RUN)] = None
    """E of fine-tuning, as local-epochs."""
    finetune_batch_size: Annotated[int | None, optional("INT", _AS_IN_THE_RUN)] = None
    """b of fine-tuning."""
    finetune_local_optimizer: Annotated[
        Literal["sgd", "momentum", "adam"] | None, optional("{sgd,momentum,adam}", _AS_IN_THE_RUN)
    ] = None
    """The optimizer of fine-tuning, which starts afresh in every round."""
    finetune_learning_rate: Annotated[float | None, optional("FLOAT", _AS_IN_THE_RUN)] = None
    """η of fine-tuning, constant."""
    finetune_lam: Annotated[float | None, optional("FLOAT", _AS_IN_THE_RUN)] = None
    """λ of fine-tuning's penalty."""

    def flags(self) -> list[str]:
        """Return the words of a command line that give these flags."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return [word for name, value in given.items() for word in (f"--{flag(name)}", str(value))]

    def settings_after(self, config: RunConfig) -> RunConfig:
        """Return the settings of the stage after a run.

        They are those of the run that fine-tuning reads and the flags given here, with full
        participation, no release and a constant learning rate.
        """
        asked = self._asked(config)
        known = fields_of(asked)
        return run_config(**{name: value for name, value in asked.items() if name in known})

    def _asked(self, config: RunConfig) -> dict[str, Any]:
        """Return the settings of the run and the flags given here, read by the stage or not."""
        own = self._own()
        steps = ("local_steps", "local_epochs")
        anew = (*_ANEW, *(steps if own.keys() & {*steps} else ()))
        kept = {name: value for name, value in config.given().items() if name not in anew}
        chosen = {"algorithm": "finetune", "penalty": self.finetune, "sampling": "full"}
        return kept | chosen | {"rounds": _ROUNDS} | own

    def require_read(self, config: RunConfig, given: Collection[str], *, alone: bool) -> None:
        """Check that the flags suit the stage after a run, and all that were given have an effect.

        If the stage runs `alone`, on the state of another run, so must the run's settings `given`.

        Raises:
          ValueError: naming what is wrong.
        """
        own = self._own()
        if self.finetune is None:
            _require_none([f"finetune_{name}" for name in own], "without finetune")
            return
        reasons = [f"finetune-{reason}" for reason in unread(own, self._asked(config))]
        if reasons:
            raise ValueError("; ".join(reasons))
        with of_the_stage():
            stage = self.settings_after(config)
            stage.validate()
        elsewhere = [
            name
            for name in sorted(given if alone else ())
            if not hasattr(stage, name) or config.get(name) != stage.get(name)
        ]
        _require_none(elsewhere, "with from and finetune, which only fine-tune")

    def _own(self) -> dict[str, Any]:
        """Return the given flags besides the penalty, by the names of settings."""
        return {
            name.removeprefix("finetune_"): value
            for name, value in vars(self).items()
            if name != "finetune" and value is not None
        }


@contextlib.contextmanager
def of_the_stage() -> Iterator[None]:
    """Name fine-tuning in errors about its settings."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"fine-tuning: {error}") from error


def _require_none(names: Iterable[str], where: str) -> None:
    reasons = [f"{flag(name)} has no effect {where}" for name in names]
    if reasons:
        raise ValueError("; ".join(reasons))
