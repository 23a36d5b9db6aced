"""Table 1 of DPFedMTL for any data: how many rows the clients have, and how unequally.

python experiments/dpfedmtl/table_1.py --data digits
"""

import numpy as np
import tyro

from fedjaxsim.data.describe import skewness
from fedjaxsim.data.load import load

SPLITS = ("train", "test")


def statistics(counts: np.ndarray) -> dict[str, float]:
    """Sum, mean, standard deviation and skewness (of the population) of rows per client, (m,)."""
    return {
        "samples": float(counts.sum()),
        "mean": float(counts.mean()),
        "std.": float(counts.std()),
        "skewness": skewness(counts),
    }


def main(data: str = "digits", test_fraction: float | None = None, seed: int = 0) -> None:
    """Print the table's line of the population that a run on these data has."""
    population = load(data, test=test_fraction, seed=seed)
    print(f"clients   {population.num_clients}")
    for split in SPLITS:
        numbers = statistics(np.asarray(population.splits[split].count))
        print(split.ljust(9), "  ".join(f"{name} {value:.2f}" for name, value in numbers.items()))


if __name__ == "__main__":
    tyro.cli(main)
