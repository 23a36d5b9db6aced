"""Seconds and memory of runs by population, cohort, sizes of clients and placement.

    python benchmarks/scale.py                      # an hour of two idle cores or more, 12 GB
    python benchmarks/scale.py --clients 1000 10000 --cohorts 100 1000 --rounds 20
    python benchmarks/scale.py --minutes 12         # a part of it, as often as needed
    python benchmarks/scale.py --markdown           # the table of what has been measured

Every run is a process of its own. One thing at a time differs from a base: PMTL, 1,000 clients of
about five rows a round, clients of equal sizes, rows mapped from disk, one device. PMTL and FedAvg
are measured with each cohort, PMTL with each placement and each kind of sizes, and FedAvg with
these for the second largest population. Settings that are in the file of results are not repeated,
so a measurement that was ended goes on.

Seconds are those of the run's summary: before the first round (reading, compiling), of a round
alone, of five evaluations of a sample and one of all clients, and after the last round (writing).
Peak memory stands beside the peak that `fedjaxsim plan` says, with the pages of mapped files.
"""

import argparse
import bisect
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import RESULTS, Record, time_left, update

import fedjaxsim as fjs
from fedjaxsim.cli.printing import print_rows
from fedjaxsim.report.files import read_json
from fedjaxsim.runs.directory import SUMMARY

ROWS, FEATURES, CLASSES, EXPONENT = 5, 8, 2, 1.1
MAPPED, IN_MEMORY = "mapped", "in memory"
PLACEMENTS = {
    MAPPED: ["--devices", "1"], IN_MEMORY: ["--devices", "1"],
    "two devices": ["--devices", "2"], "streamed": ["--streamed"],
}  # fmt: skip
SIZES = ("even", "zipf", "giant")
COLUMNS = ("start s", "round ms", "evaluations s", "end s", "peak GB", "plan GB")


class Setting(NamedTuple):
    """One run."""

    clients: int
    sizes: str = "even"
    algorithm: str = "pmtl"
    cohort: int = 1_000
    placement: str = MAPPED

    @property
    def name(self) -> str:
        """Its key in the file of results."""
        return ", ".join(map(str, self))


def settings_of(clients: Sequence[int], cohorts: Sequence[int]) -> list[Setting]:
    """Return the runs, those on one population together."""

    def of_population(count: int) -> Iterator[Setting]:
        base = cohorts[len(cohorts) // 2]
        both = count == sorted(clients)[-2:][0]
        for algorithm in ("pmtl", "fedavg"):
            yield from (Setting(count, "even", algorithm, cohort) for cohort in cohorts)
            if algorithm == "pmtl" or both:
                for placement in PLACEMENTS:
                    yield Setting(count, "even", algorithm, base, placement)
                yield from (Setting(count, sizes, algorithm, base) for sizes in SIZES)

    found = dict.fromkeys(each for count in clients for each in of_population(count))
    # A cohort of all clients is another sampling.
    fitting = [each for each in found if each.cohort < each.clients]
    return sorted(fitting, key=lambda each: (each.clients, SIZES.index(each.sizes)))


def sizes_of(kind: str, clients: int) -> np.ndarray:
    """Return how many rows each client has: five on average, but for the giant's."""
    if kind == "even":
        return np.full(clients, ROWS)
    if kind == "giant":
        counts = np.full(clients, ROWS)
        counts[clients // 2] += clients
        return counts
    shares = np.arange(1, clients + 1) ** -EXPONENT

    def counts_of(largest):
        return np.maximum(2, largest * shares).astype(int)

    rows = ROWS * clients  # as many as in an even population
    largest = bisect.bisect_left(range(rows), rows, key=lambda each: counts_of(each).sum())
    return np.random.default_rng(0).permutation(counts_of(largest))


def population_of(kind: str, clients: int) -> fjs.Population:
    """Make normal features and random labels, with two rows or more for each client."""
    draws, counts = np.random.default_rng(1), sizes_of(kind, clients)
    fields = {
        "x": draws.standard_normal((counts.sum(), FEATURES), dtype=np.float32),
        "y": draws.integers(0, CLASSES, counts.sum()).astype(np.int32),
    }
    return fjs.data.split(fjs.Population.from_flat(fields, counts), test=0.2)


def measured(setting: Setting, rows: Path, rounds: int, out: Path) -> Record:
    """Run one setting and return its numbers."""
    command = [sys.executable, "-m", "fedjaxsim"]
    data = f"npz:{rows}.npz" if setting.placement == IN_MEMORY else f"folder:{rows}"
    flags = [
        "--data", data, "--algorithm", setting.algorithm, "--learning-rate", "0.1",
        "--sampling-rate", str(setting.cohort / setting.clients), *PLACEMENTS[setting.placement],
    ]  # fmt: skip
    planned = [*command, "plan", "--json", *flags]
    found = subprocess.run(planned, check=True, capture_output=True, text=True)
    every = ["--rounds", str(rounds), "--eval-every", str(-(-rounds // 5))]
    files = ["--quiet", "--out", str(out), "--overwrite"]
    run = [*command, "run", *flags, *every, *files]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    summary = read_json(out / SUMMARY)
    return {
        "start s": summary["load_seconds"] + summary["compile_seconds"],
        "round ms": 1e3 * summary["rounds_seconds"] / rounds,
        "evaluations s": summary["evaluate_seconds"],
        "end s": summary["write_seconds"],
        "peak GB": summary["peak_bytes"] / 1e9,
        "plan GB": json.loads(found.stdout)["peak"] / 1e9,
    }


def markdown(results: Record) -> str:
    """Return the table of all results, and how a round's cost grows with the population."""
    headings = [*Setting._fields, *COLUMNS]
    lines = [headings, ["---"] * len(headings)]
    rounds: dict[str, list[float]] = {}
    for name, found in results.items():
        clients, *others = name.split(", ")
        lines.append([f"{int(clients):,}", *others, *(f"{found[key]:.3g}" for key in COLUMNS)])
        rounds.setdefault(", ".join(others), []).append(found["round ms"])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    grows = [
        f"* {name}: {max(each) / min(each):.2f}" for name, each in rounds.items() if len(each) > 1
    ]
    return "\n".join([table, "", "Largest over smallest cost of a round, by population:", *grows])


def main() -> None:
    """Read the flags, and measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.json")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then no run starts")
    parser.add_argument("--markdown", action="store_true", help="print the table and end")
    options = parser.parse_args()
    known = read_json(options.out) if options.out.exists() else {}
    if options.markdown:
        print(markdown(known))
        return
    left = time_left(options.minutes)
    wanted = settings_of(options.clients, options.cohorts)
    missing = [setting for setting in wanted if setting.name not in known]
    for clients, sizes in dict.fromkeys((each.clients, each.sizes) for each in missing):
        if not left():
            return
        here = [each for each in missing if (each.clients, each.sizes) == (clients, sizes)]
        with tempfile.TemporaryDirectory() as scratch:
            rows, population = Path(scratch) / "rows", population_of(sizes, clients)
            fjs.data.save_folder(rows, population)
            if any(each.placement == IN_MEMORY for each in here):
                fjs.data.save_npz(rows.with_suffix(".npz"), population)
            del population
            for setting in here:
                if not left():
                    return
                found = measured(setting, rows, options.rounds, Path(scratch) / "run")
                cells = [setting.name, *(f"{found[key]:.3g}" for key in COLUMNS)]
                print_rows(["", *COLUMNS], [cells])
                update(options.out, {setting.name: found})


if __name__ == "__main__":
    main()
