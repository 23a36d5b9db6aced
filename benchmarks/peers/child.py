"""Functions that the child processes share. Only numpy: peers have environments of their own.

A child reads the clients that the parent has written, trains, and prints a report as one line of
JSON, its last.
"""

import argparse
import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BATCH, LAM, CLIP = 10, 0.1, 1.0
NOISE_MULTIPLIER = 0.1
"""Of the runs with noise. It protects nobody: a dozen rounds are to show that a run learns, and the
time of drawing noise does not depend on its size."""
TAG = "FEDJAXSIM_PEERS"
"""The environment variable whose value the parent gives to all processes of one child."""
Rows = tuple[np.ndarray, np.ndarray]


class Workload(NamedTuple):
    """A model and its federation.

    Attributes:
      classes: labels, or symbols of a text.
      cohort: clients of a round.
      learning_rate: of local steps.
      width: of the hidden layer, 0 if there is none.
    """

    classes: int
    cohort: int
    learning_rate: float
    width: int = 0


WORKLOADS = {
    "softmax": Workload(10, 100, 0.05),
    "mlp": Workload(62, 100, 0.1, 100),
    "cnn": Workload(62, 100, 0.1),
    "gru": Workload(80, 10, 0.5, 64),
}


class Clients(NamedTuple):
    """Each client's inputs (n_k, ...) and labels (n_k, ...), to train and to test on."""

    train: list[Rows]
    test: list[Rows]

    def all_tests(self) -> Rows:
        """Return the test rows of all clients together."""
        x, y = zip(*self.test, strict=True)
        return np.concatenate(x), np.concatenate(y)


def read_clients(path: str | Path) -> Clients:
    """Read the clients of a file that `fedjaxsim.data.npz.save_npz` wrote, with `x` and `y`."""
    with np.load(path, allow_pickle=False) as arrays:
        x, y, counts = (arrays[name] for name in ("x", "y", "counts"))
    ends = np.cumsum(counts).reshape(counts.shape)  # clients' rows in turn, split by split

    def rows(split: int) -> list[Rows]:
        begins = ends[:, split] - counts[:, split]
        return [(x[b:e], y[b:e]) for b, e in zip(begins, ends[:, split], strict=True)]

    return Clients(rows(0), rows(2))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of a child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("system", help="fedavg, with clip and noise if there are any, or ditto")
    parser.add_argument("--data", type=Path, required=True, help="the .npz file with the clients")
    parser.add_argument("--warm", type=int, default=2, help="rounds before the clock starts")
    parser.add_argument("--rounds", type=int, required=True, help="rounds that are timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setting", default="", help="the name of the settings")
    return parser.parse_args(arguments)


def processes(tag: str) -> list[Path]:
    """Return the folders in /proc of all processes with this tag."""
    found = []
    for folder in Path("/proc").glob("[0-9]*") if tag else ():
        with contextlib.suppress(OSError):  # ended, or somebody else's
            if f"{TAG}={tag}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder)
    return found


def _read(name: str) -> list[str]:
    """Read a file of /proc of all processes of this child."""
    texts = []
    for folder in processes(os.environ.get(TAG, "")) or [Path("/proc/self")]:
        with contextlib.suppress(OSError):
            texts.append((folder / name).read_text())
    return texts


def cpu_seconds() -> float:
    """Return the CPU time that the child's processes, and those they waited for, have taken."""
    times = [text.rpartition(")")[2].split()[11:15] for text in _read("stat")]
    return sum(int(ticks) for each in times for ticks in each) / os.sysconf("SC_CLK_TCK")


def peak_megabytes() -> float:
    """Return the sum of the peak resident memories of the child's processes, in MB."""
    lines = [line.split() for text in _read("status") for line in text.splitlines()]
    return sum(int(line[1]) for line in lines if line[:1] == ["VmHWM:"]) * 1024 / 1e6


class Clock:
    """Wall and CPU seconds of the timed rounds.

    Args:
      warm: rounds before the clock starts.
      rounds: rounds that are timed.
      now: the wall clock.
      cpu: the CPU clock.
    """

    def __init__(
        self,
        warm: int,
        rounds: int,
        now: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = cpu_seconds,
    ):
        self.warm, self.rounds, self._now, self._cpu = warm, rounds, now, cpu
        self._done, self._begin = 0, now()
        self._marks: list[tuple[float, float]] = []

    def tick(self, rounds: int = 1) -> None:
        """Note that `rounds` more rounds have ended."""
        self._done += rounds
        if self._done in (self.warm, self.warm + self.rounds):
            self._marks.append((self._now(), self._cpu()))

    def report(
        self, args: argparse.Namespace, accuracy: float, versions: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the report of a child.

        Args:
          args: of `parse`.
          accuracy: on all test rows, after the last round.
          versions: of the libraries.
        """
        (start, cpu_start), (end, cpu_end) = self._marks
        return {
            "rounds_per_s": self.rounds / (end - start),
            "cpu_ms": 1e3 * (cpu_end - cpu_start) / self.rounds,
            "warm_seconds": start - self._begin,
            "rounds": self.rounds,
            "peak_mb": peak_megabytes(),
            "accuracy": accuracy,
            "setting": args.setting,
            "versions": {"python": platform.python_version(), "numpy": np.__version__, **versions},
        }


def emit(numbers: Mapping[str, Any]) -> None:
    """Print a report as one line."""
    print("\n" + json.dumps(numbers), flush=True)
