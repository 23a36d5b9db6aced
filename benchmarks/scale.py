"""Seconds and memory of runs by population, cohort, sizes of clients and placement.

    python benchmarks/scale.py --clients 10000 100000 --cohorts 100 1000 [--sizes even zipf giant]

Every run is a process of its own on a folder of rows, beside what `fedjaxsim plan` says. Seconds
are those of the run's summary: before the first round (reading, compiling), of a round alone, of an
evaluation, and after the last round (writing).
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import RESULTS, Record, update

import fedjaxsim as fjs
from fedjaxsim.report.files import read_json
from fedjaxsim.report.progress import print_rows
from fedjaxsim.runs.directory import METRICS, SUMMARY

ROWS, FEATURES, EXPONENT = 5, 16, 1.1
PLACEMENTS = {
    "in memory": ["--devices", "1"], "two devices": ["--devices", "2"], "streamed": ["--streamed"],
}  # fmt: skip
COLUMNS = ("start s", "round ms", "evaluation s", "end s", "peak GB", "plan GB")


def sizes_of(kind: str, clients: int) -> np.ndarray:
    """Return how many rows each client has, about five on average."""
    if kind == "even":
        return np.full(clients, ROWS)
    if kind == "giant":
        counts = np.full(clients, ROWS)
        counts[clients // 2] += clients
        return counts
    shares = np.arange(1, clients + 1) ** -EXPONENT
    counts = np.maximum(2, ROWS * clients * shares / shares.sum()).astype(int)
    return np.random.default_rng(0).permutation(counts)


def population_of(kind: str, clients: int) -> fjs.Population:
    """Make normal features and random labels, with two rows or more for each client."""
    draws, counts = np.random.default_rng(1), sizes_of(kind, clients)
    fields = {
        "x": draws.standard_normal((counts.sum(), FEATURES), dtype=np.float32),
        "y": draws.integers(0, 10, counts.sum()).astype(np.int32),
    }
    return fjs.data.split(fjs.Population.from_flat(fields, counts), test=0.2)


def measured(settings: list[str], placement: str, rounds: int, out: Path) -> Record:
    """Run one setting and return its numbers."""
    command = [sys.executable, "-m", "fedjaxsim.cli"]
    planned = ["plan", "--json", *settings, *PLACEMENTS[placement]]
    found = subprocess.run([*command, *planned], check=True, capture_output=True, text=True)
    files = ["--quiet", "--out", str(out), "--overwrite"]
    subprocess.run(
        [*command, "run", *settings, *PLACEMENTS[placement], "--rounds", str(rounds),
         "--eval-every", str(max(1, rounds // 2)), *files],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    summary = read_json(out / SUMMARY)
    evaluations = len((out / METRICS).read_text().splitlines())
    return {
        "start s": summary["load_seconds"] + summary["compile_seconds"],
        "round ms": 1e3 * summary["rounds_seconds"] / rounds,
        "evaluation s": summary["evaluate_seconds"] / evaluations,
        "end s": summary["write_seconds"],
        "peak GB": summary["peak_bytes"] / 1e9,
        "plan GB": json.loads(found.stdout)["peak"] / 1e9,
    }


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--sizes", nargs="+", default=["even", "zipf", "giant"])
    parser.add_argument("--algorithms", nargs="+", default=["pmtl", "fedavg"])
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=[*PLACEMENTS])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.json")
    options = parser.parse_args()
    for clients, sizes in itertools.product(options.clients, options.sizes):
        with tempfile.TemporaryDirectory() as scratch:
            rows = Path(scratch) / "rows"
            fjs.data.save_folder(rows, population_of(sizes, clients))
            cohorts = [cohort for cohort in options.cohorts if cohort <= clients]
            for algorithm, cohort, placement in itertools.product(
                options.algorithms, cohorts, options.placements
            ):
                settings = ["--data", f"folder:{rows}", "--algorithm", algorithm]
                settings += ["--sampling-rate", str(cohort / clients), "--learning-rate", "0.1"]
                found = measured(settings, placement, options.rounds, Path(scratch) / "run")
                name = f"{algorithm}, {clients:,} clients, {sizes}, {cohort:,} a round, {placement}"
                print_rows(["", *COLUMNS], [[name, *(f"{found[key]:.3g}" for key in COLUMNS)]])
                update(options.out, {name: found})


if __name__ == "__main__":
    main()
