"""Sums and means with other bounds or noise than `gaussian`, or with none."""

import dataclasses
import math
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.hyperparameters import Declarations, Hyperparameter, on_host, reads
from fedjaxsim.own_code import stamp
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.accounting.gaussian import inverse_series, square_root
from fedjaxsim.privacy.events import Correlated
from fedjaxsim.privacy.mechanisms import record
from fedjaxsim.privacy.mechanisms.record import (
    CLIP,
    EXACT_SUM,
    GAUSSIAN_NOISE,
    LAYERS,
    SUM,
    Adaptation,
    Bound,
    mechanism_of,
)

MOST_BANDS = 2**10
"""Most coefficients of banded noise."""
_OPEN = (math.nextafter(0, 1), math.nextafter(1, 0))
TARGET_QUANTILE = Hyperparameter(
    "target_quantile",
    default=0.5,
    range=_OPEN,
    allowed="lie in (0, 1)",
    help="γ of adaptive clipping, the share of messages that should not be clipped.",
)
CLIP_LEARNING_RATE = Hyperparameter(
    "clip_learning_rate",
    default=0.2,
    help="η_C of adaptive clipping, the step of log C.",
)
COUNT_NOISE = Hyperparameter(
    "count_noise",
    default=0.0,
    help="σ_b of adaptive clipping, the noise on the number of clipped messages, above z/2 where "
    "there is noise. (A run sets a twentieth of the expected cohort where it is not given.)",
)
CLIP_OF_PART = dataclasses.replace(
    base.CLIP_NORM, help="C of this part of a message, the bound on its L2 norm."
)
SHARE_OF_PART = Hyperparameter(
    "share",
    default=1.0,
    range=(1e-6, 1e6),
    allowed="lie in [1e-06, 1e+06]",
    scale="log",
    help="Share of this part of a message in 1/z², relative to other parts; more is less noise.",
)


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def pure() -> base.Mechanism:
    """Add noise of density ∝ exp(−‖E‖₂/(zC)) to the sum of clipped messages: pure ε-DP.

    release = (Σ_k clip(v_k, C) + E)/(p·m), the norms over the whole pytree. z scales the noise as
    in the other mechanisms, so a release at ε takes `noise_multiplier` = 2/ε (1/ε if only zero-out
    counts). ‖E‖ is zC times a Gamma(n) variable, n the number of parameters: about n zC, where
    Gaussian noise has √n zC.

    Formal guarantees:
      * The densities of neighbours differ by a factor of at most e^(Δ/(zC)) everywhere, Δ = C for
        zero-out and 2C for replace: (ε, 0)-DP with ε = 1/z and 2/z.
      * With z = 0, ε is ∞.
      * Poisson sampling amplifies: see `accounting/randomized_response.py`.
    """
    return mechanism_of(SUM, CLIP, record.PURE_NOISE)


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def per_layer(*, exact_sums: bool = False) -> base.Mechanism:
    """Clip each layer of a message by itself (McMahan et al. 2018, per-layer clipping).

    release = (Σ_k clip(v_k) + N(0, (zC)² I)) / (p·m): each of G layers is scaled to an L2 norm of
    at most C/√G, so that a large layer does not shrink the others. A layer is all leaves of a
    message with the same parent, such as "layer_0/kernel" and "layer_0/bias"; leaves without a
    parent are one layer.

    Formal guarantees:
      * The norm of a message is at most √(G (C/√G)²) = C, so all of `gaussian` holds, with the same
        noise.
      * A message with a layer that is not finite counts as zero.

    Args:
      exact_sums: Sum messages as integers, as in `gaussian`.
    """
    return mechanism_of(EXACT_SUM if exact_sums else SUM, LAYERS, GAUSSIAN_NOISE)


def _records_of(parts: Sequence[str]) -> Declarations:
    """Return the records of the clip norm of each part, and then of the share of each."""
    names = [re.sub(r"\W", "_", part) for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"parts must have different names, got {', '.join(parts)}")
    return tuple(
        dataclasses.replace(of_part, name=f"{of_part.name}_{name}")
        for of_part in (CLIP_OF_PART, SHARE_OF_PART)
        for name in names
    )


@reads(lambda parts=(), **_: _records_of(parts), base.NOISE_MULTIPLIER)
def per_part(*, parts: Sequence[str], exact_sums: bool = False) -> base.Mechanism:
    """Release several sums in one round, each with its own clip norm and noise.

    Part g of a message, all leaves whose path is or begins with its name, is clipped to C_g =
    `hparams.clip_NAME` and its sum gets N(0, (z_g C_g)² I). One z is charged for all parts,

        z_g = z √(Σ_h s_h / s_g),    so that  Σ_g z_g⁻² = z⁻²,

    with the shares s_g = `hparams.share_NAME`, 1 each by default: two parts have noise √2 z each.

        mechanism = per_part(parts=["update", "steps"])  # a message {"update": Δw, "steps": τ}
        sim.hyperparameters(clip_update=1.0, clip_steps=20.0, share_steps=0.1, noise_multiplier=1.0)

    Formal guarantees:
      * Setting one client's message to zero moves part g by at most C_g, z_g⁻¹ of its noise's
        deviation; replacing its data by twice as much. The parts are released together, by the same
        clients: they are one Gaussian release at distance √(Σ_g z_g⁻²) = 1/z (zero-out) and 2/z
        (replace), sampled or not.
      * Non-finite messages count as zero, all parts of them.
      * With z = 0 there is no guarantee.

    Args:
      parts: Names of the parts; each leaf of a message must be in exactly one.
      exact_sums: Sum messages as integers, as in `gaussian`.

    Raises:
      ValueError: if no part is named, or two have one name. `zero` raises it if a leaf is in no
        part or in two.
    """
    checks.count(**{"the number of parts": len(parts)})
    statistic = EXACT_SUM if exact_sums else SUM
    return mechanism_of(statistic, record.parts_bound(parts, _records_of(parts)), GAUSSIAN_NOISE)


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER, TARGET_QUANTILE, CLIP_LEARNING_RATE, COUNT_NOISE)
def adaptive_clipping(*, exact_sums: bool = False) -> base.Mechanism:
    """Adapt the clip norm to a quantile (Andrew, Thakkar, McMahan, Ramaswamy 2021, Algorithm 1).

    The state is the clip norm C, public, at first `hparams.clip`. A client adds its message
    clipped at C to a sum, and b_k to a count: +1/2 if the norm was at most C and −1/2 otherwise. A
    round releases both with noise and steps C towards the quantile γ:

        sum:    (Σ clip(v_k, C) + N(0, (z_Δ C)² I)) / (p·m),   z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2)
        count:  b̃ = 1/2 + (Σ b_k + N(0, σ_b²)) / (p·m)
        C ← C exp(−η_C (b̃ − γ))

    γ, η_C and σ_b are `hparams.target_quantile`, `clip_learning_rate` and `count_noise`; the paper
    takes 0.5, 0.2 and a twentieth of the expected cohort. The charged z covers the sum and the
    count together (their Theorem 1), so σ_b must exceed z/2; from σ_b = 3.6 z on, z_Δ is below 1.01
    z.

    Formal guarantees:
      * A client with a zero (or non-finite) message adds zero to the count, like an absent one. So
        zero-out moves the sum by at most C and the count by 1/2. Replacing moves each by twice as
        much, reached by v of norm above C against −v scaled to norm C.
      * In units of the noise of each part the squared distance is z_Δ⁻² + (2σ_b)⁻² = z⁻² for
        zero-out and 4 z⁻² for replace. One release is a Gaussian one of sensitivity 1 and 2 at z.
      * C is a function of earlier releases, kept within [1e-12, 1e15].
      * Where z > 0 and σ_b ≤ z/2 the charged z is NaN, and no ε is reported.

    Args:
      exact_sums: Sum messages as integers, as in `gaussian`.
    """

    def clip_norm(value):
        return jnp.clip(value, base.SMALLEST_CLIP_NORM, base.LARGEST_CLIP_NORM)

    def count(bounded):
        sends = bounded.messages.nonzero()
        return jnp.sum(jnp.where(sends, jnp.where(bounded.clipped, -0.5, 0.5), 0.0))

    def split(z, hparams):
        private = z > 0
        share = jnp.where(private, z / jnp.where(private, 2 * hparams.count_noise, 1.0), 0.0)
        valid = share < 1
        z_sum = jnp.where(valid, z / jnp.sqrt(jnp.where(valid, 1 - share**2, 1.0)), jnp.nan)
        return z_sum, jnp.where(valid, z, jnp.nan)

    def step(state, mean_count, hparams):
        unclipped = 0.5 + mean_count
        move = hparams.clip_learning_rate * (unclipped - hparams.target_quantile)
        return clip_norm(state * jnp.exp(-move))

    def check(hparams):
        first, z, sigma = map(
            on_host, (hparams.clip, hparams.noise_multiplier, hparams.count_noise)
        )
        if first is not None and not np.all(np.isfinite(first)):
            raise ValueError(f"clip of adaptive clipping must be finite, got {first}")
        if z is not None and sigma is not None and np.any((z > 0) & (2 * sigma <= z)):
            raise SettingError(
                Name("count_noise"),
                " must be above ",
                Name("noise_multiplier"),
                f"/2 = {np.max(z) / 2}, got {sigma}; a twentieth of the expected cohort is usual",
            )

    bound = Bound(
        "adaptive",
        lambda state, hparams: state,
        lambda messages, mask, state, hparams: messages.bound(state, mask),
        init=lambda hparams: clip_norm(hparams.clip),
        hyperparameters=(base.CLIP_NORM, TARGET_QUANTILE, CLIP_LEARNING_RATE, COUNT_NOISE),
        check=check,
        adaptation=Adaptation(count, split, lambda hparams: hparams.count_noise, step),
    )
    return mechanism_of(EXACT_SUM if exact_sums else SUM, stamp(bound), GAUSSIAN_NOISE)


@reads(base.CLIP_NORM, record.CONSTANT_NOISE)
def correlated(
    *,
    bands: int | None = None,
    power: float | None = None,
    coefficients: Sequence[float] | None = None,
) -> base.Mechanism:
    """Add Gaussian noise that later rounds take back in part (Kalinin et al. 2025).

    release_t = (Σ_k clip(v_k, C) + zC Σ_{j<b} d_j ξ_{t−j}) / denominator, with ξ_s a vector of
    independent standard normals for each round s, and d_j the coefficients of (1 − x)^power: 1,
    −power, …, all but the first negative. Noise of past rounds is drawn again from its keys, so
    there is no state, and a round draws b times the noise of `gaussian`.

    Formal guarantees:
      * All releases of a run are one Gaussian release of D⁻¹ applied to the sums
        (`accounting/gaussian.py`). The event describes the whole run: ε covers the rounds done, and
        no single round has a cost.
      * The samplers are those whose clients take part at known rounds: fixed groups in turn, and
        full participation. Every other one is refused.
      * The clip norm may follow earlier releases, as all noise of a round is scaled by its C. The
        noise multiplier may not change: no ε is reported then.
      * Each stage has its own noise and account.
      * With z = 0 there is no guarantee.

    Args:
      bands: Number b of rounds whose noise a release adds, by default 8; 1 is independent noise.
      power: Power of the coefficients in (0, 1], by default 1/2: near 1, more noise cancels and
        less is left for each participation.
      coefficients: d, (b,), in their place, up to a factor: those by which a strategy matrix is
        inverted, up to the last round. jax_privacy's `toeplitz.inverse_coef` finds them for its
        `BufferedToeplitz` (BLT, arXiv 2408.08868). The first is positive and no other is.

    Raises:
      ValueError: if coefficients are not such numbers, `bands` is another number than theirs, or
        `power` is given with them.
    """
    if coefficients is None:
        return mechanism_of(SUM, CLIP, record.correlated_noise(
            Correlated(bands=8 if bands is None else bands, power=0.5 if power is None else power)
        ))  # fmt: skip
    d = np.asarray(coefficients, np.float64)
    if d.ndim != 1 or not np.any(d[:1] > 0):
        raise ValueError(
            f"coefficients must be a list of numbers, the first positive, got {coefficients}"
        )
    checks.count(1, MOST_BANDS, **{"the number of coefficients": len(d)})
    if bands not in (None, len(d)):
        raise ValueError(f"bands must be {len(d)}, the number of coefficients, got {bands}")
    if power is not None:
        raise ValueError(f"power has no effect with coefficients: leave it out, got {power}")
    event = Correlated(bands=len(d), coefficients=tuple((d / d[0]).tolist()))
    return mechanism_of(SUM, CLIP, record.correlated_noise(event))


@reads(base.CLIP_NORM, record.CONSTANT_NOISE)
def banded(
    *, bands: int | None = None, coefficients: Sequence[float] | None = None
) -> base.Mechanism:
    """Add Gaussian noise that later rounds take back, amplified by sampling (BandMF).

    release_t = (Σ_k clip(v_k, C) + zC Σ_{j≤t} w_j ξ_{t−j}) / denominator, with ξ_s a vector of
    independent standard normals for each round s, and w the series of 1/c: the banded matrix
    factorization of Choquette-Choo et al. (2023, arXiv 2306.08153), c being the coefficients of its
    banded matrix, in order, with norm 1. By default they are C(2j, j)/4^j, the square root of the
    prefix sum.

    Noise of past rounds is drawn again from its keys, so there is no state: round t draws t + 1
    times the noise of `gaussian`, until w has decayed after some 20 times `bands` rounds.

        sampling = cyclic(groups=8)
        mechanism = banded(bands=8)

    Formal guarantees:
      * The samplers are those whose clients have turns at least `bands` rounds apart: `cyclic` and
        `fixed_groups` with as many groups or more. Every other one is refused.
      * A turn and the rounds until the next one are one release of `gaussian` with the same z, in
        which the client is with the probability of its turn (`accounting/gaussian.py`). So ε
        equals `gaussian`'s under the same sampler, in ⌈T/groups⌉ rounds.
      * The clip norm may follow earlier releases, as all noise of a round is scaled by its C. The
        noise multiplier may not change: no ε is reported then. Nor for rounds out of order.
      * Each stage has its own noise and account.
      * Weights w_j that are together below 2⁻⁴⁰ of the first are left out. That and float32 round
        the ideal noise.
      * With z = 0 there is no guarantee.

    Args:
      bands: Number b of coefficients, by default 8; 1 is independent noise.
      coefficients: c, (b,), up to a factor, such as the result of jax_privacy's
        `optimize_banded_toeplitz`.

    Raises:
      ValueError: if coefficients are not finite, the first is not positive, w does not decay, or
        `bands` is another number than theirs.
    """
    if coefficients is None:
        bands = 8 if bands is None else bands
        checks.count(1, MOST_BANDS, bands=bands)
        c = square_root(bands)
    else:
        c = np.asarray(coefficients, np.float64)
        if c.ndim != 1 or not np.all(np.isfinite(c)) or not np.any(c[:1] > 0):
            raise ValueError(
                "coefficients must be a list of finite numbers, the first positive, got "
                f"{coefficients}"
            )
        checks.count(1, MOST_BANDS, **{"the number of coefficients": len(c)})
        if bands not in (None, len(c)):
            raise ValueError(f"bands must be {len(c)}, the number of coefficients, got {bands}")
        c = c / np.linalg.norm(c)
        inverse_series(c.tolist())  # which must decay, as that of the default does
    return mechanism_of(SUM, CLIP, record.banded_noise(tuple(c.tolist())))


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def every_row() -> base.Mechanism:
    """Add Gaussian noise to the matrix of all clients' messages (PMTL, Figure 1).

    release = V + N(0, (zC)² I), leaves (m, …) for messages (…). Row k of V is clip(v_k, C) if
    client k is in the cohort, and 0 if not. Nothing is divided, and every row is noised in every
    round: a model that sums its row's releases gets one client's signal and the noise of all
    rounds. Client-level DP asks for this in multi-task learning where all models are published.

    Accumulator and release take the memory of m messages, on every device.

    Formal guarantees:
      * Setting one client's message to zero moves V by at most C, in one row alone; replacing its
        data by at most 2C. The noise has standard deviation zC in every coordinate. So in units of
        z the sensitivity is 1 (zero-out) and 2 (replace), and a release costs as much as one of
        `gaussian`, sampled or not.
      * Participation does not show in the noise, which is the same for all rows.
      * With z = 0 there is no guarantee.
    """
    return mechanism_of(record.ROWS, CLIP, GAUSSIAN_NOISE, "one")


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def client_noise() -> base.Mechanism:
    """Average messages noised at every client over the realised cohort, as DPFedMTL publishes it.

    release = (1/q) Σ_{k∈S} (clip(v_k, C) + N(0, (zC)² I)), 0 for an empty cohort; q is the size of
    the cohort S (DPFedMTL, equations 3 and 6, for one local step). The paper's noise of standard
    deviation σ · 2CK/M, for K of M clients, is z = 2σK/M. Nothing reads a single noised message, so
    one draw of N(0, q (zC)² I) replaces their sum, with the same distribution.

    Formal guarantees:
      * None, and no ε is reported. The mean is divided by a private number, the realised cohort
        size. The paper's Lemma 4.1 takes 2CK/M for the sensitivity of the average, which is 2C/K:
        it divides by the sampling rate and amplifies by it again. Local noise protects, but at this
        scale far less than the paper computes.
    """
    return mechanism_of(SUM, CLIP, record.CLIENTS_NOISE, "cohort")


def plain_mean() -> base.Mechanism:
    """Average the messages of the realised cohort, neither clipped nor noised.

    release = (1/q) Σ_{k∈S} v_k, 0 for an empty cohort; q is the size of the cohort S. For
    algorithms whose clients add noise in each local step, such as DPFedMTL. Non-finite messages
    count as zero.

    Formal guarantees:
      * None, and no ε is reported.
    """
    return mechanism_of(SUM, record.UNBOUNDED, record.NO_NOISE, "cohort")
