"""Passes over the population in random order, with a cap on participations."""

import math

import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.kernels import threefry
from fedjaxsim.kernels.permutation import permuted
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.samplers.base import Cohort, Sampler, Sampling


def passes(*, cohort: int, max_participations: int) -> Sampling:
    """Cut a fresh random order of the clients into cohorts of q, once per pass.

    The cohort of round t depends on the run's key and t alone: number t mod R of pass ⌊t/R⌋, with R
    = ⌈m/q⌉; the last one of a pass holds the remaining clients. After `max_participations` passes,
    `Sampler.rounds` rounds in all, cohorts are empty.

    Formal guarantees:
      * Every client takes part exactly once in a pass (the order is a permutation whatever the
        random bits), so at most `max_participations` times in a run of any length.
      * Nothing else is claimed: the schedule may be public, and sampling hides nothing in either
        view. Accountant "gaussian", of `max_participations` releases (those with the least noise).
      * Sums are divided by q, also in the smaller cohort at the end of a pass.

    Args:
      cohort: Number q of clients in every cohort.
      max_participations: Largest number of participations of one client, the number of passes.

    Raises:
      ValueError: for a population, if q lies outside [1, m]; if the cap is below 1.
    """
    return Sampling(lambda num_clients: _passes(num_clients, cohort, max_participations))


def _passes(num_clients: int, cohort: int, max_participations: int) -> Sampler:
    checks.count(1, num_clients, cohort=cohort)
    scheme = SamplingScheme("capped", num_clients, cohort, max_participations)
    per_pass = math.ceil(num_clients / cohort)

    def draw(key, round_, hparams):
        del hparams
        number, part = round_ // per_pass, round_ % per_pass
        position = part * cohort + jnp.arange(cohort)
        mask = (position < num_clients) & (number < max_participations)
        order = threefry.fold_in(key, number)
        ids = permuted(
            order, jnp.where(position < num_clients, position, 0), jnp.int32(num_clients)
        )
        ids = jnp.where(mask, ids, num_clients).astype(jnp.int32)
        return Cohort(ids, mask, jnp.zeros((), jnp.int32))

    return Sampler(
        scheme,
        draw,
        lambda hparams: jnp.asarray(cohort / num_clients),
        rounds=per_pass * max_participations,
    )
