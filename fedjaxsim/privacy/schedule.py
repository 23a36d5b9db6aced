"""Schedules of noise that spread a run's privacy cost over its rounds.

A schedule gives each round a weight, its share of the cost, and noise in inverse proportion. The
module imports neither JAX nor numpy, so the command line can check a schedule at once.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Literal, Self

from fedjaxsim.checks import Name, SettingError
from fedjaxsim.privacy.entries import Entry

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["constant", "power", "geometric"]
_MOST = 1e6
"""Largest ratio between the shares of two rounds."""
_MOST_ROUNDS = 100_000
"""Each round the ledger searches one place per value of the schedule."""
_FORMS = "constant, power:A (round t gets t^A) or geometric:Q (it gets Q^-t)"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Weights ω_t of the rounds t = 1 … T, and the noise that follows from them.

    ω_t is 1 ("constant"), t^A ("power") or Q^(−t) ("geometric"), as in MP-MTL, section 4.6. The
    noise multiplier of round t is

        z_t = z √(mean of ω²) / ω_t,   so that   Σ_t 1/z_t² = T/z².

    So the constant noise multiplier z costs the same for Gaussian noise and full participation, as
    μ_t = μ ω_t / √Σω². A pure release costs ε_t ∝ 1/z_t ∝ ω_t. With a target ε, z is such that all
    T rounds together report it.

    MP-MTL recommends "constant" for convex losses without acceleration; "power" with A = 2/5 with
    it; "geometric" with Q = (1 − μ/L)^(2/5) for strongly convex losses, accelerated
    (1 − √(μ/L))^(1/5). For δ = 0 these exponents are 2/3, 2/3 and 1/3.

    ω_t depends on t and the planned T alone, and no two differ by a factor above 10⁶. The ledger is
    charged the z_t that was drawn, round by round: charging their mean, or z_1, would understate
    the cost, since 1/z² is convex and rising weights begin with the most noise.

    Attributes:
      kind: "constant", "power" or "geometric".
      number: A, finite, or Q, positive and finite.
    """

    kind: Kind = "constant"
    number: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.number) or (self.kind == "geometric" and self.number <= 0):
            raise SettingError(
                Name("noise_schedule"), f" must be {_FORMS}, A finite, Q positive, got {self}"
            )

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return self.kind if self.is_constant else f"{self.kind}:{self.number:g}"

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Read a schedule as settings give it; None is constant."""
        if text is None or text == "constant":
            return cls()
        kind, _, number = text.partition(":")
        if kind == "power" or kind == "geometric":
            try:
                return cls(kind, float(number))
            except ValueError as error:
                raise SettingError(
                    Name("noise_schedule"), f" must be {_FORMS}, got {text!r}"
                ) from error
        raise SettingError(Name("noise_schedule"), f" must be {_FORMS}, got {text!r}")

    @property
    def is_constant(self) -> bool:
        """Return whether z is one number."""
        return self.kind == "constant"

    def check(self, rounds: int) -> None:
        """Raise ValueError unless T rounds, at most 100,000, have weights of ratio at most 10⁶."""
        if self.is_constant:
            return
        if rounds > _MOST_ROUNDS:
            raise SettingError(
                f"rounds must be at most {_MOST_ROUNDS} with ",
                Name("noise_schedule"),
                f" {self}, got {rounds}",
            )
        first, last = self._log_weight(1), self._log_weight(rounds)
        if abs(last - first) > math.log(_MOST):
            more = f"10^{abs(last - first) / math.log(10):.3g} times the share"
            largest, other = (rounds, 1) if last > first else (1, rounds)
            nearer = "Q nearer to 1" if self.kind == "geometric" else "A nearer to 0"
            raise SettingError(
                Name("noise_schedule"),
                f" {self} gives round {largest} of {rounds} {more} of round {other}; "
                f"at most {_MOST:g} times is allowed: take {nearer}, or fewer rounds",
            )

    def weights(self, rounds: int) -> "np.ndarray":
        """Return ω_t over their root mean square, (T,) float64."""
        import numpy as np

        self.check(rounds)
        logs = np.array([self._log_weight(t) for t in range(1, rounds + 1)])
        weights = np.exp(logs - logs.max())
        return weights / math.sqrt(np.mean(weights**2))

    def noise(self, noise_multiplier: float, rounds: int) -> "float | np.ndarray":
        """Return the z_t of all rounds, (T,) float32; z ≥ 0 itself without a schedule."""
        if self.is_constant:
            return noise_multiplier
        return (noise_multiplier / self.weights(rounds)).astype("float32")

    def entries(
        self, noise_multiplier: float, sampling_rate: float, rounds: int
    ) -> tuple[Entry, ...]:
        """Return the ledger's `entries` for the noise of all rounds."""
        return entries(self.noise(noise_multiplier, rounds), sampling_rate, rounds)

    def _log_weight(self, t: int) -> float:
        if self.kind == "geometric":
            return -t * math.log(self.number)
        return self.number * math.log(t)


CONSTANT = Schedule()


def entries(
    noise_multiplier: "float | np.ndarray", sampling_rate: float, rounds: int
) -> tuple[Entry, ...]:
    """Return the ledger's entries after all rounds, equal ones together, for z () or (T,)."""
    import numpy as np

    if np.ndim(noise_multiplier) == 0:
        counted = [(float(noise_multiplier), rounds)]
    else:
        values, counts = np.unique(noise_multiplier, return_counts=True)
        counted = list(zip(values.tolist(), counts.tolist(), strict=True))
    return tuple(Entry(z, sampling_rate, count) for z, count in counted)


def equally_costly(noise_multiplier: "float | np.ndarray") -> float:
    """Return the constant z with the Σ 1/z² of a number () or a schedule (T,); 0 if any z is 0."""
    import numpy as np

    z = np.asarray(noise_multiplier, np.float64)
    if z.ndim == 0:
        return float(z)
    return 0.0 if np.any(z == 0) else float(1 / np.sqrt(np.mean(1 / z**2)))
