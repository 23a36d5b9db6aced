"""The numbers of all processes, as one JSON file."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fedjaxsim.bench.spread import Spread, spread
from fedjaxsim.report.files import write_json

Record = dict[str, Any]


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
        self.processes.setdefault(workload, []).append(
            {**numbers, "compiling_memory_mb": peak, "memory_mb": running, "rest_mb": rest}
        )

    def spread(self, workload: str, name: str) -> Spread | None:
        """Median and range of one number of a workload; None where it was not measured."""
        processes = self.processes[workload]
        values = [each[name] for each in processes if each.get(name) is not None]
        return spread(values) if len(values) == len(processes) else None

    def summary(self, workload: str) -> dict[str, Record]:
        """Median and range of all numbers of a workload that were measured."""
        first = self.processes[workload][0]
        names = [name for name, value in first.items() if isinstance(value, int | float)]
        spreads = {name: self.spread(workload, name) for name in names}
        return {name: each._asdict() for name, each in spreads.items() if each is not None}

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
        workloads = {
            name: {
                "bound": self.bound(name),
                "summary": self.summary(name),
                "processes": processes,
            }
            for name, processes in self.processes.items()
        }
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
