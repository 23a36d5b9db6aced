"""The m × m Gram matrix of clipped messages, ⟨w_k, w_l⟩, with symmetric Gaussian noise."""

import math

import jax
import jax.numpy as jnp

from fedjaxsim.hyperparameters import reads
from fedjaxsim.privacy.events import PrivacyEvent
from fedjaxsim.privacy.mechanisms.base import (
    CLIP_NORM,
    NOISE_MULTIPLIER,
    Mechanism,
    Release,
    noise_scale,
    round_value,
)
from fedjaxsim.privacy.mechanisms.every_row import every_row
from fedjaxsim.privacy.mechanisms.gram import (
    check_deviations,
    shifted,
    spectral_bound,
    symmetric,
    symmetric_normal,
)


@reads(CLIP_NORM, NOISE_MULTIPLIER)
def gaussian_gram_of_clients(num_clients: int, psd_deviations: float | None = 4.0) -> Mechanism:
    """How alike clients' messages are, W̃ᵀW̃ + E + c·I: the other branch of MP-MTL's Algorithm 1.

    Entry (k, l) of the release, (m, m), is ⟨w̃_k, w̃_l⟩, w̃_k = clip(w_k, K), plus noise: E is
    symmetric with N(0, s²) on the diagonal and N(0, s²/2) off it, s = zK² √(2m − 1). The paper adds
    the noise of a WWᵀ, as if one client moved one entry; it moves a row and a column, in which all
    others stand. So the noise grows with m, and the price is paid here, in s. The shift is that of
    `gaussian_gram`, s(√(2m) + t).

    Accumulators take the memory of m messages, on every device, and a release that of m² numbers.

    Formal guarantees:
      * Setting w̃_k to zero moves the matrix by at most K² √(2m − 1) in Frobenius norm: one diagonal
        entry by K² and 2(m − 1) others by K² each. Replacing it moves these by 2K² each and the
        diagonal by none, K² √(8(m − 1)), where both have length K, which is the worst case for
        m ≥ 2. So in units of z the sensitivity is 1 (zero-out) and √(8(m − 1)/(2m − 1)) (replace;
        1 for a single client).
      * Σ + E + c·I is positive definite with probability at least 1 − e^(−t²/2), whatever Σ is.
      * With z = 0 there is no guarantee.

    Args:
      num_clients: m.
      psd_deviations: t ≥ 0 of the shift; None for no shift.

    Raises:
      ValueError: if there is no client, or t is negative; before a run, if the clients are not as
        many.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_clients}")
    rows, m = every_row(), num_clients
    check_deviations(psd_deviations)

    def release(accumulator, denominator, key, state, hparams, round_):
        del denominator
        z = round_value(hparams.noise_multiplier, round_)
        leaves = [leaf.reshape(m, -1) for leaf in jax.tree.leaves(accumulator.total)]
        w = jnp.concatenate(leaves, axis=1)
        total = symmetric(jnp.matmul(w, w.T, precision=jax.lax.Precision.HIGHEST))
        s = noise_scale(z, hparams.clip_norm, degree=2).astype(total.dtype) * math.sqrt(2 * m - 1)
        value = total + s * symmetric_normal(key, total)
        if psd_deviations is not None:
            value = shifted(value, s * spectral_bound(total.shape, psd_deviations))
        return Release(value, state, z)

    replace = math.sqrt(8 * (m - 1) / (2 * m - 1)) if m > 1 else 1.0
    event = PrivacyEvent("gaussian", zero_out=1.0, replace=replace)
    return rows._replace(event=event, release=release, num_clients=m)
