"""The noise that six plans need for ε = 2, by sampling, with a second opinion on each value.

python experiments/sampling.py

It writes results/sampling.csv. δ is 1/(10 m), and ε is that of zero-out in joint DP. The second
opinion is dp_accounting's; of random allocation it composes a simulation of one period.
"""

import csv
import time
from pathlib import Path
from typing import Any

from fedjaxsim.privacy import SamplingScheme, noise_multiplier, report
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend

RESULTS = Path(__file__).parent / "results" / "sampling.csv"
EPSILON = 2.0
PLANS = {  # clients, expected cohort, rounds
    "100 of 1,000 clients, 100 rounds": (1_000, 100, 100),
    "100 of 1,000 clients, 1,000 rounds": (1_000, 100, 1_000),
    "10 of 100 clients, 100 rounds": (100, 10, 100),
    "one pass, 100 of 10,000 clients": (10_000, 100, 100),
    "ten passes, 100 of 10,000 clients": (10_000, 100, 1_000),
    "one pass, 1,000 of 10⁶ clients": (1_000_000, 1_000, 1_000),
}


def schemes(clients: int, cohort: int) -> dict[str, SamplingScheme]:
    """Return each sampling of cohorts of the expected size."""
    every = clients // cohort
    return {
        "poisson": SamplingScheme("poisson", clients, clients),
        "allocation": SamplingScheme("allocation", clients, clients, period=every),
        "groups": SamplingScheme("groups", clients, cohort, groups=every),
    }


def rows() -> list[dict[str, Any]]:
    """Calibrate each plan and verify it."""
    found = []
    for plan, (clients, cohort, rounds) in PLANS.items():
        rate, delta = cohort / clients, 1 / (10 * clients)
        for name, scheme in schemes(clients, cohort).items():
            begin = time.process_time()
            z = noise_multiplier(EPSILON, delta, rounds=rounds, sampling_rate=rate, scheme=scheme)
            seconds = time.process_time() - begin
            spent = PrivacySpend(scheme, GAUSSIAN, (Entry(z, rate, rounds),))
            opinions = {each.adjacency: each for each in report([spent], delta).verify()}
            row = {"plan": plan, "sampling": name, "delta": delta, "noise_multiplier": z}
            for adjacency, opinion in opinions.items():
                row |= {adjacency: opinion.epsilon, f"{adjacency}_second": opinion.second}
            found.append(row | {"calibration_cpu_seconds": round(seconds, 2)})
            print(" | ".join(f"{v:.4g}" if isinstance(v, float) else v for v in found[-1].values()))
    return found


if __name__ == "__main__":
    table = rows()
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
