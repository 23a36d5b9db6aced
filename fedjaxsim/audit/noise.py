"""Tests of the noise in the releases: as much as charged, in every round, direction and run.

Bounds on ε need thousands of canaries to find noise that is half of what is charged. The adversary
of an audit knows more than a guess of each canary: it knows which messages are in a release, so the
rest is noise, which a sound mechanism draws independently with a known deviation. Less of it, in
any combination of rounds or of directions, breaks the guarantee, and a sum of many squares shows
it.
"""

import dataclasses
import math

import numpy as np

_POWER = 0.95
"""Probability with which noise below `NoiseTest.found_below` is found."""


@dataclasses.dataclass(frozen=True)
class NoiseTest:
    """A test of the noise in one part of all releases.

    All numbers are standard deviations over the charged one, relative to a canary's message.

    Attributes:
      part: the part of the releases.
      factor: the deviation that was found, the smallest one of the part.
      refuted_below: a smaller deviation refutes the mechanism, at the audit's confidence.
      found_below: a mechanism with this deviation or less is refuted with probability 0.95.
    """

    part: str
    factor: float
    refuted_below: float
    found_below: float

    @property
    def violated(self) -> bool:
        """Return whether there is less noise than charged."""
        return self.factor < self.refuted_below

    def __str__(self) -> str:
        """Return the result, and what could have been found."""
        return (
            f"noise in {self.part}: {self.factor:.3g} of the charged (refuted below "
            f"{self.refuted_below:.3g}; {self.found_below:.3g} is found with probability {_POWER})"
        )


def noise_tests(
    signal: np.ndarray, present: np.ndarray, noise_multiplier: np.ndarray, confidence: float
) -> tuple[NoiseTest, ...]:
    """Test the noise of R runs of T rounds along n directions.

    Args:
      signal: (R, T, n), k · (present + z · g), with one unknown scale k > 0, such as a public
        divisor, and, in a sound mechanism, independent g ~ N(0, 1).
      present: (R, T, n) bool, whether the canary's message is in the release.
      noise_multiplier: (T,) z > 0.
      confidence: least probability that a sound mechanism passes all tests.

    Returns:
      One test for each part that is large enough; none if no canary sent anything.
    """
    from scipy import stats

    runs, rounds, n = signal.shape
    level = (1 - confidence) / 6  # of the scale, and of at most five tests
    z = np.asarray(noise_multiplier, np.float64)[:, None]
    count = int(present.sum())
    scale = float(signal[present].mean()) if count else 0.0
    # The mean message is known up to its own noise, and with it all other deviations.
    error = math.sqrt(float(np.mean((present * z)[present] ** 2)) / count) if count else math.inf
    if scale <= 0 or 1.645 * error >= 1:
        return ()
    rest = (signal / scale - present) / z
    surely = 1 + float(stats.norm.isf(level)) * error

    def test(part, factor, refuted, size):
        """`refuted` is the level's quantile of the factor; `size` its degrees of freedom."""
        likely = math.sqrt(stats.chi2.ppf(_POWER, size) / size)
        found = refuted / surely * (1 - 1.645 * error) / likely
        return NoiseTest(part, float(factor), float(refuted / surely), float(found))

    def of_squares(part, squares, size, tests=1):
        """Test the smallest of the sums of `size` squares."""
        refuted = math.sqrt(stats.chi2.ppf(level / tests, size) / size)
        return test(part, math.sqrt(np.min(squares) / size), refuted, size)

    def of_combinations(part, rows):
        """Test the smallest eigenvalue of a covariance, rows (N, d) (Davidson and Szarek 2001)."""
        size, d = rows.shape
        # Up to d degrees of freedom go with the estimated message.
        least = math.sqrt(max(size - d, 0)) - math.sqrt(d) - math.sqrt(-2 * math.log(level))
        if least <= 0:
            return []
        smallest = max(float(np.linalg.eigvalsh(rows.T @ rows / size)[0]), 0.0)
        return [test(part, math.sqrt(smallest), least / math.sqrt(size), size)]

    squares = rest**2
    found = [of_squares("all rounds", squares.sum(), rest.size - 1)]
    if runs * n > 1:
        found.append(of_squares("one round", squares.sum((0, 2)), runs * n - 1, rounds))
    if runs > 1:
        apart = (rest - rest.mean(axis=0)) ** 2
        found.append(of_squares("differences of runs", apart.sum(), (runs - 1) * rounds * n - 1))
    if rounds > 1:
        found += of_combinations(
            "a combination of rounds", rest.transpose(0, 2, 1).reshape(-1, rounds)
        )
    if n > 1:
        found += of_combinations("a combination of directions", rest.reshape(-1, n))
    return tuple(found)
