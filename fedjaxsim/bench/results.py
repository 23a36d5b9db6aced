"""The numbers of all processes, as one JSON file, and their medians and ranges."""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from fedjaxsim.report.files import write_json

Record = dict[str, Any]


class Spread(NamedTuple):
    """A number as several processes measured it.

    Attributes:
      median: of the processes.
      least: the smallest one.
      greatest: the largest one.
    """

    median: float
    least: float
    greatest: float

    def over(self, old: "Spread") -> "Spread":
        """The ratio of two medians, and the range of the ratios of any two processes."""
        ratios = self.median / old.median, self.least / old.greatest, self.greatest / old.least
        return Spread(*ratios)


def spread(values: Sequence[float]) -> Spread:
    """Median and range of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


@dataclasses.dataclass
class Results:
    """What was measured so far.

    Attributes:
      machine: on which, see `machine.py`.
      idle_mb: the memory of a process that does nothing.
      processes: by workload, what each process gave.
    """

    machine: Record
    idle_mb: float = 0.0
    processes: dict[str, list[Record]] = dataclasses.field(default_factory=dict)

    def add(self, workload: str, numbers: Mapping[str, Any]) -> None:
        """Keeps what one process gave."""
        peak, running = (numbers[name] - self.idle_mb for name in ("peak_mb", "running_mb"))
        rest = running - numbers["state_mb"] - numbers["data_mb"]
        memory = {"compiling_memory_mb": peak, "memory_mb": running, "rest_mb": rest}
        self.processes.setdefault(workload, []).append({**numbers, **memory})

    def spread(self, workload: str, name: str) -> Spread | None:
        """Median and range of one number of a workload; None where a process lacks it."""
        values: list[Any] = [each.get(name) for each in self.processes[workload]]
        return None if None in values else spread(values)

    def bound(self, workload: str) -> str | None:
        """Which ceiling is nearer, "gemm" or "memory"; None where there is none to come near."""
        gemm, memory = (self.spread(workload, f"{name}_fraction") for name in ("gemm", "memory"))
        if gemm is None or memory is None or max(gemm.median, memory.median) == 0:
            return None
        return "gemm" if gemm.median >= memory.median else "memory"

    def fraction(self, workload: str) -> Spread | None:
        """The fraction of that ceiling which is reached."""
        bound = self.bound(workload)
        return None if bound is None else self.spread(workload, f"{bound}_fraction")

    def write(self, path: Path) -> None:
        """Writes everything as strict JSON, atomically."""
        workloads = {}
        for name, processes in self.processes.items():
            numbers = [key for key, value in processes[0].items() if isinstance(value, int | float)]
            spreads = {key: self.spread(name, key) for key in numbers}
            summary = {key: each._asdict() for key, each in spreads.items() if each is not None}
            bound = self.bound(name)
            workloads[name] = {"bound": bound, "summary": summary, "processes": processes}
        record = {"machine": self.machine, "idle_mb": self.idle_mb, "workloads": workloads}
        write_json(path, record)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads what `write` wrote.

        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: if it is not such a file.
        """
        if not path.is_file():
            raise FileNotFoundError(f"no results {path}")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            processes = {
                name: list(each["processes"]) for name, each in record["workloads"].items()
            }
            results = cls(dict(record["machine"]), float(record["idle_mb"]), processes)
            for name in processes:
                if results.spread(name, "rounds_per_second") is None:
                    raise KeyError(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not hold results of fedjaxsim bench") from error
        return results
