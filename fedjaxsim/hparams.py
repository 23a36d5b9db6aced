"""Hyperparameters: everything one may tune, sweep or differentiate, as one pytree of float arrays.

What fixes a shape (cohort capacity, local steps, batch size, chunk size) is static and lives
elsewhere. That split is why changing a hyperparameter never recompiles, and why a run can be
mapped over a grid of hyperparameters or differentiated with respect to them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from fedjaxsim.hparam_fields import (
    LARGEST_CLIP_NORM,
    LARGEST_NOISE,
    SMALLEST_CLIP_NORM,
    SMALLEST_NOISE,
    HparamFields,
    about,
    hyperparameter,
)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Hyperparameters(HparamFields):
    """The hyperparameters that the algorithms, mechanisms and samplers of this package read.

    Those of `HparamFields`, and these, which a run's settings give in other ways. An algorithm of
    one's own that needs more can subclass this (as a registered dataclass), with fields made by
    `hyperparameter`, which are then checked, or plain ones.
    """

    clip_norm: ArrayLike = hyperparameter(
        float("inf"),
        allowed=(
            "be positive (inf is no clipping) and, as its square is a float32, lie in "
            f"[{SMALLEST_CLIP_NORM:g}, {LARGEST_CLIP_NORM:g}]"
        ),
        least=SMALLEST_CLIP_NORM,
        most=LARGEST_CLIP_NORM,
        also=(float("inf"),),
        symbol="C",
        label="clip norm",
        tuned=True,
        setting="clip",
    )
    """C (γ in PMTL), the bound on the global L2 norm of a message, (); without one no noise can be
    calibrated. The start of adaptive clipping."""
    noise_multiplier: ArrayLike | Sequence[float] = hyperparameter(
        0.0,
        allowed=(
            f"be finite and at least 0: 0 is no noise, else it must lie in "
            f"[{SMALLEST_NOISE:g}, {LARGEST_NOISE:g}]"
        ),
        least=SMALLEST_NOISE,
        most=LARGEST_NOISE,
        also=(0.0,),
        symbol="z",
        meanings={0.0: "no noise"},
        schedule=True,
    )
    """z, the standard deviation of the noise on the *sum* of clipped messages divided by the clip
    norm, () or one per round (T,)."""
    count_noise: ArrayLike = hyperparameter(0.0, symbol="σ_b", label="noise on the count")
    """σ_b of adaptive clipping, the standard deviation of the noise on the number of clipped
    messages; above z/2 where there is noise."""

    def replace(self, **changes: ArrayLike | Sequence[float]) -> Self:
        """Returns a copy with the named leaves changed."""
        return dataclasses.replace(self, **changes)

    def as_arrays(self) -> Self:
        """Returns a copy whose leaves are float arrays of the default precision.

        Python numbers, numpy and JAX arrays then all lead to one compiled program.
        """
        dtype = jnp.result_type(float)

        def as_array(leaf):
            done = isinstance(leaf, jax.Array) and leaf.dtype == dtype and not leaf.weak_type
            return leaf if done else jnp.asarray(leaf, dtype=dtype)

        return jax.tree.map(as_array, self, is_leaf=lambda leaf: isinstance(leaf, list | tuple))


def on_host(value: ArrayLike | Sequence[float]) -> np.ndarray | None:
    """The value on the host, or None while it is being traced (mapped or differentiated)."""
    return None if isinstance(value, Tracer) else np.asarray(value, dtype=np.float64)


ABOUT = about(Hyperparameters)
"""What is known of each hyperparameter, by its name."""


def setting_of(name: str) -> str:
    """What a run's settings call a hyperparameter."""
    return ABOUT[name].setting or name


def validate(hparams: Hyperparameters) -> None:
    """Checks the values that are known; what is being traced cannot be checked.

    Raises:
      ValueError: naming the hyperparameter, its value and what is allowed.
    """
    for name, record in about(hparams).items():
        value = on_host(getattr(hparams, name))
        if value is not None:
            record.check(name, value)
    z, clip_norm = on_host(hparams.noise_multiplier), on_host(hparams.clip_norm)
    if z is None or clip_norm is None:
        return
    if np.any(z > 0) and not np.all(np.isfinite(clip_norm)):
        raise ValueError(
            "noise_multiplier > 0 needs a finite clip_norm: without a bound on the messages "
            f"no noise protects them, got noise_multiplier {z}, clip_norm {clip_norm}"
        )
