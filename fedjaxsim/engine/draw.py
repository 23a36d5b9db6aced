"""The first part of a round: who takes part, and from which keys, known from the key alone."""

from typing import NamedTuple

import jax

from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import threefry
from fedjaxsim.privacy.samplers import Cohort, Sampler

_ORDER = 2**32 - 1
"""Folded into the clients' key for what lasts the whole run; rounds are numbered below 2³¹."""


class Draw(NamedTuple):
    """All that is random about one round.

    Attributes:
      cohort: who takes part.
      rate: () the probability p that each client was drawn with.
      clients: the round's key for clients; each one's own is `fold_in(key, id)`.
      order: the run's key for the orders in which minibatches are consumed.
      noise: the key of the mechanism's noise.
    """

    cohort: Cohort
    rate: jax.Array
    clients: jax.Array
    order: jax.Array
    noise: jax.Array


def draw(
    sampling: Sampler,
    key: jax.Array,
    round_: jax.Array,
    hparams: Hyperparameters,
) -> Draw:
    """Draw a round from the key alone, so that it can be computed any number of rounds ahead.

    Args:
      sampling: who takes part.
      key: the run's.
      round_: () int32.
      hparams: hyperparameters.
    """
    keys = threefry.split(key, 3)
    for_sampling, for_clients, for_noise = keys[0], keys[1], keys[2]
    for_noise = threefry.fold_in(threefry.fold_in(for_noise, 0), 0)
    return Draw(
        cohort=sampling.draw(for_sampling, round_, hparams),
        rate=sampling.rate(hparams),
        clients=threefry.fold_in(for_clients, round_),
        order=threefry.fold_in(for_clients, _ORDER),
        noise=threefry.fold_in(for_noise, round_),
    )
