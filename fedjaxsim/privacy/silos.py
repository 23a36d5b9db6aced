"""ε of single examples, for each client that protects its own in its gradients.

Each of a client's n rows is in a minibatch with probability q = min(1, b/n), and the sum of clipped
gradients gets Gaussian noise: a Poisson-subsampled Gaussian release, composed as privacy losses.
G gradients of one minibatch together are a release with noise multiplier z/√G. Clients with the
same numbers share one computation.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.accounting.profile import (
    NO_PRIVACY,
    NOTHING,
    Profile,
    with_failure,
)
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.privacy.entries import (
    ADJACENCIES,
    Adjacency,
    Entry,
    SamplingScheme,
    epsilon_text,
)
from fedjaxsim.privacy.events import GAUSSIAN, Dominated, PrivacySpend, Silos

_GRIDS = 64
"""Number of profiles whose grids of losses stay in memory, up to some 50 MB each."""
_NUMBERS = 65536
"""Number of values of ε and δ that stay in memory."""


class SiloMinibatches(NamedTuple):
    """T minibatches of expected size b of one client with n rows, n public.

    A minibatch above its capacity (None for enough) loses examples, whichever they are.
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
        scheme = SamplingScheme("poisson", self.rows, places)
        spent = self.spend()._replace(scheme=scheme)
        return composition.overflow_probability([spent]) if self.rate < 1 else 0.0


@functools.lru_cache(maxsize=_GRIDS)
def profile(
    taken: tuple[SiloMinibatches, ...],
    adjacency: Adjacency,
    released: tuple[PrivacySpend, ...] = (),
) -> Profile:
    """Compute δ(ε) of one row, within 0.1 % in ε; sound for whoever sees the client's messages.

    For "zero_out" the row becomes none, and its place in n stays. `released` is what else was
    released of the client's rows, `Dominated` events.
    """
    taken = tuple(batches for batches in taken if batches.rows and batches.number)
    if not taken and not released:
        return NOTHING
    if any(batches.noise_multiplier <= 0 for batches in taken):
        return NO_PRIVACY
    if not all(spend.event.known for spend in released):
        return NO_PRIVACY
    spends = [*(batches.spend() for batches in taken), *released]
    by_accountant, _ = composition.profiles(spends, adjacency, coarse=1.0)
    tight = next(iter(by_accountant.values()))
    bound = by_accountant.get("rdp", tight)
    either = Profile(
        lambda epsilon: min(tight.delta(epsilon), bound.delta(epsilon)),
        lambda delta: e if (e := tight.epsilon(delta)) < math.inf else bound.epsilon(delta),
    )
    return with_failure(either, min(1.0, math.fsum(batches.overflow() for batches in taken)))


@functools.lru_cache(maxsize=_NUMBERS)
def _epsilon(taken: Any, adjacency: Adjacency, released: Any, delta: float) -> float:
    return profile(taken, adjacency, released).epsilon(delta)


@functools.lru_cache(maxsize=_NUMBERS)
def _delta(taken: Any, adjacency: Adjacency, released: Any, epsilon: float) -> float:
    return profile(taken, adjacency, released).delta(epsilon)


@dataclasses.dataclass(frozen=True)
class ExampleEpsilons:
    """ε of single examples of each client.

    Attributes:
      counts: (m,) int, rows; the most where stages differ.
      delta: (m,) δ of each client.
      zero_out: (m,) ε if an example becomes none, whose place in the number of rows stays.
      replace: (m,) ε if an example becomes another one.
      largest: for each adjacency an (ε, δ) for all clients: the largest ε, and its largest δ.
    """

    counts: NDArray[np.int64]
    delta: NDArray[np.float64]
    zero_out: NDArray[np.float64]
    replace: NDArray[np.float64]
    largest: Mapping[Adjacency, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def summary(self, adjacency: Adjacency) -> dict[str, float]:
        """Return the minimum, median and maximum of ε over clients."""
        values = getattr(self, adjacency)
        statistics = {"min": np.min(values), "median": np.median(values), "max": np.max(values)}
        return {name: float(value) for name, value in statistics.items()}

    def in_words(self) -> list[str]:
        """Return a line for each adjacency."""
        lines = []
        for adjacency in ADJACENCIES:
            shown = self.summary(adjacency).items()
            shown = ", ".join(f"{epsilon_text(value)} ({name})" for name, value in shown)
            lines.append(f"{adjacency}: ε of clients {shown}")
        return lines


def epsilons(
    charges: Sequence[Any],
    minibatches: Sequence[int] | None = None,
    released: Sequence[Any] = (),
) -> ExampleEpsilons:
    """Compute ε of every client.

    `charges` have the unit "example", with silos of the same clients; stages and runs may give
    them other numbers of rows. `minibatches`, (m,), counts those that each client has taken; by
    default every round's, which is an upper bound. `released` are clients' charges that are
    charged to their examples, too.
    """
    every: list[Any] = [charged.event.silos for charged in charges]
    counts = np.max([silos.counts for silos in every], axis=0)
    deltas = np.min([[delta_of(silos, n) for n in silos.counts] for silos in every], axis=0)
    also = tuple(map(_to_examples, released))
    spent = []
    for client in range(len(counts)):
        taken = None if minibatches is None else int(minibatches[client])
        spent.append(_taken(charges, client, taken))
    by_adjacency: dict[Adjacency, np.ndarray] = {}
    largest: dict[Adjacency, tuple[float, float]] = {}
    for adjacency in ADJACENCIES:
        of_clients = [
            _epsilon(taken, adjacency, also, delta)
            for taken, delta in zip(spent, deltas.tolist(), strict=True)
        ]
        by_adjacency[adjacency], epsilon = np.array(of_clients), max(of_clients)
        together = (_delta(kind, adjacency, also, epsilon) for kind in {*spent})
        largest[adjacency] = epsilon, max(together) if epsilon < math.inf else 1.0
    return ExampleEpsilons(
        counts, deltas, by_adjacency["zero_out"], by_adjacency["replace"], largest
    )


def _to_examples(charged: PrivacySpend) -> PrivacySpend:
    """Return a client's charge as one to its examples: who took part is known to who sees it."""
    m = charged.scheme.clients
    entries = tuple(entry._replace(sampling_rate=1.0) for entry in charged.entries)
    scheme = SamplingScheme("full", m, m)
    return charged._replace(scheme=scheme, event=Dominated(release=charged.event), entries=entries)


def delta_of(silos: Silos, count: int) -> float:
    """Return δ of a client with `count` rows, by default 1/(10 n)."""
    return default_delta(max(1, count)) if silos.delta is None else silos.delta


def _taken(charges: Sequence[Any], client: int, taken: int | None) -> tuple[SiloMinibatches, ...]:
    """Return the minibatches of a client, `taken` in number, if known."""
    all_batches = []
    single = len(charges) == 1 and len(charges[0].entries) == 1
    for charged in charges:
        silos: Any = charged.event.silos
        count = silos.counts[client]
        for z, _, rounds in charged.entries:
            number = rounds * silos.minibatches(count)
            if single and taken is not None:
                number = min(number, taken)
            z_k = float(np.float32(dict(silos.noise).get(count, 0.0))) if silos.noise else z
            if number and count:
                z_k /= math.sqrt(silos.gradients)
                all_batches.append(SiloMinibatches(count, silos.size, number, z_k, silos.capacity))
    return tuple(all_batches)
