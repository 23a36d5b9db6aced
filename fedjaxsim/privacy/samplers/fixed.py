"""Cohorts of a fixed size, drawn uniformly without replacement."""

import jax
import jax.numpy as jnp
import scipy.stats

from fedjaxsim.kernels import threefry
from fedjaxsim.privacy.events import SamplingScheme
from fedjaxsim.privacy.sampling import Cohort, Sampler, Sampling

_TAIL = 1e-18  # probability, per round, that too few different clients are among the draws


def _distinct(key: jax.Array, count: int, num_clients: int) -> jax.Array:
    """The first `count` different ids among independent uniform ones: a uniform subset.

    Ids are drawn as whole bits and those of m or more rejected, so that all are equally likely.

    Args:
      key: random key.
      count: at most (m + 1)/2, so that a draw is new and valid with probability 1/4 or more.
      num_clients: m.

    Returns:
      (count,) int32; m where the draws did not suffice (probability below 1e-18).
    """
    bits = max(1, (num_clients - 1).bit_length())
    # Each draw is new and valid at least as often as the last one needed.
    worst = (num_clients - count + 1) / 2**bits
    draws = count + int(scipy.stats.nbinom.isf(_TAIL, count, worst))
    ids = (threefry.bits(key, (draws,)) >> (32 - bits)).astype(jnp.int32)
    order = jnp.arange(draws)
    by_id, when = jax.lax.sort((ids, order), num_keys=1, is_stable=True)
    new = jnp.concatenate([jnp.ones(1, bool), by_id[1:] != by_id[:-1]])
    new = jnp.zeros(draws, bool).at[when].set(new, unique_indices=True)
    chosen = jnp.nonzero(new & (ids < num_clients), size=count, fill_value=draws)[0]
    return ids.at[chosen].get(mode="fill", fill_value=num_clients)


def fixed_size(*, cohort: int) -> Sampling:
    """Exactly q of m clients, a uniformly random subset, independently in every round.

    Costs time in proportion to q log q, or to m where q is more than half of it.

    Formal guarantees:
      * Every subset of q clients is equally likely, whatever the data and the rounds before, and
        q is public. (But with probability below 1e-18 a round: the cohort then has fewer members,
        or, where q is more than half of m, is one of those that low ids are more often in.)
      * Each client is in with probability q/m, which the ledger is charged, but clients are *not*
        independent: whoever knows the bits of all others knows a client's own. So in the joint-DP
        view sampling hides nothing, and only the number of a client's participations, Bin(T, q/m),
        is random: accountant "mixture". A reader of the releases alone sees the amplification of
        sampling without replacement.

    Args:
      cohort: Number q of clients in every cohort.

    Raises:
      ValueError: for a population, if q lies outside [1, m].
    """
    return Sampling(lambda num_clients: _fixed_size(num_clients, cohort))


def _fixed_size(num_clients: int, cohort: int) -> Sampler:
    """Return the sampler of m clients."""
    if not 1 <= cohort <= num_clients:
        raise ValueError(f"cohort must lie in [1, {num_clients}], got {cohort}")
    left_out = num_clients - cohort

    def draw(key, round_, hparams):
        del hparams
        key = threefry.fold_in(key, round_)
        if left_out == 0:
            ids = jnp.arange(num_clients, dtype=jnp.int32)
        elif cohort <= left_out:
            ids = _distinct(key, cohort, num_clients)
        else:
            outside = _distinct(key, left_out, num_clients)
            member = jnp.ones(num_clients, bool).at[outside].set(False, mode="drop")
            ids = jnp.nonzero(member, size=cohort)[0].astype(jnp.int32)
        return Cohort(ids, ids < num_clients, jnp.zeros((), jnp.int32))

    return Sampler(
        SamplingScheme("fixed", num_clients, cohort),
        draw,
        lambda hparams: jnp.asarray(cohort / num_clients),
    )
