"""The privacy profile of examples in Poisson minibatches of one client.

Each of n rows is in a minibatch with probability q = min(1, b/n), and the sum of clipped gradients
gets Gaussian noise: a Poisson-subsampled Gaussian release, composed as privacy losses. Clients with
the same numbers share one computation.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.accounting.profile import NOTHING, UNPROTECTED, Profile, with_failure
from fedjaxsim.privacy.entries import Adjacency, Entry, SamplingScheme
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend


class Minibatches(NamedTuple):
    """Equal minibatches of one client.

    Attributes:
      rows: n, public.
      size: b, the expected size.
      number: T.
      noise_multiplier: z, the noise on the sum of clipped gradients over the clip norm; for G
        gradients of one minibatch z/√G.
      capacity: places of a minibatch; None for enough. A larger minibatch loses examples, whichever
        they are.
    """

    rows: int
    size: int
    number: int
    noise_multiplier: float
    capacity: int | None = None

    @property
    def rate(self) -> float:
        """Q as drawn, or two float32 above where division may round."""
        if self.size >= self.rows:
            return 1.0
        rate = np.float32(np.float32(self.size) / np.float32(self.rows))
        return float(np.nextafter(np.nextafter(rate, np.float32(1)), np.float32(1)))

    def spend(self) -> PrivacySpend:
        """Return the charges of the minibatches as if all had room."""
        kind = "full" if self.size >= self.rows else "poisson"
        entry = Entry(self.noise_multiplier, self.rate, self.number)
        return PrivacySpend(SamplingScheme(kind, self.rows, self.rows), GAUSSIAN, (entry,))

    def overflow(self) -> float:
        """Return a bound on the probability that some minibatch exceeded its capacity."""
        places = self.rows if self.capacity is None else min(self.capacity, self.rows)
        [entry], scheme = self.spend().entries, SamplingScheme("poisson", self.rows, places)
        return composition.overflow_probability([entry], scheme) if self.rate < 1 else 0.0


@functools.lru_cache(maxsize=4096)
def profile(
    taken: tuple[Minibatches, ...], adjacency: Adjacency, released: tuple[PrivacySpend, ...] = ()
) -> Profile:
    """Compute δ(ε) of one row, within 0.1 % in ε; sound for whoever sees the client's messages.

    Args:
      taken: all minibatches of a client, in any order; of one stage, or of several.
      adjacency: "zero_out": the row becomes none, and its place in n stays; "replace": it becomes
        another one.
      released: what else was released of the client's rows, `Dominated` events.
    """
    taken = tuple(each for each in taken if each.rows and each.number)
    if not taken and not released:
        return NOTHING
    if any(each.noise_multiplier <= 0 for each in taken):
        return UNPROTECTED
    if not all(each.event.known for each in released):
        return UNPROTECTED
    spends = [*(each.spend() for each in taken), *released]
    found, _ = composition.profiles(spends, adjacency, coarse=True)
    tight = next(iter(found.values()))
    bound = found.get("rdp", tight)
    either = Profile(
        lambda epsilon: min(tight.delta(epsilon), bound.delta(epsilon)),
        lambda delta: e if (e := tight.epsilon(delta)) < math.inf else bound.epsilon(delta),
    )
    return with_failure(either, min(1.0, math.fsum(each.overflow() for each in taken)))
