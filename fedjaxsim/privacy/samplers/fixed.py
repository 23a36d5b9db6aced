"""Cohorts of a fixed size, drawn uniformly without replacement."""

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.kernels import threefry
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.samplers.base import Cohort, Sampler, Sampling

_TAIL = 1e-18  # probability, per round, of too few distinct clients among the draws


def _distinct(key: jax.Array, count: int, num_clients: int) -> jax.Array:
    """Return the first `count` distinct ids among independent uniform ones: a uniform subset.

    Ids are drawn as whole bits and those of m or more rejected, so all are equally likely. `count`
    is at most (m + 1)/2, so a draw is new and valid with probability 1/4 or more. Ids are m where
    the draws did not suffice (probability below 1e-18).
    """
    from scipy.stats import nbinom  # slow to import

    bits = max(1, (num_clients - 1).bit_length())
    # Each draw is new and valid at least as often as the last one.
    worst = (num_clients - count + 1) / 2**bits
    draws = count + int(nbinom.isf(_TAIL, count, worst))
    ids = (threefry.bits(key, (draws,)) >> (32 - bits)).astype(jnp.int32)
    order = jnp.arange(draws)
    by_id, when = jax.lax.sort((ids, order), num_keys=1, is_stable=True)
    new = jnp.concatenate([jnp.ones(1, bool), by_id[1:] != by_id[:-1]])
    new = jnp.zeros(draws, bool).at[when].set(new, unique_indices=True)
    chosen = jnp.nonzero(new & (ids < num_clients), size=count, fill_value=draws)[0]
    return ids.at[chosen].get(mode="fill", fill_value=num_clients)


def fixed_size(*, cohort: int) -> Sampling:
    """Draw exactly q of m clients, a uniformly random subset, independently in every round.

    A draw takes O(q log q) time, or O(m) where q exceeds m/2.

    Formal guarantees:
      * Every subset of q clients is equally likely, whatever the data and earlier rounds, and q is
        public. (Except with probability below 1e-18 a round: the cohort then has fewer members, or,
        where q exceeds m/2, is biased towards low ids.)
      * Each client is in with probability q/m, which the ledger is charged, but clients are *not*
        independent: the bits of all others determine a client's own. So sampling hides nothing in
        the joint-DP view, and only the number of a client's participations, Bin(T, q/m), is random.

    Args:
      cohort: Number q of clients in every cohort.

    Raises:
      ValueError: for a population, if q lies outside [1, m].
    """
    return Sampling(lambda num_clients: _fixed_size(num_clients, cohort))


def _fixed_size(num_clients: int, cohort: int) -> Sampler:
    checks.count(1, num_clients, cohort=cohort)
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
