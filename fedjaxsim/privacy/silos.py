"""ε of single examples, for each client that protects its own in its gradients.

G gradients of one minibatch together are a release with noise multiplier z/√G; see
`accounting.examples`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjaxsim.privacy.accounting import examples
from fedjaxsim.privacy.accounting.examples import Minibatches
from fedjaxsim.privacy.accounting.profile import largest_of
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.privacy.entries import ADJACENCIES, Adjacency, SamplingScheme
from fedjaxsim.privacy.events import Dominated, PrivacySpend, Silos


def round_up(value: float) -> float:
    """Round ε or δ up to five significant digits."""
    if value == 0 or math.isinf(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 4)
    return math.ceil(value / unit) * unit


@dataclasses.dataclass(frozen=True)
class ExampleEpsilons:
    """ε of single examples of each client.

    Attributes:
      counts: (m,) int, rows; the most where stages differ.
      delta: (m,) δ of each client.
      zero_out: (m,) ε if an example becomes none, whose place in the number of rows stays.
      replace: (m,) ε if an example becomes another one.
      largest: for each adjacency an (ε, δ) that holds for all clients: the largest ε, and at that
        one ε the largest δ.
    """

    counts: NDArray[np.int64]
    delta: NDArray[np.float64]
    zero_out: NDArray[np.float64]
    replace: NDArray[np.float64]
    largest: Mapping[Adjacency, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def summary(self, adjacency: Adjacency) -> dict[str, float]:
        """Return the minimum, median and maximum of ε over clients."""
        values = getattr(self, adjacency)
        ends = {"min": np.min(values), "median": np.median(values), "max": np.max(values)}
        return {name: float(value) for name, value in ends.items()}

    def in_words(self) -> list[str]:
        """Return a line for each adjacency."""
        lines = []
        for adjacency in ADJACENCIES:
            ends = self.summary(adjacency).items()
            ends = ", ".join(f"{round_up(value):.5g} ({name})" for name, value in ends)
            lines.append(f"{adjacency}: ε of clients {ends}")
        return lines


def epsilons(
    charges: Sequence[Any],
    minibatches: Sequence[int] | None = None,
    released: Sequence[Any] = (),
) -> ExampleEpsilons:
    """Compute ε of every client.

    Args:
      charges: accounts with the unit "example" and silos, of the same clients; stages and runs may
        give them other numbers of rows.
      minibatches: (m,) the minibatches that each client has taken in all; by default those of every
        round, which is an upper bound.
      released: charges of clients that are charged to their examples, too.
    """
    every: list[Any] = [charged.event.silos for charged in charges]
    counts = np.max([silos.counts for silos in every], axis=0)
    deltas = np.min([[delta_of(silos, n) for n in silos.counts] for silos in every], axis=0)
    also = tuple(map(_to_examples, released))
    spent = []
    for client in range(len(counts)):
        taken = None if minibatches is None else int(minibatches[client])
        spent.append(_taken(charges, client, taken))
    each: dict[Adjacency, np.ndarray] = {}
    largest: dict[Adjacency, tuple[float, float]] = {}
    for adjacency in ADJACENCIES:
        of_all = [examples.profile(taken, adjacency, also) for taken in spent]
        found = [one.epsilon(own) for one, own in zip(of_all, deltas.tolist(), strict=True)]
        each[adjacency], epsilon = np.array(found), max(found)
        together = largest_of([examples.profile(kind, adjacency, also) for kind in {*spent}])
        largest[adjacency] = epsilon, together.delta(epsilon) if epsilon < math.inf else 1.0
    return ExampleEpsilons(counts, deltas, each["zero_out"], each["replace"], largest)


def _to_examples(charged: PrivacySpend) -> PrivacySpend:
    """Return a client's charge as one to its examples: who took part is known to who sees it."""
    m = charged.scheme.clients
    entries = tuple(entry._replace(sampling_rate=1.0) for entry in charged.entries)
    scheme = SamplingScheme("full", m, m)
    return charged._replace(scheme=scheme, event=Dominated(release=charged.event), entries=entries)


def delta_of(silos: Silos, count: int) -> float:
    """Return δ of a client with `count` rows, by default 1/(10 n)."""
    return default_delta(max(1, count)) if silos.delta is None else silos.delta


def _taken(charges: Sequence[Any], client: int, taken: int | None) -> tuple[Minibatches, ...]:
    """Return the minibatches of a client, `taken` in number, if known."""
    found = []
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
                found.append(Minibatches(count, silos.size, number, z_k, silos.capacity))
    return tuple(found)
