"""Cohorts of a fixed size, seen by an adversary without knowledge of participation.

The RDP of the Gaussian mechanism on a uniformly random cohort of exactly q of m clients, when the
adversary sees the released sequence alone (Wang, Balle and Kasiviswanathan 2019, Theorem 27). The
other clients are no such adversary: see `mixture`.

The theorem compares three cohorts at a time: with the client, with its replacement, and with
another client in its place, all within the *replacement* distance of each other. So z counts
relative to that distance, and zeroing a client's message, one way to replace its data, gets the
same number.
"""

import functools
from collections.abc import Sequence

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from fedjaxsim.privacy.accounting.rdp import INTEGER_ORDERS
from fedjaxsim.privacy.events import Entry


@functools.lru_cache(maxsize=128)
def _one_round(z: float, cohort: int, clients: int) -> tuple[float, ...]:
    """Compute RDP at INTEGER_ORDERS of one round, z relative to the distance of a replacement."""
    accountant = RdpAccountant(INTEGER_ORDERS, NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(z)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, gaussian))
    return tuple(accountant.rdp)


def compose(entries: Sequence[Entry], cohort: int, clients: int, distance: float) -> np.ndarray:
    """Compute RDP of all rounds at INTEGER_ORDERS, (72,), with z > 0.

    `distance` is the sensitivity to a replacement, in units of z.
    """
    total = np.zeros(len(INTEGER_ORDERS))
    for z, _, rounds in entries:
        if z < np.inf:
            total += rounds * np.array(_one_round(z / distance, cohort, clients))
    return total
