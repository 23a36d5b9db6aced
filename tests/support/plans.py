"""Plans in short, for the tests of accounting."""

import numpy as np

from fedjaxsim.privacy.accounting import composition, rdp
from fedjaxsim.privacy.entries import Adjacency, Entry, SamplingScheme
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend

POISSON = SamplingScheme("poisson", 205, 205)


def charged(scheme, event, *groups):
    """Return the charges of rounds (z, p, number)."""
    return PrivacySpend(scheme, event, tuple(Entry(*group) for group in groups))


def profile_of(*charges, adjacency: Adjacency = "zero_out", accountant="pld"):
    """Return the profile of charges by one accountant, or by the closed form."""
    [found] = composition.profiles(charges, adjacency, accountant)[0].values()
    return found


def poisson(*groups, adjacency: Adjacency = "zero_out", event=GAUSSIAN):
    """Return the profile of Poisson-sampled rounds (z, p, number)."""
    return profile_of(charged(POISSON, event, *groups), adjacency=adjacency)


def compose(*groups, orders=rdp.ORDERS):
    """Return RDP of Poisson-sampled Gaussian rounds (z, p, number), zero-out."""
    costs = (n * np.array(rdp.one_round(tuple(orders), z, p)) for z, p, n in groups)
    return sum(costs, np.zeros(len(orders)))
