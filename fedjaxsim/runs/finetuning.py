"""Fine-tuning right after a run: its settings, made of those of the run and a few of its own.

JAX is not imported, so that the command line knows its flags at once.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Literal

from fedjaxsim.runs.reads import different, unread
from fedjaxsim.runs.settings import Origin, Penalty, RunConfig, flag, optional

_ROUNDS = 10
_OF_THE_REPORT = ("delta", "accountant")
"""Settings that the guarantee of both stages reads, whatever the second does."""
_AS_IN_THE_RUN = "as in the run"


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """The flags of the stage. What they do not say is as in the run."""

    finetune: Annotated[Penalty | None, optional("{vanilla,mean,kl,ewc}", "none")] = None
    """Fine-tune the models of all clients after the run, or after that in --from: each alone, with
    no penalty (vanilla) or one towards what was published. It costs no privacy."""
    finetune_origin: Annotated[Origin | None, optional("{personal,global}", "personal")] = None
    """Where fine-tuning starts: from clients' own models or from what was published."""
    finetune_rounds: Annotated[int | None, optional("INT", str(_ROUNDS))] = None
    """Rounds of fine-tuning, in which everybody takes part."""
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
        """What stands on a command line for it."""
        words = []
        for name, value in vars(self).items():
            if value is not None:
                words += [f"--{flag(name)}", str(value)]
        return words

    def settings_after(self, config: RunConfig) -> RunConfig:
        """The settings of the stage after a run.

        Those of the run that fine-tuning reads, its own where it has some, everybody, a closed door
        and a constant learning rate.
        """
        assert self.finetune is not None
        own = self._own()
        if own.keys() & {"local_steps", "local_epochs"}:
            own = {"local_steps": None, "local_epochs": None, **own}
        alone = {"sampling": None, "sampling_rate": 1.0, "mechanism": None}
        plain = {"passes": None, "schedule": "constant", "common_noise": False}
        stage = dataclasses.replace(
            config,
            algorithm="finetune",
            penalty=self.finetune,
            rounds=own.pop("rounds", _ROUNDS),
            **(alone | plain | own),
        )
        default = RunConfig()
        left = [name for name in different(stage) if unread(stage, [name])]
        return dataclasses.replace(
            stage, **{name: getattr(default, name) for name in left if name not in _OF_THE_REPORT}
        )

    def require_read(self, config: RunConfig, given: Collection[str], *, alone: bool) -> None:
        """Checks that what somebody set suits the stage and has an effect.

        Args:
          config: of the run.
          given: the settings of the run that somebody set, by field name.
          alone: whether the stage is all that is run, on the state of another run.

        Raises:
          ValueError: naming what is wrong.
        """
        own = self._own()
        if self.finetune is None:
            if own:
                raise ValueError(
                    _without_effect(map("finetune_{}".format, own), "without finetune")
                )
            return
        stage = self.settings_after(config)
        with of_the_stage():
            stage.validate()
        reasons = [f"finetune-{reason}" for reason in unread(stage, own)]
        if alone:
            elsewhere = [
                name for name in sorted(given) if getattr(config, name) != getattr(stage, name)
            ]
            if elsewhere:
                reasons.append(
                    _without_effect(elsewhere, "with from and finetune, which only fine-tune")
                )
        if reasons:
            raise ValueError("; ".join(reasons))

    def _own(self) -> dict[str, Any]:
        """What the stage was given besides its penalty, by the names of settings."""
        return {
            name.removeprefix("finetune_"): value
            for name, value in vars(self).items()
            if name != "finetune" and value is not None
        }


@contextlib.contextmanager
def of_the_stage() -> Iterator[None]:
    """Says of errors in the settings of the stage that they are."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"fine-tuning: {error}") from error


def _without_effect(names: Iterable[str], where: str) -> str:
    return "; ".join(f"{flag(name)} has no effect {where}" for name in names)
