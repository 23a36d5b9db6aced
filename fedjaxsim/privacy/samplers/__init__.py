"""Samplers of cohorts, and the clients of a cohort that answer.

Shapes are static, so a cohort has a fixed capacity. The probability that a drawn cohort exceeds it
is part of the reported δ.

Whoever is drawn is charged. An answer follows from the client, the round and a key of the client's
own, never from data, and the sum is divided by a public number. So a client without an answer is,
for every mechanism and every sampler, a client whose message is zero in that round: ε is at most
the ε of a run in which all drawn clients answer.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincinv

from fedjaxsim import checks, keys
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.hyperparameters import (
    Declarations,
    Default,
    Hyperparameter,
    HyperparameterCheck,
    Hyperparameters,
    on_host,
    reads,
)
from fedjaxsim.kernels import backend, threefry
from fedjaxsim.kernels.permutation import by_swaps
from fedjaxsim.keys import Stream
from fedjaxsim.privacy.entries import LONGEST_PERIOD, SamplingScheme, excess, least_count
from fedjaxsim.privacy.samplers import blocks

_FEW_CLIENTS = 2**13
"""Up to this number of clients a coin for each costs no more than `blocks.draw`."""
_MOST_EXCESS = 1e-6
"""Largest probability, per round, that a cohort exceeds its capacity: no δ carries more."""
_TOO_FEW = 1e-18
"""Probability, per round, of too few distinct clients among the draws of `fixed_size`."""
SAMPLING_RATE = Hyperparameter(
    "sampling_rate",
    default=Default.SAMPLED,
    range=(math.nextafter(0, 1), 1.0),
    allowed="lie in (0, 1]",
    help="p, the probability that a client takes part in a round.",
)


class WorkFunction(Protocol):
    """The share of its local steps that a drawn client does."""

    def __call__(self, key: jax.Array, round_: jax.Array, client_id: jax.Array, /) -> jax.Array:
        """Return the share, () in [0, 1], with a key of this client and round; 0 is no answer."""
        ...


class Availability(NamedTuple):
    """The rounds in which clients answer, and the part of their local steps that they do.

    Attributes:
      work: `(key, round, client_id) -> share`, (): the part of its local steps that a drawn client
        does, in [0, 1]; 0 if it does not answer, else at least one step. `key` belongs to this
        client and this round.
      answers: the part of the drawn clients that answers, on average over clients and rounds, in
        (0, 1]; public, since releases are divided by p·m·answers.
    """

    work: WorkFunction
    answers: float

    @property
    def levels(self) -> tuple[tuple[int, float], ...]:
        """((clients, share), …) of `privacy_levels`, at which each group has an ε; else ()."""
        work = self.work  # a subclass may answer otherwise
        return work.levels if isinstance(work, _Coins) and type(work) is _Coins else ()


@dataclasses.dataclass(frozen=True)
class _Coins:
    """Secret coins of clients, as `privacy_levels` says: no other answer hides a client.

    `groups` has the number of each client's group, and `shares` each group's share.
    """

    groups: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def by_client(self) -> np.ndarray:
        """The share of each client, (m,)."""
        return np.asarray(self.shares, np.float64)[np.asarray(self.groups)]

    @property
    def levels(self) -> tuple[tuple[int, float], ...]:
        """((clients, share), …) of the groups."""
        counts = np.bincount(self.groups, minlength=len(self.shares)).tolist()
        return tuple(zip(counts, self.shares, strict=True))

    def __call__(self, key: jax.Array, round_: jax.Array, client_id: jax.Array) -> jax.Array:
        shares = self.by_client
        thresholds = np.floor(shares * 2.0**32).clip(max=2**32 - 1).astype(np.uint32)
        place = jnp.minimum(client_id, len(shares) - 1)
        heads = threefry.bits(key, (1,))[0] < jnp.asarray(thresholds)[place]
        return jnp.where(heads | jnp.asarray(shares == 1)[place], 1.0, 0.0)


class Cohort(NamedTuple):
    """The clients of one round, in a static number of slots.

    Attributes:
      ids: (capacity,) int32 client ids; m or more where mask is False.
      mask: (capacity,) bool; the filled slots come first.
      overflow: () int32, the number of drawn clients left out for lack of a slot.
    """

    ids: jax.Array
    mask: jax.Array
    overflow: jax.Array


class Sampling(NamedTuple):
    """A way to draw cohorts, for a population of any size.

    Attributes:
      for_clients: `(m) -> Sampler`; raises ValueError if m does not suit it.
      hyperparameters: records of the hyperparameters read; `hyperparameters.reads` sets them.
      availability: when drawn clients answer; None for always. `available` sets it.

    Example:
      >>> fjs.poisson(0.1).sampler(100).scheme.kind
      'poisson'
    """

    for_clients: "Callable[[int], Sampler]"
    hyperparameters: Declarations = ()
    availability: Availability | None = None

    def sampler(self, num_clients: int) -> "Sampler":
        """Return the sampler of m clients; raise ValueError if m does not suit it.

        Shares of clients follow from its availability, whatever the scheme of `for_clients` says.
        """
        made = self.for_clients(num_clients)
        if type(made) is not Sampler:
            return made  # a simulation refuses it
        availability = made.availability if self.availability is None else self.availability
        levels = () if availability is None else availability.levels
        scheme = dataclasses.replace(made.scheme, levels=levels, share=1.0)
        return made._replace(availability=availability, scheme=scheme)


class DrawFunction(Protocol):
    """The draw of a round's cohort."""

    def __call__(self, key: jax.Array, round_: jax.Array, hparams: Hyperparameters, /) -> Cohort:
        """Return the clients who take part.

        Args:
          key: the sampler's in all rounds of a run, so it may plan over several rounds.
          round_: () int32, counted from 0.
          hparams: hyperparameters that have one value for all clients.
        """
        ...


class RateFunction(Protocol):
    """The probability that is charged."""

    def __call__(self, hparams: Hyperparameters, /) -> jax.Array:
        """Return p, (), the exact probability with which each client is included in a round."""
        ...


class Sampler(NamedTuple):
    """A sampler of m clients, as pure functions.

    Attributes:
      scheme: the description that accountants read.
      draw: `(key, round, hparams) -> Cohort`; `key` is the sampler's in all rounds of a run, so it
        may plan over several rounds.
      rate: `(hparams) -> p`, (), the exact inclusion probability, charged to the ledger.
      check: `(hparams)`; raises ValueError for unsuitable hyperparameters known on the host.
      availability: when drawn clients answer; None for always. `draw` and `rate` ignore it.
    """

    scheme: SamplingScheme
    draw: DrawFunction
    rate: RateFunction
    check: HyperparameterCheck = lambda hparams: None
    availability: Availability | None = None

    @property
    def takes_all(self) -> bool:
        """Return whether all clients take part in every round."""
        return self.scheme.kind == "full" and self.availability is None

    def answer_rate(self, rate: jax.Array) -> jax.Array:
        """Return the mean probability that a client is drawn, with this rate, and answers."""
        return rate if self.availability is None else rate * self.availability.answers

    def answering(self, cohort: Cohort, key: jax.Array, round_: jax.Array) -> Cohort:
        """Return the clients of a cohort who answer; `key` is the round's key for clients."""
        if (availability := self.availability) is None:
            return cohort
        shares = jax.vmap(lambda k: work_of(availability, key, round_, k))(cohort.ids)
        mask, size = cohort.mask & (shares > 0), cohort.mask.shape[0]
        places = jnp.nonzero(mask, size=size, fill_value=size)[0]
        ids = cohort.ids.at[places].get(mode="fill", fill_value=self.scheme.clients)
        return cohort._replace(ids=ids, mask=jnp.arange(size) < jnp.sum(mask))


def _cohort(ids: jax.Array, mask: jax.Array) -> Cohort:
    """Return a cohort that cannot exceed its slots."""
    return Cohort(ids, mask, jnp.zeros((), jnp.int32))


def full_participation() -> Sampling:
    """Take all clients in every round.

    Formal guarantees:
      * Nothing is random, so nothing is amplified: p = 1.

    Example:
      >>> sampler = fjs.full_participation().sampler(5)
      >>> sampler.draw(jax.random.key(0), jnp.int32(0), hparams).ids.tolist()
      [0, 1, 2, 3, 4]
    """

    def for_clients(num_clients: int) -> Sampler:
        def draw(key, round_, hparams):
            ids = jnp.arange(num_clients, dtype=jnp.int32)
            return _cohort(ids, jnp.ones(num_clients, bool))

        scheme = SamplingScheme("full", num_clients, num_clients)
        return Sampler(scheme, draw, lambda hparams: jnp.ones(()))

    return Sampling(for_clients)


def default_capacity(num_clients: int, sampling_rate: float, tail: float = 1e-30) -> int:
    """Return the smallest capacity B with P(Bin(m, p) > B) ≤ `tail`."""
    return min(num_clients, max(1, least_count(tail, num_clients, sampling_rate)))


def _threshold(sampling_rate: jax.Array) -> jax.Array:
    """Return floor(p·2³²) as uint32, for p < 1. Exact: a power of two scales without rounding."""
    return jnp.floor(jax.lax.stop_gradient(sampling_rate) * 2.0**32).astype(jnp.uint32)


@jax.jit  # a run also asks for it outside any program, where each operation is one
def _rate_of_coins(p: jax.Array) -> jax.Array:
    """Return the probability with which `_coins` draws a client, as the threshold rounds it."""
    return jnp.where(p >= 1, 1.0, _threshold(p).astype(p.dtype) * 2.0**-32)


def _coins(key: jax.Array, p: jax.Array, num_clients: int) -> tuple[jax.Array, ...]:
    """Toss a coin per client: ids (m,), whether drawn (m,), and 0 clients without a slot."""
    drawn = (threefry.bits(key, (num_clients,)) < _threshold(p)) | (p >= 1)
    return jnp.arange(num_clients, dtype=jnp.int32), drawn, jnp.int32(0)


@reads(
    lambda sampling_rate, **_: (
        SAMPLING_RATE
        if sampling_rate is None
        else dataclasses.replace(SAMPLING_RATE, default=float(sampling_rate)),
    )
)
def poisson(
    sampling_rate: float | None = None,
    *,
    max_rate: float | None = None,
    capacity: int | None = None,
) -> Sampling:
    """Draw every client independently with probability p (Poisson sampling).

    p is `hparams.sampling_rate`; it may be swept up to `max_rate` without recompiling and is never
    differentiated. Two methods draw the same distribution. m and the capacity alone select one, so
    a seed gives the same cohorts on every placement (but others when the method changes):

    * Up to 8,192 clients, or for a capacity that suits rates above 1/32: 32 random bits per client,
      as an integer, are compared with floor(p·2³²). (Float32 uniforms would include small p too
      often.)
    * Otherwise `blocks.draw`, in time proportional to the cohort. A rate at which a cohort exceeds
      the capacity with probability above 1e-6 is refused; a traced rate cannot be, and is capped at
      no more than twice the largest rate allowed.

    Formal guarantees:
      * Clients are drawn independently of each other, of the data and of earlier rounds; random
        bits belong to the key, the round and the client's id, or fixed blocks of ids.
      * The inclusion probability is the charged one: floor(p·2³²)/2³² by coins; by blocks p itself,
        for a float32 p, up to a total variation distance below 1e-30 a round.
      * A cohort above capacity keeps a uniformly random part of its members. What that tells others
        is part of the price; see `SamplingScheme.inclusions`.
      * The realised cohort size stays inside the engine: sums are divided by p·m.

    Accountants: "pld" and "rdp", in both views.

    Args:
      sampling_rate: p, the default of `hparams.sampling_rate`. By default a fifth of the clients is
        expected, but at least 10, so that few clients leave few rounds empty.
      max_rate: Largest p that `hparams.sampling_rate` will take, by default `sampling_rate`;
        sets the default capacity.
      capacity: Number of slots in a cohort. By default the smallest that a cohort drawn at
        `max_rate` exceeds with probability at most 1e-30: in a million rounds, (1 + e^ε) times that
        stays below 1e-11 up to ε = 30.

    Raises:
      ValueError: if a rate lies outside (0, 1], or `max_rate` is below `sampling_rate`; for a
        population, if the capacity lies outside [1, m].

    Example:
      >>> fjs.poisson(0.1).sampler(1000).scheme.capacity < 1000
      True
    """
    for name, rate in (("sampling_rate", sampling_rate), ("max_rate", max_rate)):
        if rate is not None:
            dataclasses.replace(SAMPLING_RATE, name=name).check(rate)
    if max_rate is not None and sampling_rate is not None and max_rate < sampling_rate:
        raise SettingError(
            Name("max_rate"),
            " must be at least ",
            Name("sampling_rate"),
            f" {sampling_rate}, got {max_rate}",
        )

    def for_clients(num_clients: int) -> Sampler:
        usual = min(1.0, max(0.2, 10 / num_clients)) if sampling_rate is None else sampling_rate
        largest = usual if max_rate is None else max_rate
        return _poisson(num_clients, min(usual, largest), largest, capacity)

    return Sampling(for_clients)


def _poisson(num_clients: int, usual: float, max_rate: float, capacity: int | None) -> Sampler:
    slots = default_capacity(num_clients, max_rate) if capacity is None else capacity
    scheme = SamplingScheme("poisson", num_clients, slots)
    # The largest p with P(Bin(m, p) > B) ≤ _MOST_EXCESS.
    largest = 1.0
    if slots < num_clients:
        largest = float(betaincinv(slots + 1, num_clients - slots, _MOST_EXCESS))
    by_blocks = num_clients > _FEW_CLIENTS and largest <= blocks.LARGEST_RATE

    def draw(key, round_, hparams):
        first, second, keep_key = keys.streams(
            key, (Stream.COINS, round_), (Stream.POINTS, round_), (Stream.KEPT, round_)
        )
        p = hparams.sampling_rate
        if by_blocks:
            ids, drawn, missed = blocks.draw(first, second, p, num_clients, largest)
        else:
            ids, drawn, missed = _coins(first, p, num_clients)
        cohort = _in_slots(keep_key, ids, drawn, slots, num_clients)
        return cohort._replace(overflow=cohort.overflow + missed)

    def rate(hparams):
        p = jax.lax.stop_gradient(jnp.asarray(hparams.get("sampling_rate", usual), float))
        if by_blocks:
            return blocks.charged_rate(p, largest)
        return _rate_of_coins(p)

    def check(hparams):
        rates = on_host(hparams.sampling_rate)
        for p in [] if rates is None else np.ravel(rates).tolist():
            if p * 2.0**32 < 1:
                raise SettingError(Name("sampling_rate"), f" must be at least 2^-32, got {p}")
            if (often := excess(slots, num_clients, p)) > _MOST_EXCESS:
                raise SettingError(
                    Name("sampling_rate"),
                    f" {p} of {num_clients} clients exceeds the cohort capacity of "
                    f"{slots} with probability {often:.2g} a round; the capacity must be at least "
                    f"{default_capacity(num_clients, p)}",
                )

    return Sampler(scheme, draw, rate, check=check)


def _in_slots(
    key: jax.Array, ids: jax.Array, drawn: jax.Array, slots: int, num_clients: int
) -> Cohort:
    """Put the drawn clients into slots, or a uniformly random part of them."""
    count = jnp.sum(drawn, dtype=jnp.int32)

    def some(drawn):
        """Keep those with the smallest random numbers."""
        priority = jnp.where(drawn, threefry.bits(key, drawn.shape), np.uint32(2**32 - 1))
        return drawn & (priority <= jnp.sort(priority)[slots - 1])

    if slots < drawn.shape[0]:
        if backend.platform() == "gpu":  # whose host would wait for a branch; some may be all
            drawn = some(drawn)
        else:
            drawn = jax.lax.cond(count > slots, some, lambda drawn: drawn, drawn)
    places = jnp.nonzero(drawn, size=slots, fill_value=ids.shape[0])[0]
    return Cohort(
        ids.at[places].get(mode="fill", fill_value=num_clients),
        jnp.arange(slots) < count,
        jnp.maximum(count - slots, 0),
    )


def fixed_size(*, cohort: int) -> Sampling:
    """Draw exactly q of m clients, a uniformly random subset, independently in every round.

    A draw takes O(q log q) time, or O(m) where q exceeds m/2.

    Formal guarantees:
      * Every subset of q clients is equally likely, whatever the data and earlier rounds, and q is
        public. (Except with probability below 1e-18 a round: the cohort then has fewer members, or,
        where q exceeds m/2, is biased towards low ids.)
      * Each client is in with probability q/m, which the ledger is charged, but clients are *not*
        independent: the bits of all others determine a client's own. So sampling hides nothing in
        the joint-DP view, and only the number of a client's participations, Bin(T, q/m), is random.

    Args:
      cohort: Number q of clients in every cohort, at most m.

    Example:
      >>> fjs.fixed_size(cohort=10).sampler(100).scheme.capacity
      10
    """

    def for_clients(num_clients: int) -> Sampler:
        checks.count(1, num_clients, cohort=cohort)
        left_out = num_clients - cohort

        def draw(key, round_, hparams):
            key = keys.stream(key, Stream.COHORT, round_)
            if left_out == 0:
                ids = jnp.arange(num_clients, dtype=jnp.int32)
            elif cohort <= left_out:
                ids = _distinct(key, cohort, num_clients)
            else:
                outside = _distinct(key, left_out, num_clients)
                member = jnp.ones(num_clients, bool).at[outside].set(False, mode="drop")
                ids = jnp.nonzero(member, size=cohort)[0].astype(jnp.int32)
            return _cohort(ids, ids < num_clients)

        scheme = SamplingScheme("fixed", num_clients, cohort)
        return Sampler(scheme, draw, lambda hparams: jnp.asarray(cohort / num_clients))

    return Sampling(for_clients)


def _distinct(key: jax.Array, count: int, num_clients: int) -> jax.Array:
    """Return the first `count` distinct ids among independent uniform ones: a uniform subset.

    Ids are drawn as whole bits and ids of m or more rejected, so all are equally likely. `count`
    is at most (m + 1)/2, so a draw is new and valid with probability 1/4 or more. Ids are m where
    the draws did not suffice (probability below 1e-18).
    """
    from scipy.stats import nbinom  # slow to import

    bits = max(1, (num_clients - 1).bit_length())
    # Each draw is new and valid at least as often as the last one.
    worst = (num_clients - count + 1) / 2**bits
    draws = count + int(nbinom.isf(_TOO_FEW, count, worst))
    ids = (threefry.bits(key, (draws,)) >> (32 - bits)).astype(jnp.int32)
    order = jnp.arange(draws)
    by_id, when = jax.lax.sort((ids, order), num_keys=1, is_stable=True)
    is_new = jnp.concatenate([jnp.ones(1, bool), by_id[1:] != by_id[:-1]])
    is_new = jnp.zeros(draws, bool).at[when].set(is_new, unique_indices=True)
    chosen = jnp.nonzero(is_new & (ids < num_clients), size=count, fill_value=draws)[0]
    return ids.at[chosen].get(mode="fill", fill_value=num_clients)


def fixed_groups(*, groups: int) -> Sampling:
    """Divide the clients into groups once, at random; group t mod `groups` takes part in round t.

    Groups differ in size by one client at most; sums are divided by m/`groups`.

    Formal guarantees:
      * A client takes part in every `groups`-th round and in no other: two participations are
        exactly `groups` rounds apart (the order of clients is a permutation whatever the random
        bits).
      * Nothing else is claimed: groups may be public, and sampling hides nothing in either view.
        Accountants "gaussian", and "correlated" for noise that is correlated over rounds.

    Args:
      groups: Number of groups, the rounds between two participations of a client; at most m.
    """

    def for_clients(num_clients: int) -> Sampler:
        checks.count(1, num_clients, groups=groups)
        size = math.ceil(num_clients / groups)

        def draw(key, round_, hparams):
            return _cohort(*_group(key, round_, groups, num_clients))

        scheme = SamplingScheme("groups", num_clients, size, groups=groups)
        return Sampler(scheme, draw, lambda hparams: jnp.asarray(1 / groups))

    return Sampling(for_clients)


@reads(
    lambda groups=1, sampling_rate=None, **_: (
        dataclasses.replace(SAMPLING_RATE, default=_rate_of_turns(groups, sampling_rate)),
    )
)
def cyclic(
    sampling_rate: float | None = None, *, groups: int, max_rate: float | None = None
) -> Sampling:
    """Let each client of the group in turn take part with probability G·q (cyclic Poisson).

    The clients are divided once into G = `groups` groups, as by `fixed_groups`. In round t each
    client of group t mod G takes part, independently of all others. q is `hparams.sampling_rate`,
    the part of all clients that a round expects: a client has a turn in every G-th round alone, and
    is in with probability G·q then. q may be swept up to `max_rate`. Sums are divided by q·m.

    Two participations of a client are a multiple of G rounds apart, as noise that is correlated
    over up to G rounds needs (`banded`), and still the coins of its turns amplify. With independent
    noise Poisson sampling costs less.

    Formal guarantees:
      * Groups are public, and a permutation whatever the random bits: no client has two turns
        within G rounds.
      * Coins have 32 random bits of the round's key and the client's place in its group, as
        integers below floor(G·q·2³²), and are independent of each other, of data and of other
        rounds.
      * A cohort above capacity keeps a uniformly random part of its members; what that tells others
        is part of the price; see `SamplingScheme.inclusions`.
      * The largest p of a run is charged in all ⌈T/G⌉ turns; rounds out of order have no ε.

    Accountants: "pld" and "rdp", in both views.

    Args:
      sampling_rate: q, the default of `hparams.sampling_rate`, at most 1/G; by default 1/(2G).
      groups: G, the number of groups; at most m.
      max_rate: Largest q that `hparams.sampling_rate` will take, by default `sampling_rate`; sets
        the capacity.

    Raises:
      ValueError: if a rate lies outside (0, 1/G], or `max_rate` is below `sampling_rate`; for a
        population, if it has fewer clients than groups.
    """
    checks.count(groups=groups)
    usual = _rate_of_turns(groups, sampling_rate)
    largest = usual if max_rate is None else max_rate
    for name, rate in (("sampling_rate", usual), ("max_rate", largest)):
        checks.in_range("(0, inf]", **{name: rate})
        if rate * groups > 1 + 1e-6:
            raise SettingError(
                Name(name), f" must be at most 1/{groups} for {groups} groups in turn"
            )
    if largest < usual:
        raise SettingError(
            Name("max_rate"),
            " must be at least ",
            Name("sampling_rate"),
            f" {usual}, got {max_rate}",
        )

    def for_clients(num_clients: int) -> Sampler:
        checks.count(1, num_clients, groups=groups)
        size = math.ceil(num_clients / groups)
        slots = default_capacity(size, min(1.0, groups * largest * (1 + 2.0**-22)))

        def probability(q):
            return jnp.minimum(jax.lax.stop_gradient(jnp.asarray(q, float)) * groups, 1.0)

        def draw(key, round_, hparams):
            coin_key, keep_key = keys.streams(key, (Stream.COINS, round_), (Stream.KEPT, round_))
            ids, in_turn = _group(key, round_, groups, num_clients)
            p = probability(hparams.sampling_rate)
            heads = (threefry.bits(coin_key, (size,)) < _threshold(p)) | (p >= 1)
            return _in_slots(keep_key, ids, in_turn & heads, slots, num_clients)

        def rate(hparams):
            return _rate_of_coins(probability(hparams.get("sampling_rate", usual))) / groups

        def check(hparams):
            rates = on_host(hparams.sampling_rate)
            for q in [] if rates is None else np.ravel(rates).tolist():
                p = min(1.0, groups * q)
                if not 2.0**-32 <= groups * q <= 1 + 1e-6:
                    raise SettingError(
                        Name("sampling_rate"),
                        f" must lie in [2^-32, 1]/{groups}, for {groups} groups in turn, got {q}",
                    )
                if (often := excess(slots, size, p)) > _MOST_EXCESS:
                    raise SettingError(
                        Name("sampling_rate"),
                        f" {q} in {groups} groups of {num_clients} clients exceeds "
                        f"the cohort capacity of {slots} with probability {often:.2g} a round; ",
                        Name("max_rate"),
                        f" must be at least {q}",
                    )

        scheme = SamplingScheme("cyclic", num_clients, slots, groups=groups)
        return Sampler(scheme, draw, rate, check=check)

    return Sampling(for_clients)


def _rate_of_turns(groups: int, sampling_rate: float | None) -> float:
    return 1 / (2 * groups) if sampling_rate is None else float(sampling_rate)


def _group(
    key: jax.Array, round_: jax.Array, groups: int, num_clients: int
) -> tuple[jax.Array, jax.Array]:
    """Return ids of the group of a round, and whether a place is a client's, (⌈m/groups⌉,) each."""
    position = jnp.arange(math.ceil(num_clients / groups)) * groups + round_ % groups
    mask = position < num_clients
    ids = by_swaps(key, jnp.int32(num_clients))(jnp.where(mask, position, 0))
    return jnp.where(mask, ids, num_clients).astype(jnp.int32), mask


def random_allocation(*, every: int) -> Sampling:
    """Let each client take part in one round of every `every`, drawn uniformly.

    Rounds form periods of `every` rounds. In each period each client draws its round independently
    of all other clients and periods, so cohorts have Bin(m, 1/`every`) members. Sums are divided by
    m/`every`. Every round of a period hashes all m ids.

    In one period these are balls in bins. Over several, balls-and-bins sampling (Chua et al. 2025)
    keeps each client's turn, which costs more; here it is drawn anew in each period.

    A client surely takes part in each period, but the noise of all its rounds hides in which one:
    ε for zero-out is below Poisson sampling's with p = 1/`every` in the plans of
    docs/privacy.md.

    Formal guarantees:
      * A client's round of a period has 64 random bits of the period's key and the client's id:
        each round has probability 1/`every` within 2⁻⁶⁴. Clients and periods are independent.
      * The rounds of all other clients say nothing of a client's own, unless a cohort is full. A
        cohort's places suffice except with probability 1e-30, and the cost of full ones is part
        of the price; see `SamplingScheme.full_in_period`.
      * A period is charged as a whole, with the least noise of the run; rounds out of order have no
        ε. So a schedule of z costs as much as its least z in all rounds.
      * Other releases than sums with independent Gaussian noise cost what they do in a known round
        of each period. Correlated noise is refused.

    Accountants: "pld" and "rdp", in both views. A replacement is charged as two zeroings, an upper
    bound of 1.4 to 2.5 times the ε of zero-out. The ε of zero-out lies between the bounds of
    PLD-accounting, the program of Feldman and Shenfeld (2026), in all plans compared. Their bound
    for k random rounds out of t is the ε of `every` t/k.

    Args:
      every: t, the rounds of a period; at most 65,535. A number of rounds that is no multiple of t
        costs as much as the next multiple.
    """
    checks.count(1, LONGEST_PERIOD, every=every)

    def for_clients(num_clients: int) -> Sampler:
        slots = default_capacity(num_clients, 1 / every)

        def draw(key, round_, hparams):
            round_ = jnp.asarray(round_)
            period_key, keep_key = keys.streams(
                key, (Stream.PERIOD, round_ // every), (Stream.KEPT, round_)
            )
            ids = jnp.arange(num_clients, dtype=jnp.int32)
            turns = _multiple(*keys.words(period_key, Stream.TURNS, ids), every)
            return _in_slots(keep_key, ids, turns == round_ % every, slots, num_clients)

        scheme = SamplingScheme("allocation", num_clients, slots, period=every)
        return Sampler(scheme, draw, lambda hparams: jnp.asarray(1 / every))

    return Sampling(for_clients)


def _multiple(high: jax.Array, low: jax.Array, factor: int) -> jax.Array:
    """Return floor(u · factor/2⁶⁴) of numbers u of two uint32 words, for a factor below 2¹⁶."""
    carry = jnp.zeros_like(low)
    for word in (low, high):
        for digit in (word & 0xFFFF, word >> 16):
            carry = (digit * np.uint32(factor) + carry) >> 16
    return carry.astype(jnp.int32)


def available(sampling: Sampling, availability: Availability) -> Sampling:
    """Return the sampling with clients that answer at times, as `intermittent()` says.

    A silent client computes nothing, keeps its state and sends zero, which every sensitivity
    allows. Systems of one minibatch or one pass do it whole or not at all. Releases are divided by
    p·m·a, where a is the public share of drawn clients that answer; the realised number would
    reveal a single client.

    Every drawn client is charged as if it answered, so ε is the sampling's alone. For a
    client that is awake in a third of 2,000 rounds at p = 0.01, z = 1, δ = 10⁻⁵ the report says
    ε = 2.58; the rounds in which it is awake cost 1.51. Secret coins alone lower ε, as in
    `privacy_levels`. p is the rate of an available client: a server that fills its cohorts from the
    third that is awake draws at 3p and pays for it.
    """
    if not isinstance(availability, Availability):
        raise ValueError(f"availability must be such as intermittent(), got {availability!r}")
    return sampling._replace(availability=availability)


def intermittent(
    *,
    dropout: float = 0.1,
    least_work: float = 1.0,
    period: int = 24,
    window: int | None = None,
) -> Availability:
    """Let drawn clients answer in a part of each day, and then with some probability.

    Client k can answer in round t if (t + k) mod `period` < `window`. It then drops out with
    probability `dropout`, independently of everything else. A client that answers does a part of
    its local steps that is uniform in [`least_work`, 1].

    Formal guarantees:
      * The rounds in which a client can answer may be public. Who answers must be as secret as who
        is drawn: an observer of the answers needs full participation (p = 1) in the account.

    Args:
      dropout: Probability that a drawn client does not answer.
      least_work: Smallest part of its local steps that a client does.
      period: Rounds of a day; clients are spread evenly over its time zones.
      window: Rounds of a day in which a client can answer; by default all.
    """
    window = period if window is None else window
    checks.in_range("[0, 1)", dropout=dropout)
    checks.in_range("(0, 1]", least_work=least_work)
    checks.count(period=period)
    checks.count(1, period, window=window)
    lost = np.uint32(dropout * 2.0**32)

    def work(key, round_, client_id):
        coin, part = threefry.bits(key, (2,))
        awake = (round_ % period + client_id % period) % period < window
        share = least_work + (1 - least_work) * (part * 2.0**-32)
        return jnp.where(awake & (coin >= lost), share, 0.0)

    return Availability(work, (1 - dropout) * window / period)


def privacy_levels(groups: ArrayLike, shares: Sequence[float]) -> Availability:
    """Let drawn clients take part with a probability of their group, so each group has its own ε.

    A group with a small share answers seldom and has a small ε. The reports of a run state ε for
    each group, and, as the run's, ε of the group with share 1. `calibration.shares` finds the
    shares that meet an ε for each group. Models weight a client by its share.

    Formal guarantees:
      * A drawn client answers by 32 random bits of the round's key and its id: with probability
        floor(share·2³²)/2³², independently of all other clients, of data and of other rounds. So
        one of a group with share s takes part as in Poisson sampling with probability p·s.
      * The group of a client is public. It must not follow from private rows, since it says which
        ε the client has, and to whom it belongs.

    Args:
      groups: (m,) the number of each client's group, from 0 on.
      shares: of each group; in (0, 1], the largest is 1.

    Raises:
      ValueError: for shares outside (0, 1] or none that is 1, or groups without a share.
    """
    numbers = np.asarray(groups)
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(f"groups must be a list of whole numbers, got {groups}")
    for share in shares:
        checks.in_range("(0, 1]", share=share)
    if max(shares, default=0.0) != 1:
        raise ValueError(f"the largest of shares must be 1, got {list(shares)}")
    if not len(numbers) or np.min(numbers) < 0 or np.max(numbers) >= len(shares):
        raise ValueError(f"groups must be numbers below {len(shares)}, the number of shares")
    coins = _Coins(tuple(numbers.tolist()), tuple(map(float, shares)))
    return Availability(coins, float(np.mean(coins.by_client)))


def work_of(
    availability: Availability, key: jax.Array, round_: jax.Array, client_id: jax.Array
) -> jax.Array:
    """Return the share of one client, (), from the round's key for clients."""
    client_key = keys.stream(key, Stream.AVAILABILITY, client_id)
    return availability.work(client_key, round_, client_id)
