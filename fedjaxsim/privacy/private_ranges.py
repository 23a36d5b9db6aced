"""Ranges of columns by noisy votes of the clients, before round 1.

Each client votes ½ or −½ on a question about each of d columns, so a vote has norm √d/2 whatever
the rows hold. Two bisections follow from the noisy sums alone. The first finds the clients' median
m of their medians: it tolerates errors, so it takes little of the budget. The second finds how far
from m the rows of nearly all clients lie. A narrow column far from 0, such as a year, gets a
narrow range, since the second search does not depend on the column's size.
"""

import hashlib
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks, keys
from fedjaxsim.data.columns import Preparation
from fedjaxsim.data.population import Population
from fedjaxsim.data.transforms import mapped, noted, unbounded
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.entries import check_noise_multiplier
from fedjaxsim.privacy.mechanisms import gaussian, release_once

Ask = Callable[[np.ndarray, np.ndarray | None], np.ndarray]
"""`(threshold, centre) -> share`, (d,) each: the share of clients, with noise, of whom a column's
median is at most `threshold`, or all values are within `threshold` of `centre`, if it is given."""

_SMALLEST, _LARGEST = -20, 44
"""Exponents of the powers of two that the searches know: magnitudes of 10⁻⁶ to 10¹³."""
_OCTAVES, _HALVINGS, _SPREADS = 7, 12, 6
"""Questions about the power of two of a median, its place between two powers, and the spread."""
_RATIO = 3.0
"""Noise of a question about medians, divided by that of a question about spreads."""
_RELEASES = (_OCTAVES + _HALVINGS) / _RATIO**2 + _SPREADS
"""z² of a question about spreads, divided by the square of the `noise_multiplier` of all."""
_SAFETY = (4.0, 4.0, 4.0, 3.5, 3.0, 2.0)
"""By question about spreads, the standard deviations of noise by which a share may fall short of 1:
a wrong turn upwards makes a range up to 2³² times too wide at the first, and twice at the last."""
_NOISE = 0.03
"""Largest standard deviation of a share of clients: then ranges cover 95 % of values."""


def scale_privately(
    population: Population,
    noise_multiplier: float | None = None,
    *,
    target: bool = False,
    seed: int = 0,
) -> Population:
    """Map columns from ranges that clients release with noise to [-1, 1].

    Every run on the population is charged for the release, as one round of all clients. Columns of
    known bounds, such as encoded ones and those of public ranges, are left out and cost nothing.

    Formal guarantees:
      * A client's votes have norm √d/2 in each of the 25 questions: leaving it out moves a sum by
        that at most, other rows by twice as much. Votes are added as integers.
      * All questions together cost as much as one Gaussian release of `noise_multiplier`: its
        square's inverse is the sum of theirs (adaptive composition of Gaussian mechanisms).
      * Ranges are a function of the noisy sums, d and m alone.
      * Noise follows from the seed and from what it protects: the same rows and settings make the
        same release, which is charged once, and others have other noise.

    By default z is the most that m clients allow: the noise of a share may not exceed 0.03. A
    `target` is y of a regression, to be scaled, too. The seed is to be kept secret.

    Raises:
      ValueError: if x is not (N, d), the target holds classes, or clients are too few for that z.
    """
    checks.count(0, seed=seed)
    free = unbounded(population, target=target)
    d, m = sum(int(each.sum()) for each in free.values()), population.num_clients
    if not d:
        return population
    z = float(np.float32(_largest_noise(m, d) if noise_multiplier is None else noise_multiplier))
    check_noise_multiplier(z)
    if z > 1.0001 * _largest_noise(m, d):
        raise ValueError(
            f"private ranges of {d} columns with noise {z:g} need {_fewest_clients(z, d)} clients, "
            f"got {m}: give columns public ranges (--range; data.scale), or take noise of at most "
            f"{_largest_noise(m, d):.3g}, at a higher ε"
        )
    train = population.splits["train"]
    rows = train.all_rows()
    values = np.concatenate(
        [
            population.fields[field][rows].reshape(len(rows), -1)[:, each].astype(np.float64)
            for field, each in free.items()
        ],
        axis=1,
    )
    key = _key(seed, values, train.count, repr((z, {name: list(f) for name, f in free.items()})))
    centre, spread = search(_asker(values, train.count, z, key), d, _share_noise(z, m, d))
    ends = iter(np.stack([centre - spread, centre + spread], axis=1))
    for field, each in free.items():
        stored = np.full((2, len(each)), np.nan)
        for place in np.flatnonzero(each):
            stored[:, place] = next(ends)
        population = mapped(population, field, stored)
    digest = ledger.hex_digest(ledger.key_digest(key))
    return noted(population, made=(Preparation(digest, m, z),))


def search(ask: Ask, d: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Find the centre and the half-range of d columns, (d,) each, by noisy answers alone."""
    most = _LARGEST - _SMALLEST
    low, high = np.full(d, -most), np.full(d, most)
    for _ in range(_OCTAVES):
        middle = (low + high) // 2
        below = ask(_power(middle), None) >= 0.5
        low, high = np.where(below, low, middle), np.where(below, middle, high)
    start, end = _power(low), _power(high)
    for _ in range(_HALVINGS):
        point = (start + end) / 2
        below = ask(point, None) >= 0.5
        start, end = np.where(below, start, point), np.where(below, point, end)
    centre = (start + end) / 2
    low, high = np.full(d, _SMALLEST), np.full(d, _LARGEST)
    for safety in _SAFETY:
        middle = (low + high) // 2
        inside = ask(2.0**middle, centre) >= max(0.5, 1 - safety * noise)
        low, high = np.where(inside, low, middle), np.where(inside, middle, high)
    return centre, np.maximum(2.0**high, (end - start) / 2)


def votes(medians: np.ndarray, values: np.ndarray, first: np.ndarray) -> Callable[..., np.ndarray]:
    """Return `(threshold, centre) -> votes`, (m, d) of 1 and −1, twice what clients send."""

    def answers(threshold: np.ndarray, centre: np.ndarray | None) -> np.ndarray:
        if centre is None:
            return np.where(medians <= threshold, 1, -1)
        away = np.abs(values - centre) > threshold
        return np.where(np.logical_or.reduceat(away, first), -1, 1)

    return answers


def _asker(values: np.ndarray, counts: np.ndarray, z: float, key: jax.Array) -> Ask:
    """Return the questions to clients with `counts` rows each, (m,), of values (n, d)."""
    first = np.cumsum(counts) - counts
    client, m, d = np.repeat(np.arange(len(counts)), counts), len(counts), values.shape[1]
    ordered = [column[np.lexsort((column, client))] for column in values.T]
    medians = np.stack(ordered, axis=1)[first + (counts - 1) // 2]
    answers, numbers = votes(medians, values, first), itertools.count()

    @jax.jit
    def mean(sent, number, noise):
        own, everyone = jax.random.fold_in(key, number), jnp.ones(m, bool)
        exact = gaussian(exact_sums=True)
        norm = math.sqrt(d) / 2
        return release_once(exact, sent, everyone, own, clip_norm=norm, noise_multiplier=noise)

    def ask(threshold: np.ndarray, centre: np.ndarray | None) -> np.ndarray:
        noise = z * math.sqrt(_RELEASES) * (_RATIO if centre is None else 1)
        sent = np.float32(answers(threshold, centre)) / 2
        return 0.5 + np.asarray(mean(sent, next(numbers), noise), np.float64)

    return ask


def _share_noise(z: float, m: int, d: int) -> float:
    """Return the standard deviation of an answer about spreads."""
    return z * math.sqrt(_RELEASES * d) / (2 * m)


def _largest_noise(m: int, d: int) -> float:
    return _NOISE / _share_noise(1.0, m, d)


def _fewest_clients(z: float, d: int) -> int:
    return math.ceil(_share_noise(z, 1, d) / _NOISE)


def _power(place: np.ndarray) -> np.ndarray:
    """Return 0 at place 0, ±2^`_SMALLEST` at ±1, and twice as much at each next place."""
    return np.sign(place) * 2.0 ** (np.abs(place) - 1.0 + _SMALLEST)


def _key(seed: int, values: np.ndarray, counts: np.ndarray, request: str) -> jax.Array:
    """Return the key of a release: equal for equal rows and settings alone."""
    found = hashlib.sha256(request.encode())
    for each in (values, np.asarray(counts, np.int64)):
        found.update(np.ascontiguousarray(each).reshape(-1).view(np.uint8).data)
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), keys.RANGES)
    for word in np.frombuffer(found.digest()[:16], np.uint32):
        key = jax.random.fold_in(key, word)
    return key
