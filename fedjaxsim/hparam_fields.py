"""The hyperparameters that are plain flags too, and what is known of each.

Checks, flags, sweeps, figures and tuning read it from here: a new hyperparameter is one field. JAX
is not imported, so that the command line knows its flags before anything heavy is loaded.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from jax.typing import ArrayLike as Number
else:
    Number = float  # as a flag

LARGEST_FLOAT32 = 3.4028234663852886e38
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-12, 1e15
"""Clip norms other than ∞: their squares exist in float32."""
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e12
"""Noise multipliers other than 0: their squares, and noise times clip norm, exist in float32."""
_KEY = "hyperparameter"


class Hyperparameter(NamedTuple):
    """What is known of one hyperparameter.

    Attributes:
      allowed: which values are, in words, as an error says it after "must".
      least: the smallest of them.
      most: the largest of them.
      also: other values that are allowed, outside of these.
      symbol: its name in figures; None for the field's name.
      label: what it is, in a word or two; None where the symbol says enough.
      meanings: what special values stand for.
      tuned: whether `fedjaxsim tune` may look for it, on a logarithmic scale.
      schedule: whether it may have one number per round.
      setting: what a run's settings call it; None where that is the field's name.
    """

    allowed: str = "be finite and at least 0"
    least: float = 0.0
    most: float = LARGEST_FLOAT32
    also: tuple[float, ...] = ()
    symbol: str | None = None
    label: str | None = None
    meanings: Mapping[float, str] = {}
    tuned: bool = False
    schedule: bool = False
    setting: str | None = None

    def check(self, name: str, value: "np.ndarray") -> None:
        """Checks values that are known.

        Raises:
          ValueError: naming the hyperparameter, its value and what is allowed.
        """
        allowed = (value >= self.least) & (value <= self.most)
        for other in self.also:
            allowed |= value == other
        if not allowed.all():
            raise ValueError(f"{name} must {self.allowed}, got {value}")
        if self.schedule and value.ndim > 1:
            raise ValueError(
                f"{name} must be a number or one number per round, got shape {value.shape}"
            )


def hyperparameter(default: Any, **known: Any) -> Any:
    """A field with its default and what is known of it, as of `Hyperparameter`."""
    return dataclasses.field(default=default, metadata={_KEY: Hyperparameter(**known)})


def about(hparams: Any) -> dict[str, Hyperparameter]:
    """What is known of the fields of a class or an instance, by their names."""
    fields = dataclasses.fields(hparams)
    return {field.name: field.metadata[_KEY] for field in fields if _KEY in field.metadata}


@dataclasses.dataclass(frozen=True)
class HparamFields:
    """Hyperparameters that a run is given as they are: its flags, with these texts as their help.

    Each is () here; see `Hyperparameters` for the others.
    """

    learning_rate: Number = hyperparameter(0.1, symbol="η", label="learning rate", tuned=True)
    """η, the local learning rate; a schedule over rounds multiplies it."""
    server_learning_rate: Number = hyperparameter(1.0, symbol="server η", tuned=True)
    """The server's step on the released mean update; 1 with sgd adds the update as it is."""
    lam: Number = hyperparameter(0.0, symbol="λ", tuned=True)
    """λ, the weight of what ties clients together: the pull of a model towards a shared one (PMTL,
    Ditto, naive DP, fine-tuning), the penalty on the matrix of all models (MP-MTL, DP-MTRL), or on
    ‖w‖₁ (STL)."""
    lam2: Number = hyperparameter(0.0, symbol="λ₂", tuned=True)
    """λ₂ of a decomposed MP-MTL, the weight of the penalty on what clients keep to themselves."""
    ridge: Number = hyperparameter(0.0, symbol="ridge")
    """μ of MP-MTL, DP-MTRL and STL, the weight of ½‖w‖² in every client's own objective."""
    example_epsilon: Number = hyperparameter(
        math.inf,
        allowed="be positive (inf: examples are not protected by themselves)",
        least=SMALLEST_CLIP_NORM,
        also=(math.inf,),
        symbol="ε of an example",
        meanings={math.inf: "none"},
    )
    """ε of one round for every single example, for which MP-MTL's clients add noise of their own;
    besides the guarantee of clients."""
    mu: Number = hyperparameter(0.0, symbol="μ", tuned=True)
    """μ of FedProx, the weight of the proximal term."""
    personalization: Number = hyperparameter(
        1.0,
        allowed="be at least 0 (inf: global only)",
        also=(math.inf,),
        label="level of personalization",
        meanings={0.0: "local", math.inf: "global"},
        tuned=True,
    )
    """Level of PP-SGD: 0 is local only; the ratio of the global step to the local one (inf: global
    only), or the paper's α."""
    sampling_rate: Number = hyperparameter(
        1.0, allowed="lie in (0, 1]", least=math.nextafter(0, 1), most=1.0, symbol="p"
    )
    """p, the probability that a client takes part in a round."""
    target_quantile: Number = hyperparameter(
        0.5,
        allowed="lie in (0, 1)",
        least=math.nextafter(0, 1),
        most=math.nextafter(1, 0),
        symbol="γ",
        label="target quantile",
    )
    """γ of adaptive clipping, the share of messages that should not be clipped."""
    clip_learning_rate: Number = hyperparameter(0.2, symbol="η_C", label="step of log C")
    """η_C of adaptive clipping, the step of log C."""
