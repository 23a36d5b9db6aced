"""Rounds as accountants read them: sampling schemes, groups of rounds, ranges of numbers.

On the host, without JAX and numpy, so that the command line can check a plan at once.
"""

import bisect
import dataclasses
import decimal
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from fedjaxsim import checks

SchemeKind = Literal["poisson", "fixed", "groups", "cyclic", "allocation", "full"]
Adjacency = Literal["zero_out", "replace"]
View = Literal["joint_dp", "released_sequence"]
Unit = Literal["client", "example"]
Status = Literal["exact", "upper_bound", "none"]

SCHEMES, UNITS = get_args(SchemeKind), get_args(Unit)
ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)
VIEWS: tuple[View, ...] = get_args(View)
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e12
"""Range of positive noise multipliers: squares, and products with clip norms, exist in float32."""
LONGEST_PERIOD = 2**16 - 1
"""Most rounds of a period: its rounds are drawn with 16-bit digits."""
MOST_ROUNDS = 2**31 - 1
"""Largest count of a ledger, an int32."""


@dataclasses.dataclass(frozen=True)
class SamplingScheme:
    """The sampling of cohorts.

    Attributes:
      kind: "poisson": each client independently with the charged probability p; "fixed": a
        uniformly random cohort of exactly `capacity` clients; "groups": `groups` fixed groups of
        clients in turn; "cyclic": the same, each client of the group in turn independently with
        probability `groups`·p, so p is a round's rate out of `groups`; "allocation": each client
        independently in one round of each period of `period` rounds, drawn uniformly; "full": all
        clients, in every round.
      clients: m, the size of the population, public.
      capacity: B, the largest cohort that a round can hold. A larger cohort that is Poisson, cyclic
        or allocated loses uniformly random members.
      groups: the number of public groups of a "groups" or "cyclic" scheme, whose clients take part
        in every `groups`-th round at most; None for every other kind.
      period: t, the rounds of a period of an "allocation" scheme, from a round whose number is a
        multiple of t on; None for every other kind.
      levels: ((clients, share), …) of public groups of clients, if a drawn client of a group takes
        part with a probability, its share, by its own secret coin. The scheme itself is about
        those with share 1; `at_share` is about the others.
      share: the probability with which the drawn client in question takes part.
    """

    kind: SchemeKind
    clients: int
    capacity: int
    groups: int | None = None
    period: int | None = None
    levels: tuple[tuple[int, float], ...] = ()
    share: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(map(tuple, self.levels)))  # as read from a file
        checks.one_of(SCHEMES, kind=self.kind)
        checks.in_range("(0, 1]", share=self.share)
        if (self.levels or self.share < 1) and self.kind not in ("poisson", "full"):
            raise ValueError(
                f"clients with privacy levels need poisson or full sampling, got {self.kind!r}"
            )
        of_levels = sum(count for count, _ in self.levels)
        if self.levels and of_levels != self.clients:
            raise ValueError(
                f"privacy levels must be given for all {self.clients} clients, got {of_levels}"
            )
        checks.count(clients=self.clients)
        checks.count(1, self.clients, capacity=self.capacity)
        if self.kind == "full" and self.capacity != self.clients:
            raise ValueError(
                f"capacity must be {self.clients} for full participation, got {self.capacity}"
            )
        if (self.kind in ("groups", "cyclic")) != (self.groups is not None):
            raise ValueError(
                "groups must be given for a groups or cyclic scheme and for no other, got "
                f"{self.groups} for kind {self.kind!r}"
            )
        if self.groups is not None:
            checks.count(1, self.clients, groups=self.groups)
        if (self.kind == "allocation") != (self.period is not None):
            raise ValueError(
                "period must be given for an allocation scheme and for no other, got "
                f"{self.period} for kind {self.kind!r}"
            )
        if self.period is not None:
            checks.count(1, LONGEST_PERIOD, period=self.period)

    def at_share(self, share: float) -> "SamplingScheme":
        """Return the scheme as it is for a client that takes part with a share, once drawn."""
        return dataclasses.replace(self, levels=(), share=share)

    @property
    def turns(self) -> int | None:
        """The rounds in which a client takes part once at most; None if there is no such number."""
        return self.groups if self.period is None else self.period

    @property
    def in_order(self) -> bool:
        """Return whether rounds follow a plan, so that each may be charged once, without a gap."""
        return self.turns is not None

    @property
    def full_in_period(self) -> float:
        """A bound on the probability that others fill some cohort of an allocation's period.

        In such a period, what becomes of others may tell a client's round: it counts as known.
        """
        if self.period is None:
            return 0.0
        other_clients = self.clients - 1
        return min(1.0, self.period * excess(self.capacity - 1, other_clients, 1 / self.period))

    @property
    def group_size(self) -> int:
        """The largest number of clients that may take part in one round."""
        return -(-self.clients // (self.groups or 1))

    def in_turn(self, sampling_rate: Any, xp: Any = math) -> Any:
        """Return the probability to take part in a client's own turn, from the rate of a round.

        It is rounded up, as float32 rounds the product and the quotient.
        """
        if self.groups is None:
            return sampling_rate
        least = min if xp is math else xp.minimum
        return least(1.0, self.groups * sampling_rate * (1 + 2.0**-22))

    def overflow(self, sampling_rate: float) -> float:
        """Return a bound on the probability that a round's random cohort exceeds its capacity."""
        if self.kind not in ("poisson", "cyclic", "allocation"):
            return 0.0
        return excess(self.capacity, self.group_size, self.in_turn(sampling_rate))

    def inclusions(self, sampling_rate: float) -> tuple[tuple[float, float], ...]:
        """Return (weight, p) of what others may know in a round, p a client's chance to be in then.

        The other clients know who of them took part, whatever the client sends. In cohorts of a
        fixed size that tells whether it did. A Poisson cohort of B clients without it is full. If B
        − 1 others took part, it took part itself, or the cohort was smaller, or it was larger and
        the client was kept: with o others drawn, its weight is

            a + t,  a = P(o = B − 1),  t = Σ_{n ≥ B} P(o = n) p B/(n + 1) = B/m P(Bin(m, p) > B),

        and its chance (p a + t)/(a + t). With fewer others its chance is p. A drawn client's coin
        is independent of all this: its `share` is a factor of each chance.

        Of a cyclic cohort the round is one of the client's own, and the client counts as in if B or
        more others of its group were drawn. With fewer, all have places, and its chance is p.
        """
        inclusions = self._drawn(sampling_rate)
        return tuple((weight, chance * self.share) for weight, chance in inclusions)

    def _drawn(self, sampling_rate: float) -> tuple[tuple[float, float], ...]:
        p, m, places = sampling_rate, self.clients, self.capacity
        if self.kind == "fixed":
            return ((places / m, 1.0), (1 - places / m, 0.0))
        if self.kind == "cyclic":
            p, other_clients = self.in_turn(p), self.group_size - 1
            if p == 1 or (full := excess(places - 1, other_clients, p)) == 0:
                return ((1.0, p),)
            return ((1 - full, p), (full, 1.0))
        if self.kind != "poisson":
            return ((1.0, 1.0),)
        if places >= m:
            return ((1.0, p),)
        over = excess(places, m, p)
        placed = places / m * over
        full = excess(places - 1, m - 1, p)
        last = (excess(places - 2, m - 1, p) if places > 1 else 1.0) - full
        near = max(0.0, last) + placed
        if near == 0:
            return ((1.0, p),)
        out = max(0.0, full - placed)
        chance = min(1.0, (p * max(0.0, last) + placed) / near)
        return ((max(0.0, 1 - near - out), p), (near, chance), (out, 0.0))

    def inclusions_in_jit(self, sampling_rate: Any, xp: Any) -> tuple[tuple[Any, Any], ...]:
        """Return `inclusions` that cost at least as much, without special functions.

        With r the ratio of P(Bin(m, p) = n + 1) and P(Bin(m, p) = n) at n = B, and r < 1, t/a =
        p P(Bin(m, p) > B)/P(Bin(m, p) = B) is at most p r/(1 − r): an upper bound on the chance. A
        rate with r ≥ 1 counts as if the client were in for certain. Of cyclic cohorts the weight is
        Chernoff's bound, e^(−n KL(B/n ‖ p)) for n others.
        """
        m, places = self.clients, self.capacity
        if self.kind == "cyclic":
            p, other_clients = self.in_turn(sampling_rate, xp), self.group_size - 1
            if places > other_clients:
                return ((1.0, p),)
            part, inside = places / other_clients, xp.minimum(p, 1 - 2.0**-20)
            terms = part * xp.log(part / inside), xp.zeros(())
            if part < 1:
                terms = terms[0], (1 - part) * xp.log((1 - part) / (1 - inside))
            rounding = 2.0**-20 * sum(map(xp.abs, terms))
            full = xp.exp(-other_clients * xp.maximum(sum(terms) - rounding, 0.0))
            return ((1.0, p), (xp.where(part > inside, full, 1.0), 1.0))
        if self.kind != "poisson":
            return self.inclusions(1.0)
        if places >= m:
            return ((1.0, sampling_rate),)
        p = xp.minimum(sampling_rate, 1 - 2.0**-20)
        ratio = (m - places) * p / ((places + 1) * (1 - p))
        rare = ratio < 1
        excess_odds = p * xp.where(rare, ratio / (1 - xp.where(rare, ratio, 0.0)), 0.0)
        ways = math.lgamma(m) - math.lgamma(places) - math.lgamma(m - places + 1)
        last = ways + (places - 1) * xp.log(xp.maximum(p, 2.0**-40)) + (m - places) * xp.log1p(-p)
        # Products of such sizes are rounded.
        slack = 1.01 + 2.0**-20 * abs(ways)
        near = xp.where(rare, xp.minimum(1.0, slack * xp.exp(last) * (1 + excess_odds)), 1.0)
        chance = xp.where(rare, (p + excess_odds) / (1 + excess_odds), 1.0)
        return ((1.0, sampling_rate), (near, chance))


def excess(count: int, trials: int, probability: float) -> float:
    """Return P(Bin(n, p) > k) = I_p(k + 1, n - k), for k ≥ 0 and p in [0, 1]."""
    from scipy.special import betainc  # `scipy.stats` takes longer to import than JAX

    return 0.0 if count >= trials else float(betainc(count + 1, trials - count, probability))


def least_count(tail: float, trials: int, probability: float) -> int:
    """Return the smallest k ≥ 0 with P(Bin(n, p) > k) ≤ `tail`."""
    return bisect.bisect_left(
        range(trials), True, key=lambda count: excess(count, trials, probability) <= tail
    )


def round_up(value: float, digits: int = 5) -> float:
    """Round ε or δ up to some significant digits."""
    upwards = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    # By its shortest digits: 0.14 stays 0.14, though the float is some 1e-17 larger.
    return float(upwards.create_decimal(repr(float(value))))


def epsilon_text(value: float | None, digits: int = 5) -> str:
    """Format ε, rounded up to some significant digits; ∞ for None, which is no guarantee."""
    if value is None or math.isinf(value):
        return "∞"
    return f"{round_up(value, digits):.{digits}g}"


def check_delta(delta: float) -> None:
    """Raise ValueError unless δ lies in (0, 1)."""
    checks.in_range("(0, 1)", delta=delta)


def check_epsilon(epsilon: float) -> None:
    """Raise ValueError unless ε has a size for which noise can be found."""
    checks.in_range("[1e-06, 1000000.0]", epsilon=epsilon)


def check_noise_multiplier(noise_multiplier: float, zero: bool = False) -> None:
    """Raise ValueError unless z has a usable size, or is an allowed 0."""
    if not (zero and noise_multiplier == 0):
        limits = f"[{SMALLEST_NOISE}, {LARGEST_NOISE}]"
        checks.in_range(limits, noise_multiplier=noise_multiplier)


class Entry(NamedTuple):
    """A group of rounds on the host: float64 z and p, and an exact count."""

    noise_multiplier: float
    sampling_rate: float
    rounds: int


class Drawn(NamedTuple):
    """Rounds from 0 on with random numbers (cohorts, minibatches, noise) from a key's digest."""

    digest: str
    rounds: int


def read_draws(records: Iterable[Mapping[str, Any]]) -> tuple[Drawn, ...]:
    """Read the draws in a report; raise TypeError or KeyError if they are none."""
    draws = tuple(Drawn(record["digest"], record["rounds"]) for record in records)
    if not all(isinstance(digest, str) and isinstance(n, int) for digest, n in draws):
        raise TypeError(f"draws must be digests and numbers of rounds, got {draws!r}")
    return draws


def drawn_twice(runs: Mapping[str, Iterable[Drawn]]) -> str:
    """Return a sentence that names the runs with a round from the same key; "" if there is none."""
    groups: dict[str, dict[str, None]] = {}
    draws_by_run = {name: tuple(draws) for name, draws in runs.items()}
    for (run, its), (other, theirs) in itertools.combinations(draws_by_run.items(), 2):
        for a, b in itertools.product(its, theirs):
            if a.digest == b.digest and a.rounds and b.rounds:
                groups.setdefault(a.digest, {}).update({run: None, other: None})
    if not groups:
        return ""
    names = "; ".join(dict.fromkeys(map(", ".join, groups.values())))
    return (
        "Runs that drew a round's cohort and noise from the same key have no joint ε, and at most "
        f"one of them may be published under its own: {names}."
    )
