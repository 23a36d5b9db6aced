"""ε of single examples, for each client that protects its own in its gradients.

A client's minibatches are Poisson-subsampled Gaussian releases of its rows: rate q = min(1, b/n), G
gradients of one minibatch together a release with noise multiplier z/√G. By RDP, which takes
milliseconds for a client, where the privacy loss distribution takes a second.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjaxsim.privacy.accounting import composition, rdp
from fedjaxsim.privacy.accounting.profile import Profile, smaller, smallest, with_failure
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.privacy.events import (
    ADJACENCIES,
    GAUSSIAN,
    Adjacency,
    Entry,
    PrivacySpend,
    SamplingScheme,
    Silos,
)


def round_up(value: float) -> float:
    """Round ε or δ up to five significant digits."""
    if value == 0:
        return 0.0
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
    """

    counts: NDArray[np.int64]
    delta: NDArray[np.float64]
    zero_out: NDArray[np.float64]
    replace: NDArray[np.float64]

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


def rate_of(size: int, count: int) -> float:
    """Return q = min(1, b/n) as drawn, or two float32 above where division may round."""
    rate = np.float32(min(1.0, np.float32(size) / np.float32(count)))
    for _ in range(2):
        rate = np.nextafter(rate, np.float32(1))
    return float(rate) if size < count else 1.0


def scheme_of(silos: Silos, count: int) -> SamplingScheme:
    """Return the sampling of a client's minibatches from its `count` rows."""
    if silos.size >= count:
        return SamplingScheme("full", count, count)
    return SamplingScheme("poisson", count, min(count, silos.capacity))


def epsilons(
    charges: Sequence[PrivacySpend],
    minibatches: Sequence[int] | None = None,
) -> ExampleEpsilons:
    """Compute ε of every client.

    Args:
      charges: accounts with the unit "example" and silos, of the same clients; stages and runs may
        give them other numbers of rows.
      minibatches: (m,) the minibatches that each client has taken in all; by default those of every
        round, which is an upper bound.
    """
    every: list[Any] = [charged.event.silos for charged in charges]
    counts = np.max([silos.counts for silos in every], axis=0)
    deltas = np.min([[delta_of(silos, n) for n in silos.counts] for silos in every], axis=0)
    results: dict[Adjacency, list[float]] = {"zero_out": [], "replace": []}
    for client, own in enumerate(deltas.tolist()):
        taken = None if minibatches is None else int(minibatches[client])
        spent = tuple(_releases(charges, client, taken))
        for adjacency, values in results.items():
            values.append(epsilon_of(spent, own, adjacency))
    return ExampleEpsilons(counts, deltas, *map(np.array, results.values()))


def delta_of(silos: Silos, count: int) -> float:
    """Return δ of a client with `count` rows, by default 1/(10 n)."""
    return default_delta(max(1, count)) if silos.delta is None else silos.delta


def _releases(
    charges: Sequence[PrivacySpend], client: int, taken: int | None
) -> list[tuple[SamplingScheme, Entry]]:
    """Return the releases of a client with `taken` minibatches, if known."""
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
                entry = Entry(z_k / math.sqrt(silos.gradients), rate_of(silos.size, count), number)
                found.append((scheme_of(silos, count), entry))
    return found


@functools.lru_cache(maxsize=4096)
def epsilon_of(
    releases: tuple[tuple[SamplingScheme, Entry], ...], delta: float, adjacency: Adjacency
) -> float:
    """Compute ε of one client's releases of its rows; inf without noise."""
    if any(entry.noise_multiplier <= 0 for _, entry in releases):
        return math.inf
    if not releases:
        return 0.0
    if all(scheme.kind == "full" for scheme, _ in releases):
        entries = [entry for _, entry in releases]
        scheme, view = releases[0][0], "released_sequence"
        return composition.profile(entries, scheme, GAUSSIAN, adjacency, view, "gaussian").epsilon(
            delta
        )
    failure = math.fsum(
        composition.overflow_probability([entry], scheme) for scheme, entry in releases
    )
    entries = [entry for _, entry in releases]
    return with_failure(_profile(entries, adjacency), failure).epsilon(delta)


def _profile(entries: Sequence[Entry], adjacency: Adjacency) -> Profile:
    """Return the privacy profile by RDP.

    A replacement is a removal and an addition. With N the run without the example, the weak
    triangle inequality of Rényi divergences (Mironov 2017, Proposition 11, p = q = 2) gives
    D_α(P‖Q) ≤ (α − 1/2)/(α − 1) D_2α(P‖N) + D_{2α−1}(N‖Q), and that of (ε, δ) gives
    (2ε, (1 + e^ε) δ); the better one counts.
    """
    once = rdp.profile(rdp.compose(entries))
    if adjacency == "zero_out":
        return once

    def twice(epsilon):
        return min(1.0, (1 + math.exp(min(epsilon / 2, 700.0))) * once.delta(epsilon / 2))

    def below(target):
        high = 1.0
        while twice(high) > target:
            high *= 2
            if high > 1e6:
                return math.inf
        return smallest(twice, target, high)

    orders = rdp.INTEGER_ORDERS[:-2]
    alphas = np.array(orders, np.float64)
    to_none = rdp.compose(entries, 1.0, [2 * order for order in orders])
    from_none = rdp.compose(entries, 1.0, [2 * order - 1 for order in orders])
    triangle = rdp.profile((alphas - 0.5) / (alphas - 1) * to_none + from_none, orders)
    return smaller(triangle, Profile(twice, below))
