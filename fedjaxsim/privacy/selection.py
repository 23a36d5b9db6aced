"""Private selection: the best of a random number of runs, at the price of about three runs.

The best of a fixed number k of runs costs up to k times one run: if k runs fail to find a good
model, that too says something about each client. A *random* number of runs hides it (Liu and Talwar
2019; Papernot and Steinke 2022). What is published is the best run alone, by a score that its own ε
covers: its release, its settings and its score. The number of runs and all other runs stay secret.

Every run draws its settings independently of the others, with its own seed, and costs at most
the Rényi curve that is given; the number of runs depends on nothing.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from fedjaxsim import checks
from fedjaxsim.privacy import filter as filters
from fedjaxsim.privacy.accounting import composition, rdp
from fedjaxsim.privacy.assumptions import no_guarantee
from fedjaxsim.privacy.entries import check_delta
from fedjaxsim.privacy.events import PrivacyLimit, PrivacySpend

LARGEST_MEAN = 1e6
_FORMS = "geometric:MEAN, logarithmic:MEAN or negative-binomial:ETA:MEAN"
_ETAS = {"geometric": "1", "logarithmic": "0"}


@dataclasses.dataclass(frozen=True)
class NegativeBinomial:
    """A truncated negative binomial number of runs, K ≥ 1 (Papernot and Steinke 2022, section 3).

    η > −1 is 1 for the geometric distribution, 0 for the logarithmic one; γ lies in (0, 1).
    """

    eta: float
    gamma: float

    def __post_init__(self):
        checks.in_range("(-1, inf)", eta=self.eta)
        checks.in_range("(0, 1)", gamma=self.gamma)

    @property
    def mean(self) -> float:
        """E[K]."""
        eta, gamma = self.eta, self.gamma
        if eta == 0:
            return (1 / gamma - 1) / math.log(1 / gamma)
        return eta * (1 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))

    def pmf(self, most: int) -> np.ndarray:
        """Return P(K = k) for k = 1 … `most`, (most,)."""
        eta, gamma = self.eta, self.gamma
        first = math.log(1 / gamma) if eta == 0 else math.expm1(-eta * math.log(gamma)) / eta
        k = np.arange(1, most)
        return (1 - gamma) / first * np.cumprod([1.0, *((1 - gamma) * (k + eta) / (k + 1))])

    def draw(self, rng: np.random.Generator) -> int:
        """Draw K."""
        left, most = rng.random(), 64
        while True:
            reached = np.cumsum(self.pmf(most))
            if left < reached[-1] or most > 100 * LARGEST_MEAN:
                return 1 + int(np.searchsorted(reached, left, side="right"))
            most *= 4

    def rdp(self, run_rdp: np.ndarray, orders: Sequence[float]) -> np.ndarray:
        """Compute RDP of the best run from RDP of one, both (orders,): their Theorem 2.

        ρ'(λ) = ρ(λ) + (1 + η)((1 − 1/λ̂) ρ(λ̂) + log(1/γ)/λ̂) + log E[K]/(λ − 1) for every λ̂ ≥ 1.
        """
        alphas = np.asarray(orders, np.float64)
        other = (1 - 1 / alphas) * run_rdp + math.log(1 / self.gamma) / alphas
        return run_rdp + (1 + self.eta) * np.min(other) + math.log(self.mean) / (alphas - 1)


def parse(text: str) -> NegativeBinomial:
    """Read a distribution, as in `geometric:10`, by its mean; raise ValueError for another text."""
    kind, *numbers = text.split(":")
    if kind in _ETAS:
        numbers = [_ETAS[kind], *numbers]
    allowed = f"select-privately must be {_FORMS}, got {text!r}"
    try:
        eta, mean = map(float, numbers)
    except ValueError:
        raise ValueError(allowed) from None
    if kind not in (*_ETAS, "negative-binomial"):
        raise ValueError(f"{allowed}{checks.did_you_mean(kind, (*_ETAS, 'negative-binomial'))}")
    try:
        return with_mean(eta, mean)
    except ValueError as error:
        raise ValueError(f"{allowed}: {error}") from error


def with_mean(eta: float, mean: float) -> NegativeBinomial:
    """Return the truncated negative binomial distribution with a mean above 1."""
    from scipy.optimize import brentq

    checks.in_range(f"(1, {LARGEST_MEAN:g}]", mean=mean)

    def gap(log: float) -> float:
        return math.log(NegativeBinomial(eta, math.exp(log)).mean) - math.log(mean)

    lowest = -600.0 if eta <= 0 else -30.0
    log = float(cast(Any, brentq(gap, lowest, -1e-12, xtol=1e-14)))
    return NegativeBinomial(eta, math.exp(log))


def epsilon(
    runs: NegativeBinomial,
    candidates: Sequence[Sequence[PrivacySpend]],
    delta: float,
    before: Sequence[PrivacySpend] = (),
) -> float:
    """Compute the ε of publishing the best run, for zero-out; inf where nothing is certified.

    `before` are releases that all runs share: they are no part of a run, and charged once.
    """
    check_delta(delta)
    orders = rdp.INTEGER_ORDERS
    # A run of settings drawn at random costs at most the costliest, at each order.
    run_rdp = np.max(
        [composition.rdp_of(charges, "zero_out", orders) for charges in candidates], axis=0
    )
    total = runs.rdp(run_rdp, orders)
    if before:
        total += composition.rdp_of(before, "zero_out", orders)
    return rdp.epsilon(total, delta, orders)


def require_planned(planned: Sequence[PrivacySpend], charges: Sequence[PrivacySpend]) -> None:
    """Raise ValueError if a run's ledger has charges that its plan, which was priced, has not."""
    limit = PrivacyLimit(math.inf, 0.0, tuple(planned))
    costly = [
        charged for charged in charges if charged.event.releases and charged.event.unit == "client"
    ]
    why = next(filter(None, map(no_guarantee, costly)), "")
    if why or filters.exceeded(limit, costly):
        why = why or f"more than the planned {filters.described(planned)}"
        raise ValueError(f"nothing may be published: a candidate was charged otherwise ({why})")
