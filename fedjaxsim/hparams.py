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

SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-12, 1e15
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e12
"""Noise multipliers other than 0: their squares, and noise times clip norm, exist in float32."""

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_FINITE = (
    "learning_rate",
    "server_learning_rate",
    "lam",
    "mu",
    "clip_learning_rate",
    "count_noise",
)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters that the algorithms, mechanisms and samplers of this package read.

    An algorithm of one's own that needs more can subclass this (as a registered dataclass).

    Attributes:
      learning_rate: η, the local learning rate, () ≥ 0; a schedule over rounds multiplies it.
      server_learning_rate: the server's step on the released mean update, () ≥ 0. With plain SGD
        and 1.0 the server adds the release as it is.
      lam: λ of PMTL (Algorithm 1), the weight of the pull towards w̃, () ≥ 0.
      mu: μ of FedProx, the weight of the proximal term, () ≥ 0.
      personalization: the level of PP-SGD, () ≥ 0: 0 is local learning only. The ratio a of the
        global step to the local one, where ∞ is global only; or the paper's α, see `ppsgd`.
      clip_norm: C (γ in PMTL), the bound on the global L2 norm of a message, () > 0; ∞ is no
        clipping, and then no noise can be calibrated.
      noise_multiplier: z, the standard deviation of the noise on the *sum* of clipped messages
        divided by the clip norm, () or one per round (T,), ≥ 0.
      sampling_rate: p, the probability that a client takes part in a round, () in (0, 1].
      target_quantile: γ of adaptive clipping, the share of messages that should not be clipped, ()
        in (0, 1).
      clip_learning_rate: η_C of adaptive clipping, the step of log C, () ≥ 0.
      count_noise: σ_b of adaptive clipping, the standard deviation of the noise on the number of
        clipped messages, () ≥ 0; above z/2 where there is noise.
    """

    learning_rate: ArrayLike = 0.1
    server_learning_rate: ArrayLike = 1.0
    lam: ArrayLike = 0.0
    mu: ArrayLike = 0.0
    personalization: ArrayLike = 1.0
    clip_norm: ArrayLike = float("inf")
    noise_multiplier: ArrayLike | Sequence[float] = 0.0
    sampling_rate: ArrayLike = 1.0
    target_quantile: ArrayLike = 0.5
    clip_learning_rate: ArrayLike = 0.2
    count_noise: ArrayLike = 0.0

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


def known(value: ArrayLike | Sequence[float]) -> np.ndarray | None:
    """The value on the host, or None while it is being traced (mapped or differentiated)."""
    return None if isinstance(value, Tracer) else np.asarray(value, dtype=np.float64)


def validate(hparams: Hyperparameters) -> None:
    """Checks the values that are known; what is being traced cannot be checked.

    Raises:
      ValueError: naming the hyperparameter, its value and what is allowed.
    """
    for name in _FINITE:
        value = known(getattr(hparams, name))
        if value is not None and not np.all((value >= 0) & (value <= _LARGEST_FLOAT32)):
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
    level = known(hparams.personalization)
    if level is not None and not np.all(
        (level >= 0) & ((level <= _LARGEST_FLOAT32) | np.isinf(level))
    ):
        raise ValueError(f"personalization must be at least 0 (inf: global only), got {level}")
    clip_norm = known(hparams.clip_norm)
    if clip_norm is not None and not np.all(clip_norm > 0):
        raise ValueError(f"clip_norm must be positive (inf is no clipping), got {clip_norm}")
    if clip_norm is not None and np.any(clip_norm < SMALLEST_CLIP_NORM):
        raise ValueError(
            f"clip_norm must be at least {SMALLEST_CLIP_NORM}, since squares of smaller norms "
            f"vanish in float32, got {clip_norm}"
        )
    if clip_norm is not None and np.any((clip_norm > LARGEST_CLIP_NORM) & np.isfinite(clip_norm)):
        raise ValueError(
            f"clip_norm must be at most {LARGEST_CLIP_NORM}, or inf for no clipping, since squares "
            f"of larger norms are infinite in float32, got {clip_norm}"
        )
    z = known(hparams.noise_multiplier)
    if z is not None:
        if not (np.all(np.isfinite(z)) and np.all(z >= 0)):
            raise ValueError(f"noise_multiplier must be finite and at least 0, got {z}")
        if np.any((z > 0) & ((z < SMALLEST_NOISE) | (z > LARGEST_NOISE))):
            raise ValueError(
                f"noise_multiplier must be 0 or lie in [{SMALLEST_NOISE}, {LARGEST_NOISE}], got {z}"
            )
        if z.ndim > 1:
            raise ValueError(
                f"noise_multiplier must be a number or one number per round, got shape {z.shape}"
            )
        if clip_norm is not None and np.any(z > 0) and not np.all(np.isfinite(clip_norm)):
            raise ValueError(
                "noise_multiplier > 0 needs a finite clip_norm: without a bound on the messages "
                f"no noise protects them, got noise_multiplier {z}, clip_norm {clip_norm}"
            )
    p = known(hparams.sampling_rate)
    if p is not None and not (np.all(p > 0) and np.all(p <= 1)):
        raise ValueError(f"sampling_rate must lie in (0, 1], got {p}")
    quantile = known(hparams.target_quantile)
    if quantile is not None and not (np.all(quantile > 0) and np.all(quantile < 1)):
        raise ValueError(f"target_quantile must lie in (0, 1), got {quantile}")
