"""Guarantees of the papers' published settings, next to the papers' claims, as a table.

    python experiments/published_claims.py

One row per setting: the printed numbers, ε by the paper's method, and a sound ε in the joint-DP
view at the same δ. Where a paper prints no number of rounds, or no noise, the row names the
substitute.
"""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from fedjaxsim.privacy import guarantee
from fedjaxsim.privacy.accounting import gaussian, rdp
from fedjaxsim.privacy.entries import Adjacency, Entry, SamplingScheme
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend


class Claim(NamedTuple):
    """One published setting: where it is printed, and its data set and hyperparameters.

    Attributes:
      epsilon: the paper's ε; None where it shows only a curve.
      method: moments accountant with Poisson sampling, central limit theorem, √(2 ln(1.25/δ))/σ for
        one step, or composition of pure-ε steps.
      sampling: the paper's sampling of `cohort` of the `clients`, exactly or on average.
      noise_multiplier: z, the noise on the sum of clipped messages over the clip norm; None for a
        kind of noise that guarantees nothing.
      sigma: σ of the paper's formula.
      why: the reason why the sound numbers differ.
    """

    paper: str
    source: str
    setting: str
    epsilon: float | None
    method: Literal["rdp", "clt", "per_step", "kov"]
    sampling: Literal["fixed", "poisson", "full"]
    clients: int
    cohort: int
    rounds: int
    noise_multiplier: float | None
    sigma: float
    delta: float
    why: str


class Verdict(NamedTuple):
    """A claim, ε by its own method (None where it needs unprinted numbers), and sound ones.

    At the same δ, one client's messages become zero, or its data are replaced, as the papers define
    neighbours; None is no guarantee.
    """

    claim: Claim
    published: float | None
    zero_out: float | None
    replace: float | None


_FIXED = (
    "Cohorts have a fixed size, so the other clients know when a client took part and sampling "
    "amplifies nothing; neighbours are defined by replacement but priced as add/remove; δ = 1/m."
)
_FIXED_PPSGD = (
    "Users are drawn without replacement, a fixed number a round: no amplification against the "
    "other users; neighbours are defined by replacement but priced as add/remove."
)
_WISHART = (
    "The noise is Wishart: some outputs are possible for one of two neighbours only, with "
    "probability 1 − e^−ε_t a round, so no (ε, δ) with a small δ holds."
)
_SCALE = (
    "The sensitivity 2CK/M divides by the sampling rate, which is then used again to amplify (an "
    "average of K moves by 2C/K); σ is chosen for one step, not for T."
)
_NOT_PRINTED = (
    "FEMNIST, ε = {0}; not printed: σ = 0.02, γ = 0.2 from A.5, T where their method gives {0:g}"
)


def _pmtl(paper: str, source: str, setting: str, epsilon: float | None, z: float, rounds: int):
    return Claim(
        paper, source, setting, epsilon, "rdp", "fixed", 205, 100, rounds, z, z, 1 / 205, _FIXED
    )


def _pp_sgd(figure: str, setting: str, users: int, rounds: int, z: float, sigma: float):
    return Claim(
        "PP-SGD", f"Figure {figure}, Appendix A", setting, None, "rdp", "fixed", users, 10, rounds,
        z, sigma, 1e-4, _FIXED_PPSGD,
    )  # fmt: skip


def _dpfedmtl(
    setting: str, epsilon: float, clients: int, cohort: int, rounds: int, sigma: float
) -> Claim:
    """Return a row; noise σ·2CK/M at each of K clients is √K times that on their sum."""
    z = 2 * sigma * cohort**1.5 / clients
    return Claim(
        "DPFedMTL", "Tables 2 and 3, §6.1", setting, epsilon, "per_step", "poisson", clients,
        cohort, rounds, z, sigma, 1e-5, _SCALE,
    )  # fmt: skip


def _mp_mtl(source: str, setting: str, tasks: int) -> Claim:
    return Claim(
        "MP-MTL", source, setting, 0.1, "kov", "full", tasks, tasks, 1, None, math.nan,
        1 / (tasks * math.log(tasks)), _WISHART,
    )  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    _pmtl("PMTL v1", "§5.4, Figure 4", "FEMNIST, σ = 0.05, γ = 0.2, T = 1000", None, 25.0, 1000),
    _pmtl("PMTL", "A.5, Figure 4", "FEMNIST, σ = 0.02, γ = 0.2, T = 1000", None, 10.0, 1000),
    *(
        _pmtl("PMTL", "Table 1", _NOT_PRINTED.format(epsilon), epsilon, 10.0, rounds)
        for epsilon, rounds in ((2.0, 215), (0.8, 48))
    ),
    _dpfedmtl("FEMNIST, σ = 9.69, K = 3 of 174, T = 1000", 0.5, 174, 3, 1000, 9.69),
    _dpfedmtl("CelebA, σ = 9.69, K = 20 of 9343, T = 400", 0.5, 9343, 20, 400, 9.69),
    Claim(
        "DPFedMTL", "Figure 3, §6.3",
        "CelebA, σ = 0.65, K = 20 of 9343, T = 400, if σ were relative to the true sensitivity",
        8.0, "clt", "poisson", 9343, 20, 400, 0.65, 0.65, 1e-5,
        "The central limit theorem is no bound, and understates ε where few rounds cost much.",
    ),
    _mp_mtl("Figures 3 to 5, §5.4", "synthetic, m = 320, T by cross-validation", 320),
    _mp_mtl("Figure 9, §5.5", "School, m = 139, T by cross-validation", 139),
    _pp_sgd(
        "1b",
        "Stackoverflow, σ = 1 on the average as in the text (z = σQ), one pass of 2000 rounds",
        500, 2000, 10.0, 1.0,
    ),
    _pp_sgd(
        "1b",
        "Stackoverflow, σ = 1 on the sum as in the code (z = σ), one pass of 2000 rounds",
        500, 2000, 1.0, 1.0,
    ),
    _pp_sgd(
        "1c",
        "EMNIST linear, σ = 3 on the sum as in the code, 20 passes of 1000 rounds",
        1000, 20000, 3.0, 3.0,
    ),
)  # fmt: skip


def published(claim: Claim) -> float | None:
    """Compute ε by the paper's own method; None where it needs unprinted numbers."""
    rate = claim.cohort / claim.clients
    if claim.method == "per_step":
        return math.sqrt(2 * math.log(1.25 / claim.delta)) / claim.sigma
    if claim.noise_multiplier is None:
        return None
    if claim.method == "clt":
        mu = rate * math.sqrt(claim.rounds * math.expm1(claim.noise_multiplier**-2))
        return gaussian.epsilon(claim.delta, mu)
    one = np.array(rdp.one_round(rdp.INTEGER_ORDERS, claim.noise_multiplier, rate))
    return rdp.epsilon(claim.rounds * one, claim.delta, rdp.INTEGER_ORDERS)


def sound(claim: Claim, adjacency: Adjacency, delta: float | None = None) -> float | None:
    """Compute a sound ε in the joint-DP view, at the paper's δ by default, if there is one."""
    if claim.noise_multiplier is None:
        return None
    capacity = claim.cohort if claim.sampling == "fixed" else claim.clients
    scheme = SamplingScheme(claim.sampling, claim.clients, capacity)
    entries = (Entry(claim.noise_multiplier, claim.cohort / claim.clients, claim.rounds),)
    delta = claim.delta if delta is None else delta
    epsilon = guarantee.tight_epsilon([PrivacySpend(scheme, GAUSSIAN, entries)], delta, adjacency)
    return None if math.isinf(epsilon) else epsilon


def table(claims: Iterable[Claim] = CLAIMS) -> list[Verdict]:
    """Return the verdict on each claim, in order. A few seconds."""
    return [
        Verdict(claim, published(claim), sound(claim, "zero_out"), sound(claim, "replace"))
        for claim in claims
    ]


def main() -> None:
    """Print the table, and the reasons why numbers differ."""
    verdicts = table()
    reasons = list(dict.fromkeys(verdict.claim.why for verdict in verdicts))
    print("| paper, source | setting | ε stated | by its method | zero-out | replace | δ | why |")
    print("|---|---|---|---|---|---|---|---|")
    for claim, *found in verdicts:
        shown = ["none" if each is None else f"{each:.4g}" for each in (claim.epsilon, *found)]
        cells = [f"{claim.paper}, {claim.source}", claim.setting, *shown, f"{claim.delta:.2g}"]
        print(f"| {' | '.join([*cells, str(1 + reasons.index(claim.why))])} |")
    print()
    for number, reason in enumerate(reasons, 1):
        print(f"{number}. {reason}")


if __name__ == "__main__":
    main()
