"""Ranges of columns that all clients release with noise, before round 1.

In each of 25 questions a client answers ½ or −½ for each of d columns, so its answer has norm √d/2
whatever its rows hold. Two bisections follow from the noised means alone. The first finds the
clients' median of their medians; it tolerates errors, so its noise is three times as large. The
second finds how far from there the rows of nearly all clients lie. So a narrow column far from 0,
such as a year, gets a narrow range, and no bound on the columns is needed.
"""

import hashlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks, keys
from fedjaxsim.data.columns import Preparation
from fedjaxsim.data.population import Population
from fedjaxsim.data.transforms import Range, map_columns, unbounded
from fedjaxsim.keys import Stream
from fedjaxsim.privacy.entries import check_noise_multiplier
from fedjaxsim.privacy.ledger import hex_digest, key_digest
from fedjaxsim.privacy.mechanisms import release_once

Ask = Callable[[np.ndarray, np.ndarray | None], np.ndarray]
"""`(threshold, centre) -> share`, (d,) each: the noised share of clients whose median of a column
is at most `threshold`; if there is a centre, whose values are all within `threshold` of it."""
_SMALLEST, _LARGEST = -20, 44
"""Exponents of the powers of two that the searches know: magnitudes of 10⁻⁶ to 10¹³."""
_OCTAVES, _HALVINGS = 7, 12
"""Questions about the power of two of a median, and about its place between two powers."""
_RATIO = 3.0
"""Noise of a question about medians, divided by the noise of one about distances."""
_SAFETY = (4.0, 4.0, 4.0, 3.5, 3.0, 2.0)
"""By question about distances, the standard deviations of noise by which a share may fall short of
1: a wrong turn makes a range up to 2³² times too wide at the first, and twice at the last."""
_RELEASES = (_OCTAVES + _HALVINGS) / _RATIO**2 + len(_SAFETY)
"""z² of a question about distances, divided by z² of all questions together."""
_ERROR = 0.03
"""Largest standard deviation of a share of clients: then ranges cover 95 % of values."""


def scale_privately(
    population: Population,
    noise_multiplier: float | None = None,
    *,
    target: bool = False,
    seed: int = 0,
) -> Population:
    """Map columns to [-1, 1] from ranges that the clients release with noise.

    Every run on the population is charged for this release, as for one round of all clients.
    Columns of known bounds, such as encoded ones and ones with public ranges, cost nothing.

    Formal guarantees:
      * A client's answers have norm √d/2 in each of the 25 questions about d columns: setting them
        to zero moves a sum by that at most, other rows by twice as much.
      * All questions together cost as much as one Gaussian release of `noise_multiplier`: 1/z² is
        the sum of theirs (adaptive composition of Gaussian mechanisms).
      * Ranges are a function of the noised means, d and m alone.
      * The noise follows from the seed and from what it protects: equal rows and settings make the
        same release, which a run is charged once, and others have other noise.

    Args:
      population: features x (N, d).
      noise_multiplier: z; by default the largest with which a share of clients errs by 0.03.
      target: whether to scale y, too, as for a regression.
      seed: of the noise; keep it secret.

    Raises:
      ValueError: x is not (N, d), the target holds classes, or clients are too few for that z.
    """
    checks.count(0, 2**64 - 1, seed=seed)
    columns = unbounded(population, target=target)
    d, m = sum(map(len, columns.values())), population.num_clients
    if d == 0:
        return population
    most = 2 * m * _ERROR / math.sqrt(_RELEASES * d)
    z = float(np.float32(most if noise_multiplier is None else noise_multiplier))
    check_noise_multiplier(z)
    if z > 1.0001 * most:
        raise ValueError(
            f"private ranges of {d} columns with noise {z:g} need {math.ceil(m * z / most)} "
            f"clients, got {m}: give columns public ranges (--range; data.scale), or less noise, "
            f"at most {most:.3g}, at a higher ε"
        )
    counts = population.splits["train"].count
    values = _values(population, columns)
    key = _key(seed, values, counts, repr((z, columns)))
    centre, distance = _search(_asker(values, counts, z, key), d, _ERROR * z / most)
    limits = iter(zip((centre - distance).tolist(), (centre + distance).tolist(), strict=True))
    ranges: dict[str, dict[str, Range]] = {
        field: {name: next(limits) for name in names} for field, names in columns.items()
    }
    release = Preparation(hex_digest(key_digest(key)), m, z)
    return map_columns(population, ranges, adapted_to=(release,))


def answers(
    medians: np.ndarray,
    values: np.ndarray,
    first: np.ndarray,
    threshold: np.ndarray,
    centre: np.ndarray | None,
) -> np.ndarray:
    """Return the clients' answers to a question, (m, d) of ½ and −½.

    `medians` are (m, d); a client's `values`, (N, d), begin at its number in `first`, (m,).
    """
    if centre is None:
        return np.where(medians <= threshold, 0.5, -0.5)
    beyond = ~(np.abs(values - centre) <= threshold)
    return np.where(np.logical_or.reduceat(beyond, first), -0.5, 0.5)


def _values(population: Population, columns: dict[str, list[str]]) -> np.ndarray:
    """Return training rows of some columns in the units of their source, (N, d) float64."""
    rows, parts = population.splits["train"].all_rows(), []
    for field, names in columns.items():
        stored = population.fields[field][rows].reshape(len(rows), -1).astype(np.float64)
        field_columns = population.columns[field]
        original = np.asarray(field_columns.original(stored)).reshape(len(rows), -1)
        parts.append(original[:, [field_columns.names.index(name) for name in names]])
    return np.concatenate(parts, axis=1)


def _asker(values: np.ndarray, counts: np.ndarray, z: float, key: jax.Array) -> Ask:
    """Return the questions to clients with `counts` rows each, (m,), of values (N, d)."""
    first = np.cumsum(counts) - counts
    client, norm = np.repeat(np.arange(len(counts)), counts), math.sqrt(values.shape[1]) / 2
    ordered = [column[np.lexsort((column, client))] for column in values.T]
    medians = np.stack(ordered, axis=1)[first + (counts - 1) // 2]
    everyone, asked = jnp.ones(len(counts), bool), iter(range(1_000))

    @jax.jit
    def mean(sent, number, noise):
        noise_key = keys.stream(key, Stream.ROUND_NOISE, number)
        return release_once(sent, everyone, noise_key, clip=norm, noise_multiplier=noise)

    def ask(threshold, centre):
        sent = answers(medians, values, first, threshold, centre)
        noise = z * math.sqrt(_RELEASES) * (_RATIO if centre is None else 1)
        return 0.5 + np.asarray(mean(sent.astype(np.float32), next(asked), noise), np.float64)

    return ask


def _search(ask: Ask, d: int, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Find centre and half-range of d columns, (d,) each, by noised answers alone."""
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
        inside = ask(2.0**middle, centre) >= max(0.5, 1 - safety * error)
        low, high = np.where(inside, low, middle), np.where(inside, middle, high)
    return centre, np.maximum(2.0**high, (end - start) / 2)


def _power(place: np.ndarray) -> np.ndarray:
    """Return 0 at place 0, ±2^`_SMALLEST` at ±1, and twice as much at each next place."""
    return np.sign(place) * 2.0 ** (np.abs(place) - 1.0 + _SMALLEST)


def _key(seed: int, values: np.ndarray, counts: np.ndarray, request: str) -> jax.Array:
    """Return the key of a release: equal for equal rows and settings alone."""
    digest = hashlib.sha256(request.encode())
    for array in (values, counts.astype(np.int64)):
        digest.update(array.tobytes())
    numbers = np.frombuffer(digest.digest()[:16], np.uint32)
    return keys.stream(keys.seed_key(seed), Stream.RANGES, *numbers)
