"""Plain descriptions of a run for the accountants, on the host, without JAX."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

SchemeKind = Literal["poisson", "fixed", "capped", "groups", "full"]
EventKind = Literal["gaussian", "correlated", "pure", "no_release", "unprotected"]
Adjacency = Literal["zero_out", "replace"]
View = Literal["joint_dp", "released_sequence"]
Unit = Literal["client", "example"]
Status = Literal["exact", "upper_bound", "approximate", "none"]

SCHEMES, _EVENTS, UNITS = get_args(SchemeKind), get_args(EventKind), get_args(Unit)
ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)
VIEWS: tuple[View, ...] = get_args(View)
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e12
"""Range of positive noise multipliers: squares, and products with clip norms, exist in float32."""
MOST_ROUNDS = 2**31 - 1
"""Largest count of a ledger, an int32."""


@dataclasses.dataclass(frozen=True)
class SamplingScheme:
    """The sampling of cohorts.

    Attributes:
      kind: "poisson": each client independently with the charged probability p; "fixed": a
        uniformly random cohort of exactly `capacity` clients; "capped": cohorts of a public
        schedule (such as passes over the population) with at most `max_participations` rounds per
        client in the whole run; "groups": `groups` fixed groups of clients in turn; "full": all
        clients, in every round.
      clients: m, the size of the population, public.
      capacity: B, the largest cohort that a round can hold. A larger Poisson cohort loses members;
        the probability of that is part of the reported δ.
      max_participations: the cap of a "capped" scheme; None for every other kind.
      groups: the number of groups of a "groups" scheme, whose clients take part in every
        `groups`-th round; None for every other kind.

    Raises:
      ValueError: for an unknown kind, impossible sizes, or a cap or groups with another kind.
    """

    kind: SchemeKind
    clients: int
    capacity: int
    max_participations: int | None = None
    groups: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in SCHEMES:
            raise ValueError(f"kind must be one of {', '.join(SCHEMES)}, got {self.kind!r}")
        if self.clients < 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}")
        if not 1 <= self.capacity <= self.clients:
            raise ValueError(f"capacity must lie in [1, {self.clients}], got {self.capacity}")
        if self.kind == "full" and self.capacity != self.clients:
            raise ValueError(
                f"capacity must be {self.clients} for full participation, got {self.capacity}"
            )
        if (self.kind == "capped") != (self.max_participations is not None):
            raise ValueError(
                "max_participations must be given for a capped scheme and for no other, got "
                f"{self.max_participations} for kind {self.kind!r}"
            )
        if self.max_participations is not None and self.max_participations < 1:
            raise ValueError(
                f"max_participations must be at least 1, got {self.max_participations}"
            )
        if (self.kind == "groups") != (self.groups is not None):
            raise ValueError(
                "groups must be given for a scheme of groups and for no other, got "
                f"{self.groups} for kind {self.kind!r}"
            )
        if self.groups is not None and not 1 <= self.groups <= self.clients:
            raise ValueError(f"groups must lie in [1, {self.clients}], got {self.groups}")


@dataclasses.dataclass(frozen=True)
class Silos:
    """Poisson minibatches of clients whose gradients carry noise that protects examples.

    Attributes:
      counts: (m,) the number n of rows of each client, public.
      size: b; a row is in a minibatch with probability min(1, b/n).
      capacity: places of a minibatch.
      gradients: G, the largest number of gradients of one minibatch.
      steps: minibatches of a client in a round; None with `epochs`.
      epochs: ⌈n/b⌉ minibatches each in a round; None with `steps`.
      delta: δ of each client; None for 1/(10 n).
      noise: (n, z) for every number of rows; () if z is the ledger's noise entry.
    """

    counts: tuple[int, ...]
    size: int
    capacity: int
    gradients: int
    steps: int | None
    epochs: int | None
    delta: float | None = None
    noise: tuple[tuple[int, float], ...] = ()

    def minibatches(self, count: int) -> int:
        """Return the number of minibatches in a round of a client with `count` rows."""
        return self.steps if self.steps is not None else (self.epochs or 0) * -(-count // self.size)


@dataclasses.dataclass(frozen=True)
class PrivacyEvent:
    """The cost of one release of a mechanism.

    Attributes:
      kind: "gaussian": Gaussian noise; the ledger's noise entry is z. "correlated": Gaussian noise
        that is correlated over rounds, whose cost is that of the whole run so far. "pure": an
        ε-differentially private release; the ledger's noise entry is the ε of sensitivity 1.
        "no_release": ε is 0 exactly. "unprotected": a release without a known guarantee.
      zero_out: the sensitivity when one client's message becomes zero. For "gaussian", in units of
        the noise's scale over z: 1 by definition of z. For "pure", the cost in units of the
        ledger's ε.
      replace: the sensitivity when one client's whole data changes: 2 for a sum of clipped vectors,
        √2 for a sum of Gram matrices.
      bands: of "correlated" noise: the number of rounds whose noise a release adds; see
        `accounting.correlated.coefficients`.
      power: of "correlated" noise.
      unit: the protected unit. Accounts of different units are never composed.
      silos: of unit "example", the minibatches of clients that protect examples in gradients: one
        entry of the ledger is then a round of them all.

    Raises:
      ValueError: for an unknown kind or unit, sensitivities that are not positive or not finite, or
        `replace` outside [zero_out, 2 zero_out] (zeroing is one replacement; replacing is two
        zeroings).
    """

    kind: EventKind
    zero_out: float = 1.0
    replace: float = 2.0
    bands: int = 1
    power: float = 0.5
    unit: Unit = "client"
    silos: Silos | None = None

    def __post_init__(self) -> None:
        if isinstance(self.silos, dict):  # as read from a file
            lists = {
                "counts": tuple(self.silos["counts"]),
                "noise": tuple(map(tuple, self.silos["noise"])),
            }
            object.__setattr__(self, "silos", Silos(**(self.silos | lists)))
        if self.kind not in _EVENTS:
            raise ValueError(f"kind must be one of {', '.join(_EVENTS)}, got {self.kind!r}")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}")
        for name, value in (("zero_out", self.zero_out), ("replace", self.replace)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not self.zero_out <= self.replace <= 2 * self.zero_out:
            raise ValueError(
                f"replace must lie in [{self.zero_out}, {2 * self.zero_out}], got {self.replace}"
            )
        if self.bands < 1:
            raise ValueError(f"bands must be at least 1, got {self.bands}")
        if not 0 < self.power <= 1:
            raise ValueError(f"power must lie in (0, 1], got {self.power}")

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Return `replace` or `zero_out`."""
        return self.replace if adjacency == "replace" else self.zero_out

    def charge(self, noise_multiplier: float) -> float:
        """Return the ledger's noise entry: z, or the ε of sensitivity 1 for a pure release."""
        if self.kind != "pure":
            return noise_multiplier
        return 1 / (self.zero_out * noise_multiplier) if noise_multiplier > 0 else math.inf


GAUSSIAN = PrivacyEvent("gaussian")
"""Release of a sum of clipped vectors with Gaussian noise."""
EXAMPLE = PrivacyEvent("pure", zero_out=1.0, replace=1.0, unit="example")
"""Noise of a client on its own message, which protects each of its examples."""


def check_delta(delta: float) -> None:
    """Raise ValueError unless δ lies in (0, 1)."""
    if not _between(math.ulp(0.0), delta, math.nextafter(1, 0)):
        raise ValueError(f"delta must lie in (0, 1), got {delta!r}")


def check_epsilon(epsilon: float) -> None:
    """Raise ValueError unless ε has a size for which noise can be found."""
    if not _between(1e-6, epsilon, 1e6):
        raise ValueError(f"epsilon must lie in [1e-06, 1000000.0], got {epsilon!r}")


def _between(least: float, value: Any, most: float) -> bool:
    """Return whether a value is a number between others."""
    try:
        return bool(least <= value <= most)
    except (TypeError, ValueError):
        return False


def check_noise_multiplier(noise_multiplier: float, zero: bool = False) -> None:
    """Raise ValueError unless z has a usable size, or is an allowed 0."""
    if zero and noise_multiplier == 0:
        return
    if not SMALLEST_NOISE <= noise_multiplier <= LARGEST_NOISE:
        raise ValueError(
            f"noise_multiplier must {'be 0 or ' if zero else ''}lie in "
            f"[{SMALLEST_NOISE}, {LARGEST_NOISE}], got {noise_multiplier}"
        )


class Entry(NamedTuple):
    """A group of rounds on the host: float64 z and p, and an exact count."""

    noise_multiplier: float
    sampling_rate: float
    rounds: int


class PrivacySpend(NamedTuple):
    """The rounds of one sampler and mechanism, on the host.

    Attributes:
      scheme: the sampling of cohorts.
      event: the cost of one release.
      entries: the groups.
      overflowed: whether some round is missing.
      redrawn: whether random numbers of a round were drawn twice, or from an unknown key.
    """

    scheme: SamplingScheme
    event: PrivacyEvent
    entries: tuple[Entry, ...]
    overflowed: bool = False
    redrawn: bool = False


class PrivacyLimit(NamedTuple):
    """The budget of a state, kept by a Rényi filter; see `privacy/filter.py`.

    Attributes:
      epsilon: ε in nats.
      delta: δ, overflow of cohorts included.
      order: α, the one order of the filter.
      rdp: the largest RDP of order α that the state may spend.
    """

    epsilon: float
    delta: float
    order: int
    rdp: float


class Drawn(NamedTuple):
    """Rounds from 0 on with random numbers (cohorts, minibatches, noise) from one key.

    Attributes:
      digest: one-way digest of the key, hexadecimal.
      rounds: the number of rounds.
    """

    digest: str
    rounds: int


def drawn_twice(runs: Mapping[str, Iterable[Drawn]]) -> str:
    """Return a sentence that names the runs with a round from the same key; "" if there is none."""
    groups: dict[str, dict[str, None]] = {}
    each = {name: tuple(draws) for name, draws in runs.items()}
    for (one, its), (other, theirs) in itertools.combinations(each.items(), 2):
        for a, b in itertools.product(its, theirs):
            if a.digest == b.digest and a.rounds and b.rounds:
                groups.setdefault(a.digest, {}).update({one: None, other: None})
    if not groups:
        return ""
    names = "; ".join(dict.fromkeys(map(", ".join, groups.values())))
    return (
        "Runs that drew a round's cohort and noise from the same key have no joint ε, and at most "
        f"one of them may be published under its own: {names}."
    )
