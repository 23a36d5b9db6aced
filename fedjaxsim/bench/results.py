"""Measurements of all processes: their medians and ranges, one JSON file, and tables."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from fedjaxsim.report.files import Record, write_json
from fedjaxsim.report.progress import number, print_rows

_MEDIANS = {
    "compile_seconds": "compile s", "evaluation_seconds": "evaluation s",
    "rounds_mb": "MB", "compiling_mb": "MB compiling",
}  # fmt: skip
_COMPARED = {
    "rounds_per_second": ("rounds/s", ("slower", "", "faster"), 0.0),
    "compile_seconds": ("compile s", ("shorter", "", "longer"), 0.1),
    "rounds_mb": ("MB", ("less", "", "more"), 1.0),
}
"""Unit, verdicts, and the value below which numbers count as equal."""


class Spread(NamedTuple):
    """The median and the range of a number over processes."""

    median: float
    least: float
    greatest: float

    def over(self, old: "Spread", equal: float = 0.0) -> "Spread":
        """Return the ratio of the medians to `old`, and its range over pairs of processes.

        Values below `equal` count as `equal`.
        """
        now, then = (Spread(*(max(equal, value) for value in each)) for each in (self, old))
        ratios = now.median / then.median, now.least / then.greatest, now.greatest / then.least
        return Spread(*ratios)

    def __str__(self) -> str:
        """Return the median with its range, if it has one: `2.9 (2.7–3.1)`."""
        ends = f" ({number(self.least)}–{number(self.greatest)})"
        return number(self.median) + (ends if self.least < self.greatest else "")


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the range of one or more values."""
    return Spread(statistics.median(values), min(values), max(values))


@dataclasses.dataclass
class Results:
    """All measurements so far.

    Attributes:
      machine: its description, see `measure.machine`.
      settings: settings of each run, by its name.
      processes: the numbers of each process, by run.
    """

    machine: Record = dataclasses.field(default_factory=dict)
    settings: dict[str, Record] = dataclasses.field(default_factory=dict)
    processes: dict[str, list[Record]] = dataclasses.field(default_factory=dict)

    def spread(self, run: str, name: str) -> Spread | None:
        """Return the spread of a number of a run; None where a process lacks it."""
        values: list[Any] = [each.get(name) for each in self.processes[run]]
        return None if None in values else spread(values)

    def write(self, path: Path) -> None:
        """Write everything as strict JSON, atomically."""
        runs = {}
        for run, processes in self.processes.items():
            spreads = {name: self.spread(run, name) for name in processes[0]}
            summary = {name: each._asdict() for name, each in spreads.items() if each}
            runs[run] = {"settings": self.settings[run], "summary": summary, "processes": processes}
        write_json(path, {"machine": self.machine, "workloads": runs})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of `write`.

        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: if it holds something else.
        """
        if not path.is_file():
            raise FileNotFoundError(f"no results {path}")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            runs = record["workloads"]
            results = cls(
                dict(record["machine"]),
                {run: dict(each.get("settings") or {}) for run, each in runs.items()},
                {run: list(each["processes"]) for run, each in runs.items()},
            )
            if not all(results.spread(run, "rounds_per_second") for run in runs):
                raise KeyError("rounds_per_second")
            compare(results, results)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{path} does not hold results of fedjaxsim bench") from error
        return results


def print_results(results: Results) -> None:
    """Print a line for each run: its speed, and medians of the rest."""
    rows = []
    for run in results.processes:
        found = [results.spread(run, name) for name in _MEDIANS]
        medians = [number(each and each.median) for each in found]
        rows.append([run, str(results.spread(run, "rounds_per_second")), *medians])
    print_rows(["run", "rounds/s", *_MEDIANS.values()], rows, no_wrap=True)


def compare(new: Results, old: Results) -> list[list[str]]:
    """Compare speed, compile time and memory of the runs that two results share.

    A number is called faster or slower, shorter or longer, less or more only where every process of
    one is beyond every process of the other. With five processes each, equal distributions come
    apart like this once in 126 comparisons.

    Returns:
      Rows of texts: the run and, for each number, its ratio new/old with range, and the verdict.
    """
    rows = []
    for run in (run for run in new.processes if run in old.processes):
        row = [run]
        for name, (_, verdicts, equal) in _COMPARED.items():
            now, then = new.spread(run, name), old.spread(run, name)
            ratio = now and then and now.over(then, equal)
            row += [str(ratio or "–"), ""]
            if ratio:
                row[-1] = verdicts[1 + (ratio.least > 1) - (ratio.greatest < 1)]
        rows.append(row)
    return rows


def print_comparison(new: Results, old: Results, name: str) -> None:
    """Print `compare` as a table, and the differences from the machine and settings of `name`."""
    rows = compare(new, old)
    if not rows:
        print(f"no run of {name} was measured here")
        return
    headings = [text for unit, _, _ in _COMPARED.values() for text in (f"{unit} new/old", "is")]
    print_rows(["run", *headings], rows, no_wrap=True)
    slower = ", ".join(row[0] for row in rows if row[2] == "slower")
    print(f"in brackets the range over pairs of processes; slower: {slower or 'none'}")
    for key in ("name", "processor", "cores", "device_kind", "devices"):
        was, now = old.machine.get(key), new.machine.get(key)
        if was != now:
            print(f"not the same machine: {key} was {was!r} and is {now!r}")
    for run, *_ in rows:
        was, now = old.settings.get(run), new.settings.get(run)
        if was and now and was != now:
            other = [key for key in {**was, **now} if was.get(key) != now.get(key)]
            print(f"not the same run: {run} has other {', '.join(other)}")


def in_child(
    settings: Mapping[str, Any], devices: int | None = None, seconds: float | None = None
) -> dict[str, Any]:
    """Measure a run in a new process.

    Args:
      settings: settings of the run, from `RunConfig.settings`.
      devices: the number of devices; None for all.
      seconds: the time limit; None for none.

    Returns:
      The result of `measure`, with the machine.

    Raises:
      ValueError: if the run is refused.
      ChildProcessError: if the process fails, with its last words.
      subprocess.TimeoutExpired: if the time is over.
    """
    request = json.dumps({"settings": dict(settings), "devices": devices})
    reader, writer = os.pipe()
    try:
        # In a new session, so that a Ctrl-C of the terminal reaches the parent alone.
        done = subprocess.run(
            [sys.executable, "-m", "fedjaxsim.bench.measure", request],
            stdin=reader, capture_output=True, text=True, timeout=seconds, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(reader)
        os.close(writer)
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ChildProcessError(words[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    if "refused" in found:
        raise ValueError(found["refused"])
    return found
