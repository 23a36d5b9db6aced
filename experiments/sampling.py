"""The noise that five plans need for ε = 2, by sampling, with a second opinion on each value.

python experiments/sampling.py

It writes results/sampling.csv. δ is 1/(10 m), and ε is that of zero-out in joint DP. The second
opinion is dp_accounting's; of random allocation it composes a simulation of one period.

Banded noise has a z of other meaning: later rounds take back a part. So `noise_on_sums` is the z of
independent noise with the same root mean square, over rounds, on sums of all releases so far, as a
model of FedAvg has it. Bands are the best power of two with the square root's coefficients, with as
many groups, and then coefficients are those that jax_privacy optimizes for sums.
"""

import csv
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax_privacy.matrix_factorization import toeplitz

from fedjaxsim.privacy import SamplingScheme, noise_multiplier, report
from fedjaxsim.privacy.accounting.gaussian import inverse_series, square_root
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.events import GAUSSIAN, Banded, PrivacySpend

RESULTS = Path(__file__).parent / "results" / "sampling.csv"
EPSILON = 2.0
BANDS = tuple(2**k for k in range(1, 8))
PLANS = {  # clients, expected cohort, rounds
    "100 of 1,000 clients, 100 rounds": (1_000, 100, 100),
    "100 of 1,000 clients, 1,000 rounds": (1_000, 100, 1_000),
    "10 of 100 clients, 100 rounds": (100, 10, 100),
    "one pass, 100 of 10,000 clients": (10_000, 100, 100),
    "ten passes, 100 of 10,000 clients": (10_000, 100, 1_000),
    "one pass, 1,000 of 10⁶ clients": (1_000_000, 1_000, 1_000),
}


def on_sums(coefficients: Sequence[float], rounds: int) -> float:
    """Compute the noise on sums of releases, root mean square, over that of independent noise."""
    weights, series = np.zeros(rounds), inverse_series(coefficients)[:rounds]
    weights[: len(series)] = series
    squares = np.cumsum(np.cumsum(weights) ** 2)
    return math.sqrt(np.mean(squares) / np.mean(np.arange(1, rounds + 1)))


def schemes(clients: int, cohort: int) -> dict[str, SamplingScheme]:
    """Return each sampling of cohorts of the expected size."""
    every = clients // cohort
    return {
        "poisson": SamplingScheme("poisson", clients, clients),
        "allocation": SamplingScheme("allocation", clients, clients, period=every),
        "groups": SamplingScheme("groups", clients, cohort, groups=every),
    }


def banded(clients: int, cohort: int, rounds: int) -> tuple[SamplingScheme, Banded]:
    """Return the sampling and the event with the least noise on sums."""

    def noise(bands: int) -> float:
        z = noise_multiplier(
            EPSILON, 1 / (10 * clients), rounds=rounds, sampling_rate=cohort / clients,
            scheme=cyclic(clients, bands),
        )  # fmt: skip
        return z * on_sums(square_root(bands).tolist(), rounds)

    bands = min((b for b in BANDS if b * cohort <= clients and b <= rounds), key=noise)
    c = np.asarray(toeplitz.optimize_banded_toeplitz(rounds, bands), np.float64)
    return cyclic(clients, bands), Banded(coefficients=tuple((c / np.linalg.norm(c)).tolist()))


def cyclic(clients: int, groups: int) -> SamplingScheme:
    """Return cyclic sampling with room for a whole group."""
    return SamplingScheme("cyclic", clients, math.ceil(clients / groups), groups=groups)


def rows() -> list[dict[str, Any]]:
    """Calibrate each plan and verify it."""
    found = []
    for plan, (clients, cohort, rounds) in PLANS.items():
        rate, delta = cohort / clients, 1 / (10 * clients)
        kinds = {name: (s, GAUSSIAN) for name, s in schemes(clients, cohort).items()}
        for name, (scheme, event) in (kinds | {"banded": banded(*PLANS[plan])}).items():
            coefficients = event.coefficients if isinstance(event, Banded) else (1.0,)
            begin = time.process_time()
            z = noise_multiplier(
                EPSILON, delta, rounds=rounds, sampling_rate=rate, scheme=scheme, event=event
            )
            seconds = time.process_time() - begin
            spent = PrivacySpend(scheme, event, (Entry(z, rate, rounds),))
            opinions = {each.adjacency: each for each in report([spent], delta).verify()}
            row = {"plan": plan, "sampling": name, "bands": len(coefficients), "delta": delta}
            row |= {"noise_multiplier": z, "noise_on_sums": z * on_sums(coefficients, rounds)}
            for adjacency, opinion in opinions.items():
                row |= {adjacency: opinion.epsilon, f"{adjacency}_second": opinion.second}
            found.append(row | {"calibration_cpu_seconds": round(seconds, 2)})
            print(
                " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()),
                found[-1]["calibration_cpu_seconds"], flush=True,
            )  # fmt: skip
    return found


if __name__ == "__main__":
    table = rows()
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
