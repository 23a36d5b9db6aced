"""Tests of a sampler against its scheme, before an accountant believes the scheme.

An accountant takes from the scheme how clients are drawn. A sampler of a user's own is therefore
asked for many cohorts of several keys, and events whose probability the scheme fixes are counted:
single clients, pairs of clients, two rounds of a key, one round of two keys, the size of cohorts,
and clients that a key never draws. All counts are binomial, exactly.
"""

import math
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.hyperparameters import Hyperparameters, on_host
from fedjaxsim.keys import seed_key
from fedjaxsim.own_code import own_modules
from fedjaxsim.privacy import samplers
from fedjaxsim.privacy.entries import SamplingScheme, excess
from fedjaxsim.privacy.samplers import Sampler, Sampling

_LEVEL = 1e-9
"""Largest probability that one test refuses a sampler of its scheme."""
_DRAWN, _MOST_ROUNDS, _MOST_KEYS = 2**20, 32, 2**12
"""Clients of all cohorts that are drawn, about; rounds of a key, and keys."""


def check_own(
    sampling: Sampling, sampler: Sampler, hparams: Hyperparameters, lawful: set[str]
) -> None:
    """Check a sampler of a user's own with hyperparameters not in `lawful`, and add them.

    Only a function of the package, which closes over no code of a user, makes a sampler that is
    none: one whose parts a user put together is the user's own.
    """
    rate, maker = on_host(sampler.rate(hparams)), sampling.for_clients
    made_here = isinstance(maker, types.FunctionType) and maker.__globals__ is vars(samplers)
    if rate is None or (made_here and not own_modules((maker, sampler.draw, sampler.rate))):
        return
    # Any of them may change what is drawn.
    values = [on_host(hparams.get(name)) for name in sorted(hparams)]
    read = repr([rate, *(np.asarray(value).tolist() for value in values)])
    if read not in lawful:
        check_law(sampler, hparams)
        lawful.add(read)


def check_law(sampler: Sampler, hparams: Hyperparameters) -> None:
    """Check that a sampler draws clients as its scheme and its rate say.

    A sampler whose law is another one may pass: what depends on more than two clients or rounds at
    once is not tested. Nor is a client surely found whose rate differs from the scheme's p by less
    than about 7 √(p(1 − p)/n), n being the number of cohorts: about 2²⁰/m of them, at most 2¹² keys
    of up to 32 rounds and at least two keys. At p = 0.2 that is 0.018 for 40 clients, and 0.09 for
    1,000. The keys are fixed, so the answer is always the same.
    """
    from scipy.stats import binom  # slow to import

    scheme, rate = sampler.scheme, float(sampler.rate(hparams))
    m, kind = scheme.clients, scheme.kind
    checks.in_range("[0, 1]", **{"the sampler's rate": rate})
    turns = 1 if kind == "full" else scheme.turns
    rounds = min(_MOST_ROUNDS, max(2, math.ceil(1 / max(rate, 1e-9))), m + 2)
    rounds = 2 * turns if turns else rounds + rounds % 2
    keys = 2 * max(1, min(_MOST_KEYS, _DRAWN // (m * rounds)) // 2)
    drawn = _drawn(sampler, hparams, keys, rounds)
    if scheme.period is not None and np.any(
        drawn.reshape(keys, 2, scheme.period, m).sum(axis=2) != 1
    ):
        raise ValueError(
            "the sampler's scheme is 'allocation', but a client does not take part in one round of "
            f"every {scheme.period}"
        )
    if kind == "cyclic":
        of_turns = drawn.reshape(keys, 2, -1, m).any(axis=1).sum(axis=1)
        if np.any(of_turns > 1):
            raise ValueError(
                f"the sampler's scheme is 'cyclic', but a client takes part in two rounds that are "
                f"not a multiple of {turns} apart"
            )
        # A period is as a round of Poisson sampling.
        drawn = np.asarray(drawn.reshape(keys, 2, -1, m).any(axis=2))
        rate = scheme.in_turn(rate)
    elif turns and scheme.period is None:
        first, second = np.split(drawn, 2, axis=1)
        if np.any(first.sum(axis=1) != 1) or np.any(first != second):
            raise ValueError(
                f"the sampler's scheme is {kind!r}, but a client does not take part in every round "
                f"of its group, one in {turns}"
            )
        return
    if kind == "fixed" and np.any(drawn.sum(axis=2) != scheme.capacity):
        raise ValueError(f"the sampler's scheme is 'fixed', of {scheme.capacity}, but sizes vary")
    counts = _counts if scheme.period is None else _counts_of_turns
    for event, successes, trials, probability in counts(drawn, scheme, rate):
        # Both tails; `binom.sf` of the next smaller number is that of this one or more.
        tails = (
            binom.cdf(successes, trials, probability),
            binom.sf(successes - 1, trials, probability),
        )
        chance = 2 * np.minimum(*tails) * successes.size
        if np.min(chance, initial=1.0) < _LEVEL:
            worst = int(successes[np.argmin(chance)])
            raise ValueError(
                f"the sampler does not draw as its scheme {kind!r} says: {event} {worst} times in "
                f"{trials}, where {trials * probability:.4g} are expected"
            )


def _drawn(sampler: Sampler, hparams: Hyperparameters, keys: int, rounds: int) -> np.ndarray:
    """Draw cohorts, (keys, rounds, m) bool, of clients that exist, each at most once."""
    m = sampler.scheme.clients
    run_keys = jax.random.split(seed_key(0), keys)
    asked = jnp.arange(keys * rounds, dtype=jnp.int32)

    def one(index):
        cohort = sampler.draw(run_keys[index // rounds], index % rounds, hparams)
        return cohort.ids, cohort.mask

    ids, mask = (np.asarray(array) for array in jax.jit(lambda: jax.lax.map(one, asked))())
    ids = np.where(mask, ids, m)
    if np.any(ids < 0) or np.any(mask & (ids == m)):
        raise ValueError(f"the sampler draws clients outside of [0, {m})")
    drawn = np.zeros((len(asked), m + 1), bool)
    drawn[np.arange(len(asked))[:, None], ids] = True
    if np.any(drawn[:, :m].sum(axis=1) != mask.sum(axis=1)):
        raise ValueError("the sampler draws a client twice in one cohort")
    return drawn[:, :m].reshape(keys, rounds, m)


def _counts(
    drawn: np.ndarray, scheme: SamplingScheme, p: float
) -> Iterator[tuple[str, np.ndarray, int, float]]:
    """Yield an event, how often it happened, (tests,), of how many trials, and its probability.

    Counts are by client, or, of clients who are drawn independently, of all together.
    """
    rounds, m = drawn.shape[1], scheme.clients
    independent = scheme.kind in ("poisson", "cyclic")
    both = p * p if independent else p * (scheme.capacity - 1) / max(m - 1, 1)
    even = drawn[:, :, : m - m % 2]
    mirrored = drawn[:, :, m - m // 2 :][:, :, ::-1]
    events = {
        "a client takes part": (drawn, p),
        "neighbours take part together": (even[..., ::2] & even[..., 1::2], both),
        "two clients take part together": (drawn[:, :, : m // 2] & mirrored, both),
        "a client takes part in a round and the next": (drawn[:, ::2] & drawn[:, 1::2], p**2),
        "a round of two keys has a client": (drawn[::2] & drawn[1::2], p**2),
        "a client never takes part": (~drawn.any(axis=1), (1 - p) ** rounds),
    }
    if independent:
        yield "a client takes part", drawn.sum(axis=(0, 1)), drawn[..., 0].size, p
    for event, (happened, probability) in events.items():
        tests = 1 if independent else happened.shape[-1]
        trials = happened.size // max(tests, 1)
        yield event, happened.reshape(trials, tests).sum(axis=0), trials, probability
    if independent:
        sizes, most = drawn.sum(axis=2), math.floor(m * p)
        for size in sorted({most, max(0, most - math.isqrt(most)), most + math.isqrt(most)}):
            event = f"a cohort has more than {size} clients"
            yield event, np.array([np.sum(sizes > size)]), sizes.size, excess(size, m, p)


def _counts_of_turns(
    drawn: np.ndarray, scheme: SamplingScheme, p: float
) -> Iterator[tuple[str, np.ndarray, int, float]]:
    """Yield the same of clients that take part in one round of each period."""
    m = scheme.clients
    turns = np.argmax(drawn.reshape(len(drawn), 2, -1, m), axis=2)
    rounds = np.bincount(turns.ravel(), minlength=drawn.shape[1] // 2)
    yield "a client takes part", rounds, turns.size, p
    yield "a client takes part", np.sum(turns == 0, axis=(0, 1)), 2 * len(turns), p
    even = turns[..., : m - m % 2]
    mirrored = turns[..., m - m // 2 :][..., ::-1]
    events = {
        "neighbours take part together": even[..., ::2] == even[..., 1::2],
        "two clients take part together": turns[..., : m // 2] == mirrored,
        "a client has the same turn in two periods": turns[:, 0] == turns[:, 1],
        "a client has the same turn with two keys": turns[::2] == turns[1::2],
    }
    for event, happened in events.items():
        if happened.size:
            yield event, np.array([np.sum(happened)]), happened.size, p
    sizes, most = np.sum(turns == 0, axis=2), math.floor(m * p)
    for size in sorted({most, max(0, most - math.isqrt(most)), most + math.isqrt(most)}):
        event = f"a cohort has more than {size} clients"
        yield event, np.array([np.sum(sizes > size)]), sizes.size, excess(size, m, p)
