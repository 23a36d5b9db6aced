"""The Wishart mechanism as MP-MTL publishes it, for reproduction. It is not private."""

import jax
import jax.numpy as jnp

from fedjaxsim.hyperparameters import reads
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.events import Unprotected
from fedjaxsim.privacy.mechanisms import gram
from fedjaxsim.privacy.noise import normal


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def wishart(diagonal: bool = False) -> base.Mechanism:
    """Add Wishart noise to the Gram matrix of clipped messages (MP-MTL, Algorithm 1, step 5).

    release = Σ_k W̃_k W̃_kᵀ + E, W̃_k = clip(W_k, K), E ~ W_d(d + 1, (K²/(2ε)) I), with the paper's
    ε = 1/z: `noise_multiplier` = 1/ε.

    Formal guarantees:
      * None, and no ε is reported. The paper's Theorem 1 bounds a ratio of densities but ignores
        that their supports differ: E is positive definite, so the output exceeds the true matrix.
        If one client's vector is 0 in one data set and w, ‖w‖ = K, in its neighbour, a release at
        which E − wwᵀ is not positive definite comes from the first alone. The probability of that
        is P(wᵀE⁻¹w > 1) = P(χ²₂ < 2ε) = 1 − e^(−ε) exactly, so δ can be no smaller: 0.10 at ε =
        0.1, 0.63 at ε = 1. `gaussian_gram` and `pure_gram` are sound.
      * The release is positive definite.

    Args:
      diagonal: whether only the diagonal is released, (d,). The flaw is the same, with χ² of d + 1
        degrees of freedom.

    Raises:
      ValueError: `zero` raises it if a message is not one vector or matrix.
    """

    def noise(key, total, s):
        g = normal(key, (len(total), len(total) + 1), total.dtype)
        if diagonal:
            return s / 2 * jnp.sum(jnp.square(g), axis=1)
        return s / 2 * jnp.matmul(g, g.T, precision=jax.lax.Precision.HIGHEST)

    return gram.gram_mechanism(Unprotected(), diagonal, noise)
