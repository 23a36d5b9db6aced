"""Who takes part in a round.

A sampler says which clients take part, with what probability (what the ledger is charged) and what
it guarantees. Cohorts have a static capacity, since shapes are static; how likely a cohort is to
exceed it is part of the reported δ.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.hyperparameters import Hyperparameter, Hyperparameters, Records, on_host, reads
from fedjaxsim.kernels import threefry
from fedjaxsim.privacy import binomial
from fedjaxsim.privacy.events import SamplingScheme
from fedjaxsim.privacy.samplers import blocks

BLOCK = 1024
"""Clients whose coins come from one key."""
FEW_CLIENTS = 2**13
"""Up to so many, a coin for every client costs no more than finding the drawn ones."""
MOST_EXCESS = 1e-6
"""The largest probability, per round, that a cohort exceeds its capacity: no δ carries more."""


class Cohort(NamedTuple):
    """The clients of one round, in a static number of places.

    Attributes:
      ids: (capacity,) int32 client ids; where mask is False, m or more and of no meaning.
      mask: (capacity,) bool; the places that are filled come first.
      overflow: () int32, how many drawn clients did not fit and were left out.
    """

    ids: jax.Array
    mask: jax.Array
    overflow: jax.Array


SAMPLING_RATE = Hyperparameter(
    "sampling_rate",
    default=0.2,
    range=(math.nextafter(0, 1), 1.0),
    allowed="lie in (0, 1]",
    symbol="p",
    help="p, the probability that a client takes part in a round.",
)


class Sampling(NamedTuple):
    """A way to draw cohorts, for a population of any size.

    Attributes:
      for_clients: `(m) -> Sampler`; raises ValueError where m does not suit it.
      hyperparameters: the records of what its samplers read; `hyperparameters.reads` sets them.
    """

    for_clients: "Callable[[int], Sampler]"
    hyperparameters: Records = ()


class Sampler(NamedTuple):
    """A sampler of m clients, as pure functions.

    Attributes:
      scheme: what the accountants need to know of it.
      draw: `(key, round, hparams) -> Cohort`; `key` belongs to the run, so that a sampler may plan
        over several rounds.
      rate: `(hparams) -> p`, the probability that a client is really drawn with, ().
      rounds: how many rounds it can serve, after which its cohorts are empty; None for any number.
      check: `(hparams)`: raises ValueError where hyperparameters that are known on the host do not
        suit the sampler.
    """

    scheme: SamplingScheme
    draw: Callable[[jax.Array, jax.Array, Hyperparameters], Cohort]
    rate: Callable[[Hyperparameters], jax.Array]
    rounds: int | None = None
    check: Callable[[Hyperparameters], None] = lambda hparams: None


def default_capacity(num_clients: int, sampling_rate: float, tail: float = 1e-30) -> int:
    """The smallest capacity B with P(Bin(m, p) > B) ≤ tail.

    Args:
      num_clients: m.
      sampling_rate: p in (0, 1].
      tail: the probability, per round, that a cohort does not fit.
    """
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"sampling_rate must lie in (0, 1], got {sampling_rate}")
    return min(num_clients, max(1, binomial.least_count(tail, num_clients, sampling_rate)))


def _largest_rate(num_clients: int, capacity: int) -> float:
    """The largest p with P(Bin(m, p) > B) ≤ 1e-6, by the law of the (B + 1)-th smallest uniform."""
    if capacity == num_clients:
        return 1.0
    return binomial.largest_probability(MOST_EXCESS, capacity, num_clients)


def _threshold(sampling_rate: jax.Array) -> jax.Array:
    """floor(p·2³²) as uint32, for p < 1. Exact: scaling by a power of two does not round."""
    return jnp.floor(jax.lax.stop_gradient(sampling_rate) * 2.0**32).astype(jnp.uint32)


def _coins(key: jax.Array, p: jax.Array, num_clients: int) -> tuple[jax.Array, ...]:
    """A coin for every client: ids (m,), which are drawn (m,), and 0 that found no place."""

    def block_bits(block):
        return threefry.bits(threefry.fold_in(key, block), (BLOCK,))

    bits = jax.vmap(block_bits)(jnp.arange(math.ceil(num_clients / BLOCK)))
    drawn = (bits.reshape(-1)[:num_clients] < _threshold(p)) | (p >= 1)
    return jnp.arange(num_clients, dtype=jnp.int32), drawn, jnp.int32(0)


@reads(lambda sampling_rate, **_: (dataclasses.replace(SAMPLING_RATE, default=sampling_rate),))
def poisson(
    sampling_rate: float = 0.2, *, max_rate: float | None = None, capacity: int | None = None
) -> Sampling:
    """Poisson sampling: every client takes part independently with probability p.

    p is `hparams.sampling_rate`, by default `sampling_rate`, and may be swept without recompiling
    up to `max_rate`. It is never differentiated. Two methods draw the
    same distribution; m and the capacity alone decide between them, so that one seed gives the same
    cohorts however a run is laid out (but others when the method changes):

    * Up to 8,192 clients, or for a capacity that suits rates above 1/32, every client has a coin:
      32 random bits, as an integer, are compared with floor(p·2³²). (Comparing float32 uniforms
      with p would include too often for small p.)
    * Otherwise `blocks.draw` takes time in proportion to the cohort. Rates for which a cohort would
      exceed the capacity with probability above 1e-6 are refused; where p is traced and cannot be,
      it stops at twice the largest p allowed or before.

    Formal guarantees:
      * Clients are drawn independently of each other, of the data and of the rounds before; the
        random bits belong to the key, the round and fixed blocks of ids.
      * A client is in with exactly the probability that the ledger is charged: floor(p·2³²)/2³² by
        coins; by blocks p itself, for a float32 p. By blocks this holds up to a total variation
        distance below 1e-30 a round, which no reported δ can resolve.
      * A cohort that exceeds the capacity loses members chosen uniformly, whatever their ids. The
        probability of that, P(Bin(m, p) > capacity) per round, is part of the reported δ.
      * The realised cohort size stays inside the engine: sums are divided by p·m.

    The accountants of Poisson sampling describe it ("pld" and "rdp"), in both views.

    Args:
      sampling_rate: p, the default of `hparams.sampling_rate`.
      max_rate: Largest p that `hparams.sampling_rate` will take, by default `sampling_rate`;
        sets the default capacity.
      capacity: Number of places in a cohort. By default the smallest for which a cohort
        drawn at `max_rate` does not fit with probability at most 1e-30: in a million rounds
        (1 + e^ε) times that stays below 1e-11 up to ε = 30.

    Raises:
      ValueError: if a rate lies outside (0, 1], or `max_rate` is below `sampling_rate`; for a
        population, if the capacity is below 1 or above m.
    """
    largest_rate = sampling_rate if max_rate is None else max_rate
    for name, rate in (("sampling_rate", sampling_rate), ("max_rate", largest_rate)):
        if not 0 < rate <= 1:
            raise ValueError(f"{name} must lie in (0, 1], got {rate}")
    if largest_rate < sampling_rate:
        raise ValueError(f"max_rate must be at least sampling_rate {sampling_rate}, got {max_rate}")
    return Sampling(lambda num_clients: _poisson(num_clients, largest_rate, capacity))


def _poisson(num_clients: int, max_rate: float, capacity: int | None) -> Sampler:
    """Return the Poisson sampler of m clients."""
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_clients}")
    places = default_capacity(num_clients, max_rate) if capacity is None else capacity
    if not 1 <= places <= num_clients:
        raise ValueError(f"capacity must lie in [1, {num_clients}], got {places}")
    largest = _largest_rate(num_clients, places)
    by_blocks = num_clients > FEW_CLIENTS and largest <= blocks.LARGEST_RATE

    def draw(key, round_, hparams):
        first, second, offset_key = threefry.split(threefry.fold_in(key, round_), 3)
        if by_blocks:
            found = blocks.draw(first, second, hparams.sampling_rate, num_clients, largest)
        else:
            found = _coins(first, hparams.sampling_rate, num_clients)
        ids, drawn, missed = found
        count = jnp.sum(drawn, dtype=jnp.int32)
        # Ranks are rotated by a random offset, so that an over-full cohort loses every member with
        # the same probability.
        offset = threefry.randint(offset_key, (), jnp.maximum(count, 1))
        offset = jnp.where(count > places, offset, 0)
        rank = (jnp.cumsum(drawn, dtype=jnp.int32) - 1 - offset) % jnp.maximum(count, 1)
        kept = jnp.nonzero(drawn & (rank < places), size=places, fill_value=ids.shape[0])[0]
        return Cohort(
            ids.at[kept].get(mode="fill", fill_value=num_clients),
            jnp.arange(places) < count,
            jnp.maximum(count - places, 0) + missed,
        )

    def rate(hparams):
        p = jax.lax.stop_gradient(hparams.sampling_rate)
        if by_blocks:
            return blocks.charged_rate(p, largest)
        return jnp.where(p >= 1, 1.0, _threshold(p).astype(p.dtype) * 2.0**-32)

    scheme = SamplingScheme("poisson", num_clients, places)

    def check(hparams):
        p = on_host(hparams.sampling_rate)
        for value in () if p is None else np.ravel(p):
            _check_rate(scheme, float(value))

    return Sampler(scheme, draw, rate, check=check)


def full_participation() -> Sampling:
    """Every client takes part in every round.

    Formal guarantees:
      * Nothing is random, so nothing is amplified: p = 1.
    """
    return Sampling(_everyone)


def _everyone(num_clients: int) -> Sampler:
    """Return the sampler of all m clients."""
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_clients}")

    def draw(key, round_, hparams):
        del key, round_, hparams
        return Cohort(
            jnp.arange(num_clients, dtype=jnp.int32),
            jnp.ones(num_clients, bool),
            jnp.zeros((), jnp.int32),
        )

    return Sampler(
        SamplingScheme("full", num_clients, num_clients), draw, lambda hparams: jnp.ones(())
    )


def _check_rate(scheme: SamplingScheme, sampling_rate: float) -> None:
    """Check that a sampling rate suits the capacity of a Poisson scheme.

    Raises:
      ValueError: if p rounds to 0, or if a round would exceed the capacity with a probability that
        no δ can carry (above 1e-6).
    """
    if sampling_rate * 2.0**32 < 1:
        raise ValueError(f"sampling_rate must be at least 2^-32, got {sampling_rate}")
    excess = binomial.excess(scheme.capacity, scheme.clients, float(sampling_rate))
    if excess > MOST_EXCESS:
        raise ValueError(
            f"sampling_rate {sampling_rate} of {scheme.clients} clients exceeds the cohort "
            f"capacity of {scheme.capacity} with probability {excess:.2g} a round; the capacity "
            f"must be at least {default_capacity(scheme.clients, sampling_rate)}"
        )
