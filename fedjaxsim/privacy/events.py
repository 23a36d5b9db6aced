"""Events: what one release of a mechanism costs, and the records of a run's releases."""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedjaxsim import checks
from fedjaxsim.privacy.accounting import allocation, gaussian, losses, randomized_response, rdp
from fedjaxsim.privacy.entries import UNITS, Adjacency, Entry, SamplingScheme, Unit

_KINDS: "dict[str, type[PrivacyEvent]]" = {}
_SEVERAL = set[str]()
"""Kinds of classes that a function of the user defines, each time with other values inside."""
_PLAIN = (bool, int, float, str, tuple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyEvent:
    """The cost of one release; your own mechanism brings a subclass, a frozen dataclass.

    A round is an `Entry`: z, which the release returned, and p, the client's probability to be in
    the cohort, if the event `amplifies`, else 1 (composition knows the schemes). More noise, or a
    smaller p, must not cost more. A cost that is not a number of at least 0 counts as ∞, unknown.

    Attributes:
      replace: the sensitivity when one client's whole data changes, in [1, 2]: 2 for a sum of
        clipped vectors, √2 for a sum of Gram matrices. It is in units of the noise's scale over z,
        in which a message that becomes zero has 1.
      unit: the protected unit. Accounts of different units are never composed.
      of_protected: whether messages are made of protected gradients, or noised by their client, so
        that the release costs examples nothing more. Every other release is charged to them, too.
    """

    replace: float = 2.0
    unit: Unit = "client"
    of_protected: bool = dataclasses.field(default=False, kw_only=True)

    kind: ClassVar[str] = ""
    """Name, in messages and files; by default the class's, in files with its module."""
    _in_files: ClassVar[str] = ""
    releases: ClassVar[bool] = True
    """Whether anything is released."""
    amplifies: ClassVar[bool] = False
    """Whether costs follow from p: that sampling hides something is then the event's own claim. If
    False, p is always 1, and a sampled round costs as much as one with all clients."""
    of_whole_run: ClassVar[bool] = False
    """Whether no round has a cost, only consecutive rounds together."""
    different: ClassVar[int] = 32
    """Number of different rounds that are composed one by one; more are merged."""

    def __init_subclass__(cls) -> None:
        stated = cls.__dict__.get("kind")
        cls.kind = stated or cls.__name__
        cls._in_files = name = stated or f"{cls.__module__}.{cls.__qualname__}"
        taken = _KINDS.get(cls.kind) or _KINDS.get(name)
        if taken and taken.__module__ != cls.__module__:  # files would be read as it
            where, kind = taken.__module__.partition(".")[0], cls.kind
            raise ValueError(f"kind {kind!r} is an event of {where}: give {cls.__name__} another")
        if taken and "<locals>" in cls.__qualname__ and not _alike(cls, taken):
            _SEVERAL.add(name)
        _KINDS[name] = cls

    def __post_init__(self) -> None:
        checks.one_of(UNITS, unit=self.unit)
        # Zeroing is one replacement; replacing is two zeroings.
        checks.in_range("[1, 2]", replace=self.replace)

    @property
    def known(self) -> bool:
        """Return whether a round's cost is known."""
        kind = type(self)
        return kind.losses is not PrivacyEvent.losses or kind.rdp is not PrivacyEvent.rdp

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Return `replace`, or 1 for zero-out."""
        return self.replace if adjacency == "replace" else 1.0

    def losses(self, entry: Entry, adjacency: Adjacency, interval: float) -> Any:
        """Return the privacy losses of one round with z > 0, or None if they are not known.

        They are a `losses.Pair`, or a `PrivacyLossDistribution` of dp_accounting, with losses
        rounded up to a grid of width `interval`, in nats. An adjacency without them has no ε.
        """
        return None

    def rdp(self, entry: Entry, adjacency: Adjacency, orders: Sequence[float], xp: Any) -> Any:
        """Return RDP of one round at some finite orders, (orders,); ∞ if it is not known.

        Needed for ε while a run goes on, and for budgets. `xp` is numpy, in float64, or jax.numpy
        inside jit, where z and p are traced.
        """
        return xp.full(len(orders), math.inf)

    def largest_loss(self, entry: Entry, adjacency: Adjacency) -> float:
        """Return ε of one round at δ = 0; ∞ if there is none."""
        return math.inf

    def mu(self, entry: Entry, adjacency: Adjacency) -> float | None:
        """Return μ if a round at p = 1 is one Gaussian release, exactly; else None."""
        return None

    def check_scheme(self, scheme: SamplingScheme) -> None:
        """Raise ValueError if no cost is known under a sampling scheme."""

    def met(self, cost: "Cost", xp: Any) -> "Cost":
        """Return the rounds that may cost one client something: the costliest that it can meet.

        Of z, p and rounds, (L,) each, some rounds may be 0; by numpy or, inside jit, jax.numpy.
        """
        turns = cost.scheme.turns
        if turns is None:
            return cost
        order = xp.argsort(cost.noise_multiplier)
        z, p, rounds = (values[order] for values in cost[2:])
        left = -(-xp.sum(rounds) // turns)
        # Rounds of the largest p may all be one client's own.
        most = xp.max(xp.where(rounds > 0, p, 0.0), initial=0.0)
        return cost._replace(
            noise_multiplier=z,
            # Which round of a period is a client's own hides nothing, unless an event says so.
            sampling_rate=xp.full_like(p, most if cost.scheme.period is None else 1.0),
            rounds=xp.clip(left - (xp.cumsum(rounds) - rounds), 0, rounds),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return kind and fields, for a file."""
        return {"kind": self._in_files, **dataclasses.asdict(self)}


def _alike(event: type[PrivacyEvent], before: type[PrivacyEvent]) -> bool:
    """Return whether two classes have the same methods, which close over equal plain values."""

    def equal(one: Any, other: Any) -> bool:
        own_classes = one is event and other is before
        return one is other or own_classes or (isinstance(one, _PLAIN) and one == other)

    for name, value in vars(event).items():
        earlier = vars(before).get(name)
        if isinstance(value, _PLAIN) and not equal(value, earlier):
            return False
        if not isinstance(value, types.FunctionType):
            continue
        if not isinstance(earlier, types.FunctionType) or earlier.__code__ != value.__code__:
            return False
        held, held_before = (
            [*(f.__defaults__ or ()), *(cell.cell_contents for cell in f.__closure__ or ())]
            for f in (value, earlier)
        )
        if not all(map(equal, held, held_before)):
            return False
    return True


def event_from(fields: Mapping[str, Any]) -> PrivacyEvent:
    """Return the event that `to_dict` wrote."""
    arguments = dict(fields)
    kind = arguments.pop("kind", None)
    if kind in _SEVERAL:
        raise ValueError(
            f"event {kind!r} has several meanings: what its class closes over must be fields of it"
        )
    if kind not in _KINDS:
        raise ValueError(f"event {kind!r} is unknown; import the module that defines it first")
    try:
        return _KINDS[kind](**arguments)
    except TypeError as error:
        raise ValueError(f"event {kind!r} has other fields: {error}") from error


@dataclasses.dataclass(frozen=True)
class Gaussian(PrivacyEvent):
    """A sum of bounded messages with independent Gaussian noise; z is the ledger's noise entry."""

    kind = "gaussian"
    amplifies = True

    def losses(self, entry: Entry, adjacency: Adjacency, interval: float) -> Any:
        z, p, _ = entry
        if p == 1:
            return gaussian.sampled(z / self.sensitivity(adjacency), 1.0, False, interval)
        return gaussian.sampled(z, p, adjacency == "replace", interval)

    def rdp(self, entry: Entry, adjacency: Adjacency, orders: Sequence[float], xp: Any) -> Any:
        return rdp.gaussian(entry, self.replace, adjacency, tuple(orders), xp)

    def mu(self, entry: Entry, adjacency: Adjacency) -> float | None:
        z = entry.noise_multiplier
        return self.sensitivity(adjacency) / z if z > 1e-100 else math.inf

    def met(self, cost: "Cost", xp: Any) -> "Cost":
        period = cost.scheme.period
        if type(self) is not Gaussian or period is None or period == 1:
            return super().met(cost, xp)
        # Which period has the least noise may follow from releases: all count as such.
        total = xp.sum(cost.rounds)
        least = xp.min(xp.where(cost.rounds > 0, cost.noise_multiplier, math.inf))
        least = xp.where(total > 0, least, 1.0)
        full = cost.scheme.full_in_period
        return cost._replace(
            event=Allocated(replace=self.replace, unit=self.unit, period=period, full=full),
            noise_multiplier=least[None],
            sampling_rate=xp.ones(1),
            rounds=-(-total // period)[None],
        )


@dataclasses.dataclass(frozen=True)
class Prepared(Gaussian):
    """A release of all clients before round 1, to which the data were adapted.

    Its `digest` tells it from others, and stands for its random numbers: it is charged once.
    """

    digest: str = ""

    kind = "prepared"


@dataclasses.dataclass(frozen=True)
class Allocated(PrivacyEvent):
    """A `period` of Gaussian releases in which one round, a hidden one, is the client's.

    With probability `full` the round counts as known: see `SamplingScheme.full_in_period`. A ledger
    has no such event: `Gaussian.met` makes it.
    """

    period: int = 1
    full: float = 0.0

    kind = "allocated"

    def losses(self, entry: Entry, adjacency: Adjacency, interval: float) -> Any:
        z = entry.noise_multiplier
        turn_known = gaussian.sampled(z / self.sensitivity(adjacency), 1.0, False, interval)
        if adjacency == "replace":
            hidden = allocation.replaced_losses(z, self.period, self.replace, interval)
        else:
            hidden = allocation.losses(z, self.period, interval)
        return losses.mixture([(1 - self.full, hidden), (self.full, turn_known)], interval)

    def rdp(self, entry: Entry, adjacency: Adjacency, orders: Sequence[float], xp: Any) -> Any:
        z, distance = entry.noise_multiplier, self.sensitivity(adjacency)
        if adjacency == "replace":
            hidden = allocation.replaced(z, self.period, tuple(orders), distance, xp)
        else:
            hidden = allocation.rdp(z, self.period, tuple(orders), xp)
        if self.full == 0:
            return hidden
        steps = np.asarray(orders, np.float64) - 1
        turn_known = xp.asarray(distance**2 * (steps + 1) / 2) / xp.asarray(z) ** 2
        steps = xp.asarray(steps)
        return xp.logaddexp(steps * hidden, math.log(self.full) + steps * turn_known) / steps


@dataclasses.dataclass(frozen=True)
class Correlated(Gaussian):
    """Gaussian noise that is correlated over rounds: `accounting.gaussian` has its parameters.

    Its `coefficients`, if there are some, replace `bands` and `power`. They begin with 1, and no
    other is positive.
    """

    bands: int = 1
    power: float = 0.5
    coefficients: tuple[float, ...] = ()

    kind = "correlated"
    of_whole_run = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "coefficients", tuple(self.coefficients))  # as read from a file
        checks.count(bands=self.bands)
        checks.in_range("(0, 1]", power=self.power)
        if self.coefficients:
            first, *others = self.coefficients
            if first != 1 or not all(-math.inf < other <= 0 for other in others):
                raise ValueError(
                    "coefficients must begin with 1, and no other may be positive, got "
                    f"{self.coefficients}"
                )

    @property
    def series(self) -> np.ndarray:
        """The coefficients d of the noise, (bands,), float32 numbers in float64."""
        if not self.coefficients:
            return gaussian.coefficients(self.bands, self.power)
        return np.array(self.coefficients, np.float32).astype(np.float64)

    def check_scheme(self, scheme: SamplingScheme) -> None:
        if scheme.kind not in ("full", "groups"):
            raise ValueError(
                f"correlated noise has no known cost under {scheme.kind!r} sampling; sampling must "
                "be full or groups"
            )
        if scheme.share < 1:
            raise ValueError("a share of the rounds hides nothing of correlated noise")

    def met(self, cost: "Cost", xp: Any) -> "Cost":
        self.check_scheme(cost.scheme)
        total = xp.sum(cost.rounds)
        groups = cost.scheme.groups or 1
        squared = gaussian.squared_sensitivity(self.series, total, groups, xp)
        least = xp.min(xp.where(cost.rounds > 0, cost.noise_multiplier, math.inf))
        root = xp.sqrt(xp.where(total > 0, squared, 1.0))
        return cost._replace(
            noise_multiplier=(least / root)[None],
            sampling_rate=xp.ones(1),
            rounds=xp.minimum(total, 1)[None],
        )


@dataclasses.dataclass(frozen=True)
class Banded(Gaussian):
    """Gaussian noise that later rounds partly cancel, by a banded matrix.

    `coefficients`, (bands,), are c: the releases are C⁻¹(C x + z ξ), C the lower triangular
    Toeplitz matrix of c. With as many groups in turn, or more, a client's turns move C x in
    rounds that are not its other turns, each by a multiple of c. So given all earlier
    releases, a turn and the rounds until the next one are one Gaussian release at z/‖c‖, in which
    the client is with the probability of its turn (Choquette-Choo et al. 2023, arXiv 2306.08153,
    Theorem 4).
    """

    coefficients: tuple[float, ...] = (1.0,)

    kind = "banded"
    of_whole_run = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "coefficients", tuple(self.coefficients))  # as read from a file
        checks.count(**{"the number of bands": len(self.coefficients)})
        if not (all(map(math.isfinite, self.coefficients)) and self.coefficients[0] > 0):
            raise ValueError(
                f"coefficients must be finite, the first one positive, got {self.coefficients}"
            )

    def check_scheme(self, scheme: SamplingScheme) -> None:
        bands = len(self.coefficients)
        if scheme.kind not in ("cyclic", "groups", "full") or (scheme.groups or 1) < bands:
            groups = f" with {scheme.groups} groups" if scheme.groups else ""
            raise ValueError(
                f"banded noise with {bands} bands has no known cost under {scheme.kind!r} "
                f"sampling{groups}; sampling must be cyclic or groups, with at least {bands} groups"
            )
        if scheme.share < 1:
            raise ValueError("a share of the rounds hides nothing of banded noise")

    def met(self, cost: "Cost", xp: Any) -> "Cost":
        self.check_scheme(cost.scheme)
        met = super().met(cost, xp)
        return met._replace(noise_multiplier=met.noise_multiplier / math.hypot(*self.coefficients))


@dataclasses.dataclass(frozen=True)
class Pure(PrivacyEvent):
    """Any ε-differentially private release, ε = s/z with s the sensitivity."""

    kind = "pure"
    amplifies = True
    different = 256

    def losses(self, entry: Entry, adjacency: Adjacency, interval: float) -> Any:
        worst_losses = randomized_response.answer(entry, self.replace, adjacency)
        return randomized_response.losses(worst_losses, interval)

    def rdp(self, entry: Entry, adjacency: Adjacency, orders: Sequence[float], xp: Any) -> Any:
        return randomized_response.renyi(entry, self.replace, adjacency, tuple(orders), xp)

    def largest_loss(self, entry: Entry, adjacency: Adjacency) -> float:
        return randomized_response.answer(entry, self.replace, adjacency)[0]


@dataclasses.dataclass(frozen=True)
class Dominated(PrivacyEvent):
    """A client's release, as it costs each of its examples: at most as replacing the client."""

    unit: Unit = "example"
    release: PrivacyEvent = PrivacyEvent()

    kind = "dominated"

    @property
    def known(self) -> bool:
        return self.release.known

    def losses(self, entry: Entry, adjacency: Adjacency, interval: float) -> Any:
        return self.release.losses(entry, "replace", interval)

    def rdp(self, entry: Entry, adjacency: Adjacency, orders: Sequence[float], xp: Any) -> Any:
        return self.release.rdp(entry, "replace", orders, xp)

    def mu(self, entry: Entry, adjacency: Adjacency) -> float | None:
        return self.release.mu(entry, "replace")

    def check_scheme(self, scheme: SamplingScheme) -> None:
        self.release.check_scheme(scheme)

    def met(self, cost: "Cost", xp: Any) -> "Cost":
        met = self.release.met(cost._replace(event=self.release), xp)
        return met._replace(event=dataclasses.replace(self, release=met.event))


@dataclasses.dataclass(frozen=True)
class NoRelease(PrivacyEvent):
    """Nothing is released: ε is 0 exactly."""

    kind = "no_release"
    releases = False


@dataclasses.dataclass(frozen=True)
class NoKnownCost(PrivacyEvent):
    """A release without a known guarantee."""

    kind = "no_known_cost"


@dataclasses.dataclass(frozen=True)
class ChecksSkipped(PrivacyEvent):
    """Rounds without an ε, from before the first one, for a `reason`."""

    reason: str

    kind = "checks_skipped"


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
class Examples(Gaussian):
    """A round of all clients that protect examples in gradients: one entry of the ledger.

    A minibatch of one client is a Poisson-sampled `Gaussian` release of its rows.
    """

    unit: Unit = "example"
    silos: Silos | None = None

    kind = "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.silos, dict):  # as read from a file
            lists = {
                "counts": tuple(self.silos["counts"]),
                "noise": tuple(map(tuple, self.silos["noise"])),
            }
            object.__setattr__(self, "silos", Silos(**(self.silos | lists)))


GAUSSIAN = Gaussian()
EXAMPLE = Pure(replace=1.0, unit="example")
"""Noise of a client on its own message, which protects each of its examples."""


class Cost(NamedTuple):
    """Groups of equal rounds of one sampler and mechanism, from which every ε is computed.

    z, p and the number of rounds are (L,), on the host or traced.
    """

    scheme: SamplingScheme
    event: PrivacyEvent
    noise_multiplier: Any
    sampling_rate: Any
    rounds: Any


Account = tuple[SamplingScheme, PrivacyEvent]
"""The sampler and the mechanism of releases that are charged together."""


class PrivacySpend(NamedTuple):
    """The rounds of one sampler and mechanism, on the host.

    If `overflowed`, some round is missing; if `redrawn`, random numbers of a round were drawn
    twice, or from an unknown key.
    """

    scheme: SamplingScheme
    event: PrivacyEvent
    entries: tuple[Entry, ...]
    overflowed: bool = False
    redrawn: bool = False

    @property
    def cost(self) -> Cost:
        """The rounds as arrays in float64, without those that cost nothing."""
        spent = [entry for entry in self.entries if entry.rounds and entry.sampling_rate > 0]
        z, p, rounds = np.array(spent, np.float64).reshape(-1, 3).T
        return Cost(self.scheme, self.event, z, p, rounds.astype(np.int64))

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, for a file."""
        return {
            **self._asdict(),
            "scheme": dataclasses.asdict(self.scheme),
            "event": self.event.to_dict(),
            "entries": [list(entry) for entry in self.entries],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "PrivacySpend":
        """Return the charges that `to_dict` wrote."""
        read = {
            "scheme": SamplingScheme(**fields["scheme"]),
            "event": event_from(fields["event"]),
            "entries": tuple(Entry(*entry) for entry in fields["entries"]),
        }
        return cls(**{**fields, **read})


class PrivacyLimit(NamedTuple):
    """The budget of a state: planned releases that together cost at most (ε, δ), for zero-out.

    δ includes the overflow of cohorts. Releases of the state use them up; see `privacy/filter.py`.
    """

    epsilon: float
    delta: float
    planned: tuple[PrivacySpend, ...]


def in_order(scheme: SamplingScheme, event: PrivacyEvent) -> bool:
    """Return whether the cost of rounds depends on their order."""
    return scheme.in_order or event.of_whole_run
