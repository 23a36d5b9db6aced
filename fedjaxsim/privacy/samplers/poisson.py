"""Poisson sampling: every client takes part independently with the same probability."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.hyperparameters import Hyperparameter, on_host, reads
from fedjaxsim.kernels import backend, threefry
from fedjaxsim.privacy import binomial
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.samplers import blocks
from fedjaxsim.privacy.samplers.base import Cohort, Sampler, Sampling

BLOCK = 1024
"""Number of clients whose coins come from one key."""
FEW_CLIENTS = 2**13
"""Up to this number of clients a coin for each costs no more than `blocks.draw`."""
MOST_EXCESS = 1e-6
"""Largest probability, per round, that a cohort exceeds its capacity: no δ carries more."""

USUAL_RATE: Literal["max(0.2, 10 / clients)"] = "max(0.2, 10 / clients)"
"""The default rate: a fifth of the clients, but ten of few ones and at most all."""
SAMPLING_RATE = Hyperparameter(
    "sampling_rate",
    default=USUAL_RATE,
    range=(math.nextafter(0, 1), 1.0),
    allowed="lie in (0, 1]",
    symbol="p",
    help="p, the probability that a client takes part in a round.",
)


def usual_rate(num_clients: int) -> float:
    """Return the default rate for m clients, `USUAL_RATE`."""
    return min(1.0, max(0.2, 10 / num_clients))


def default_capacity(num_clients: int, sampling_rate: float, tail: float = 1e-30) -> int:
    """Return the smallest capacity B with P(Bin(m, p) > B) ≤ `tail`."""
    return min(num_clients, max(1, binomial.least_count(tail, num_clients, sampling_rate)))


def _threshold(sampling_rate: jax.Array) -> jax.Array:
    """Return floor(p·2³²) as uint32, for p < 1. Exact: a power of two scales without rounding."""
    return jnp.floor(jax.lax.stop_gradient(sampling_rate) * 2.0**32).astype(jnp.uint32)


def _coins(key: jax.Array, p: jax.Array, num_clients: int) -> tuple[jax.Array, ...]:
    """Toss a coin per client: ids (m,), whether drawn (m,), and 0 clients without a slot."""

    def block_bits(block):
        return threefry.bits(threefry.fold_in(key, block), (BLOCK,))

    bits = jax.vmap(block_bits)(jnp.arange(math.ceil(num_clients / BLOCK)))
    drawn = (bits.reshape(-1)[:num_clients] < _threshold(p)) | (p >= 1)
    return jnp.arange(num_clients, dtype=jnp.int32), drawn, jnp.int32(0)


@reads(
    lambda sampling_rate, **_: (
        SAMPLING_RATE
        if sampling_rate is None
        else dataclasses.replace(SAMPLING_RATE, default=float(sampling_rate)),
    )
)
def poisson(
    sampling_rate: float | None = None,
    *,
    max_rate: float | None = None,
    capacity: int | None = None,
) -> Sampling:
    """Draw every client independently with probability p (Poisson sampling).

    p is `hparams.sampling_rate`; it may be swept up to `max_rate` without recompiling and is never
    differentiated. Two methods draw the same distribution. m and the capacity alone select one, so
    a seed gives the same cohorts on every placement (but others when the method changes):

    * Up to 8,192 clients, or for a capacity that suits rates above 1/32: 32 random bits per client,
      as an integer, are compared with floor(p·2³²). (Float32 uniforms would include small p too
      often.)
    * Otherwise `blocks.draw`, in time proportional to the cohort. A rate at which a cohort exceeds
      the capacity with probability above 1e-6 is refused; a traced rate cannot be, and is capped at
      no more than twice the largest rate allowed.

    Formal guarantees:
      * Clients are drawn independently of each other, of the data and of earlier rounds; random
        bits belong to the key, the round and fixed blocks of ids.
      * The inclusion probability is the charged one: floor(p·2³²)/2³² by coins; by blocks p itself,
        for a float32 p, up to a total variation distance below 1e-30 a round.
      * A cohort above capacity keeps a uniformly random part of its members. What that tells others
        is part of the price; see `SamplingScheme.inclusions`.
      * The realised cohort size stays inside the engine: sums are divided by p·m.

    Accountants: "pld" and "rdp", in both views.

    Args:
      sampling_rate: p, the default of `hparams.sampling_rate`. By default a fifth of the clients is
        expected, but at least 10, so that few clients leave few rounds empty.
      max_rate: Largest p that `hparams.sampling_rate` will take, by default `sampling_rate`;
        sets the default capacity.
      capacity: Number of slots in a cohort. By default the smallest that a cohort drawn at
        `max_rate` exceeds with probability at most 1e-30: in a million rounds, (1 + e^ε) times that
        stays below 1e-11 up to ε = 30.

    Raises:
      ValueError: if a rate lies outside (0, 1], or `max_rate` is below `sampling_rate`; for a
        population, if the capacity lies outside [1, m].
    """
    for name, rate in (("sampling_rate", sampling_rate), ("max_rate", max_rate)):
        if rate is not None:
            dataclasses.replace(SAMPLING_RATE, name=name).check(rate)
    if max_rate is not None and sampling_rate is not None and max_rate < sampling_rate:
        raise ValueError(f"max_rate must be at least sampling_rate {sampling_rate}, got {max_rate}")

    def for_clients(num_clients: int) -> Sampler:
        usual = usual_rate(num_clients) if sampling_rate is None else sampling_rate
        largest = usual if max_rate is None else max_rate
        return _poisson(num_clients, min(usual, largest), largest, capacity)

    return Sampling(for_clients)


def _poisson(num_clients: int, usual: float, max_rate: float, capacity: int | None) -> Sampler:
    slots = default_capacity(num_clients, max_rate) if capacity is None else capacity
    scheme = SamplingScheme("poisson", num_clients, slots)
    # The largest p with P(Bin(m, p) > B) ≤ MOST_EXCESS.
    largest = 1.0
    if slots < num_clients:
        largest = binomial.largest_probability(MOST_EXCESS, slots, num_clients)
    by_blocks = num_clients > FEW_CLIENTS and largest <= blocks.LARGEST_RATE

    def draw(key, round_, hparams):
        first, second, keep_key = threefry.split(threefry.fold_in(key, round_), 3)
        p = hparams.sampling_rate
        if by_blocks:
            ids, drawn, missed = blocks.draw(first, second, p, num_clients, largest)
        else:
            ids, drawn, missed = _coins(first, p, num_clients)
        count = jnp.sum(drawn, dtype=jnp.int32)

        def some(drawn):
            """Keep a uniformly random part: those with the smallest random numbers."""
            priority = jnp.where(drawn, threefry.bits(keep_key, drawn.shape), np.uint32(2**32 - 1))
            return drawn & (priority <= jnp.sort(priority)[slots - 1])

        if slots < drawn.shape[0]:
            if backend.platform() == "gpu":  # whose host would wait for a branch; some may be all
                drawn = some(drawn)
            else:
                drawn = jax.lax.cond(count > slots, some, lambda drawn: drawn, drawn)
        kept = jnp.nonzero(drawn, size=slots, fill_value=ids.shape[0])[0]
        return Cohort(
            ids.at[kept].get(mode="fill", fill_value=num_clients),
            jnp.arange(slots) < count,
            jnp.maximum(count - slots, 0) + missed,
        )

    def rate(hparams):
        p = jax.lax.stop_gradient(jnp.asarray(hparams.get("sampling_rate", usual), float))
        if by_blocks:
            return blocks.charged_rate(p, largest)
        return jnp.where(p >= 1, 1.0, _threshold(p).astype(p.dtype) * 2.0**-32)

    def check(hparams):
        p = on_host(hparams.sampling_rate)
        for value in () if p is None else np.ravel(p):
            _check_rate(scheme, float(value))

    return Sampler(scheme, draw, rate, check=check)


def _check_rate(scheme: SamplingScheme, sampling_rate: float) -> None:
    """Raise ValueError if p rounds to 0 or exceeds the capacity too often for any δ."""
    if sampling_rate * 2.0**32 < 1:
        raise ValueError(f"sampling_rate must be at least 2^-32, got {sampling_rate}")
    excess = binomial.excess(scheme.capacity, scheme.clients, sampling_rate)
    if excess > MOST_EXCESS:
        raise ValueError(
            f"sampling_rate {sampling_rate} of {scheme.clients} clients exceeds the cohort "
            f"capacity of {scheme.capacity} with probability {excess:.2g} a round; the capacity "
            f"must be at least {default_capacity(scheme.clients, sampling_rate)}"
        )
