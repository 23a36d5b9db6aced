"""Fixed groups of clients in turn, so that two participations are always as many rounds apart."""

import math

import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.kernels.permutation import permuted
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.samplers.base import Cohort, Sampler, Sampling


def fixed_groups(*, groups: int) -> Sampling:
    """Divide the clients into groups once, at random; group t mod `groups` takes part in round t.

    Groups differ in size by one client at most; sums are divided by m/`groups`.

    Formal guarantees:
      * A client takes part in every `groups`-th round and in no other: two participations are
        exactly `groups` rounds apart (the order of clients is a permutation whatever the random
        bits), unlike in passes in an order drawn anew.
      * Nothing else is claimed: groups may be public, and sampling hides nothing in either view.
        Accountants "gaussian", and "correlated" for noise that is correlated over rounds.

    Args:
      groups: Number of groups, the rounds between two participations of a client.

    Raises:
      ValueError: for a population, if `groups` lies outside [1, m].
    """
    return Sampling(lambda num_clients: _fixed_groups(num_clients, groups))


def _fixed_groups(num_clients: int, groups: int) -> Sampler:
    checks.count(1, num_clients, groups=groups)
    size = math.ceil(num_clients / groups)

    def draw(key, round_, hparams):
        del hparams
        position = jnp.arange(size) * groups + round_ % groups
        mask = position < num_clients
        ids = permuted(key, jnp.where(mask, position, 0), jnp.int32(num_clients))
        ids = jnp.where(mask, ids, num_clients).astype(jnp.int32)
        return Cohort(ids, mask, jnp.zeros((), jnp.int32))

    return Sampler(
        SamplingScheme("groups", num_clients, size, groups=groups),
        draw,
        lambda hparams: jnp.asarray(1 / groups),
    )
