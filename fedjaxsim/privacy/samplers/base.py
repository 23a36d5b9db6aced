"""Protocol of a sampler, and the sampler with full participation.

Shapes are static, so a cohort has a fixed capacity. The probability that a drawn cohort exceeds it
is part of the reported δ.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.hyperparameters import Hyperparameters, Records
from fedjaxsim.privacy.events import SamplingScheme


class Cohort(NamedTuple):
    """The clients of one round, in a static number of slots.

    Attributes:
      ids: (capacity,) int32 client ids; m or more where mask is False.
      mask: (capacity,) bool; the filled slots come first.
      overflow: () int32, the number of drawn clients left out for lack of a slot.
    """

    ids: jax.Array
    mask: jax.Array
    overflow: jax.Array


class Sampling(NamedTuple):
    """A way to draw cohorts, for a population of any size.

    Attributes:
      for_clients: `(m) -> Sampler`; raises ValueError if m does not suit it.
      hyperparameters: records of the hyperparameters read; `hyperparameters.reads` sets them.
    """

    for_clients: "Callable[[int], Sampler]"
    hyperparameters: Records = ()


class Sampler(NamedTuple):
    """A sampler of m clients, as pure functions.

    Attributes:
      scheme: the description that accountants read.
      draw: `(key, round, hparams) -> Cohort`; `key` is the run's key, so a sampler may plan over
        several rounds.
      rate: `(hparams) -> p`, (), the exact inclusion probability, charged to the ledger.
      rounds: the number of rounds before cohorts become empty; None for no limit.
      check: `(hparams)`; raises ValueError for unsuitable hyperparameters known on the host.
    """

    scheme: SamplingScheme
    draw: Callable[[jax.Array, jax.Array, Hyperparameters], Cohort]
    rate: Callable[[Hyperparameters], jax.Array]
    rounds: int | None = None
    check: Callable[[Hyperparameters], None] = lambda hparams: None


def check_size(name: str, size: int, num_clients: int) -> None:
    """Raise ValueError unless `size` lies in [1, m]."""
    if not 1 <= size <= num_clients:
        raise ValueError(f"{name} must lie in [1, {num_clients}], got {size}")


def full_participation() -> Sampling:
    """Take all clients in every round.

    Formal guarantees:
      * Nothing is random, so nothing is amplified: p = 1.
    """
    return Sampling(_full)


def _full(num_clients: int) -> Sampler:
    scheme = SamplingScheme("full", num_clients, num_clients)

    def draw(key, round_, hparams):
        del key, round_, hparams
        ids = jnp.arange(num_clients, dtype=jnp.int32)
        return Cohort(ids, jnp.ones(num_clients, bool), jnp.zeros((), jnp.int32))

    return Sampler(scheme, draw, lambda hparams: jnp.ones(()))
