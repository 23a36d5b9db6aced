"""Functions that the child processes share. Only numpy: peers have environments of their own.

A child reads the clients that the parent has written, trains, and prints a report as one line of
JSON, its last.
"""

import argparse
import json
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

COHORT, BATCH, CLASSES, SIDE = 100, 10, 62, 28
LEARNING_RATE, LAM, CLIP = 0.1, 0.1, 1.0
NOISE_MULTIPLIER = 0.1
"""Of the runs with noise. It protects nobody: a dozen rounds are to show that a run learns, and the
time of drawing noise does not depend on its size."""
Rows = tuple[np.ndarray, np.ndarray]


class Clients(NamedTuple):
    """Each client's images (n_k, d) and labels (n_k,), to train and to test on."""

    train: list[Rows]
    test: list[Rows]

    def all_tests(self) -> Rows:
        """Return the test rows of all clients together, (n, d) and (n,)."""
        x, y = zip(*self.test, strict=True)
        return np.concatenate(x), np.concatenate(y)


def read_clients(path: str | Path) -> Clients:
    """Read the clients of a file that `fedjaxsim.data.npz.save_npz` wrote, with `x` and `y`."""
    with np.load(path, allow_pickle=False) as arrays:
        x, y, owner, split = (arrays[name] for name in ("x", "y", "client", "split"))

    def rows(which: int) -> list[Rows]:
        chosen = [(split == which) & (owner == k) for k in range(owner.max() + 1)]
        return [(x[mine], y[mine]) for mine in chosen]

    return Clients(rows(0), rows(2))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of a child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", help="one of the runs that this child knows")
    parser.add_argument("--data", type=Path, help="the .npz file with the clients")
    parser.add_argument("--warm", type=int, required=True, help="rounds before the clock starts")
    parser.add_argument("--rounds", type=int, required=True, help="rounds that are timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setting", default="", help="the name of the settings")
    return parser.parse_args(arguments)


def peak_megabytes() -> float:
    """Return the peak resident memory of this process in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux getrusage starts from what the parent had
        peaks = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(peaks[0].split()[1]) * 1024 / 1e6
    scale = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def report(
    args: argparse.Namespace, times: Sequence[float], accuracy: float, versions: Mapping[str, str]
) -> dict[str, Any]:
    """Return the report of a child.

    Args:
      args: of `parse`.
      times: at the start and after each round, in seconds; the last is the end of the last round.
      accuracy: of the model on all test rows after the last round.
      versions: of the libraries.
    """
    start = times[-1 - args.rounds]
    timed = times[-1] - start
    return {
        "rounds_per_s": args.rounds / timed,
        "seconds_per_round": timed / args.rounds,
        "warm_rounds": args.warm,
        "warm_seconds": start - times[0],
        "rounds": args.rounds,
        "peak_mb": peak_megabytes(),
        "learned": {"accuracy": accuracy},
        "setting": args.setting,
        "versions": {"python": platform.python_version(), "numpy": np.__version__, **versions},
    }


def emit(numbers: Mapping[str, Any]) -> None:
    """Print a report as one line."""
    print(json.dumps(numbers), flush=True)
