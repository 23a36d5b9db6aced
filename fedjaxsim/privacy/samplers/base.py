"""Protocol of a sampler, and the sampler with full participation.

Shapes are static, so a cohort has a fixed capacity. The probability that a drawn cohort exceeds it
is part of the reported δ.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.hyperparameters import Hyperparameters, Records
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.samplers.availability import Availability, work_of


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
      availability: when drawn clients answer; None for always. `available` sets it.
    """

    for_clients: "Callable[[int], Sampler]"
    hyperparameters: Records = ()
    availability: Availability | None = None

    def sampler(self, num_clients: int) -> "Sampler":
        """Return the sampler of m clients, with their availability.

        Raises:
          ValueError: if m does not suit the sampler or the availability.
        """
        fits = self.availability and self.availability.num_clients
        if fits not in (None, num_clients):
            raise ValueError(
                f"the availability is of {fits} clients, but the population has {num_clients}"
            )
        made = self.for_clients(num_clients)
        return made if self.availability is None else made._replace(availability=self.availability)


class Sampler(NamedTuple):
    """A sampler of m clients, as pure functions.

    Attributes:
      scheme: the description that accountants read.
      draw: `(key, round, hparams) -> Cohort`; `key` is the run's key, so a sampler may plan over
        several rounds.
      rate: `(hparams) -> p`, (), the exact inclusion probability, charged to the ledger.
      rounds: the number of rounds before cohorts become empty; None for no limit.
      check: `(hparams)`; raises ValueError for unsuitable hyperparameters known on the host.
      availability: when drawn clients answer; None for always. `draw` and `rate` ignore it.
    """

    scheme: SamplingScheme
    draw: Callable[[jax.Array, jax.Array, Hyperparameters], Cohort]
    rate: Callable[[Hyperparameters], jax.Array]
    rounds: int | None = None
    check: Callable[[Hyperparameters], None] = lambda hparams: None
    availability: Availability | None = None

    @property
    def takes_all(self) -> bool:
        """Return whether all clients take part in every round."""
        return self.scheme.kind == "full" and self.availability is None

    def answer_rate(self, rate: jax.Array) -> jax.Array:
        """Return the mean probability that a client is drawn, with this rate, and answers."""
        return rate if self.availability is None else rate * self.availability.answers

    def answering(self, cohort: Cohort, key: jax.Array, round_: jax.Array) -> Cohort:
        """Return the clients of a cohort who answer; `key` is the round's key for clients."""
        if (availability := self.availability) is None:
            return cohort
        shares = jax.vmap(lambda k: work_of(availability, key, round_, k))(cohort.ids)
        mask, size = cohort.mask & (shares > 0), cohort.mask.shape[0]
        kept = jnp.nonzero(mask, size=size, fill_value=size)[0]
        ids = cohort.ids.at[kept].get(mode="fill", fill_value=self.scheme.clients)
        return cohort._replace(ids=ids, mask=jnp.arange(size) < jnp.sum(mask))


def available(sampling: Sampling, availability: Availability) -> Sampling:
    """Return the sampling with clients that answer at times, or do a part of their steps.

    All that are drawn are charged, so ε is that of the sampling alone.

    Args:
      sampling: draws the clients.
      availability: such as `intermittent()` or `recorded(trace)`.

    Raises:
      ValueError: if it is no availability.
    """
    if not isinstance(availability, Availability):
        raise ValueError(f"availability must be such as intermittent(), got {availability!r}")
    return sampling._replace(availability=availability)


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
