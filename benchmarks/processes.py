"""Measurements of runs in processes of their own: medians and ranges, one JSON file, and a table.

`in_child` starts this file with a request, JSON with the settings, and reads the last line of its
output, JSON too.
"""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fedjaxsim.bench.measure import Spread, machine, measure, spread
from fedjaxsim.cli.printing import print_rows
from fedjaxsim.divergence import Record
from fedjaxsim.engine.processes import require, use_devices
from fedjaxsim.report.files import write_json
from fedjaxsim.report.progress import number
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config

_MEDIANS = {
    "compile_seconds": "compile s", "evaluation_seconds": "evaluation s", "rounds_mb": "MB",
}  # fmt: skip


@dataclasses.dataclass
class Results:
    """All measurements so far.

    Attributes:
      machine: its description, see `measure.machine`.
      settings: settings of each run, by its name.
      processes: the numbers of each process, by run.
      ceilings: operations and bytes per second that the machine reaches, by name.
    """

    machine: Record = dataclasses.field(default_factory=dict)
    settings: dict[str, Record] = dataclasses.field(default_factory=dict)
    processes: dict[str, list[Record]] = dataclasses.field(default_factory=dict)
    ceilings: Record = dataclasses.field(default_factory=dict)

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
        found = {"machine": self.machine, "ceilings": self.ceilings, "workloads": runs}
        write_json(path, found)


def print_results(results: Results) -> None:
    """Print a line for each run: its speed, and medians of the rest."""
    rows = []
    for run in results.processes:
        found = [results.spread(run, name) for name in _MEDIANS]
        medians = [number(each and each.median) for each in found]
        rows.append([run, str(results.spread(run, "rounds_per_second")), *medians])
    print_rows(["run", "rounds/s", *_MEDIANS.values()], rows)


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
            [sys.executable, __file__, request],
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


def _end_with_parent() -> None:
    """End this process when its input ends, which the parent holds open while it lives."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Answer the request of the command line."""
    _end_with_parent()
    request = json.loads(sys.argv[1])
    wanted = request["devices"]
    use_devices(wanted)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        require(wanted)
        settings = request["settings"]
        experiment = prepare(run_config(**settings))
    except (ValueError, OSError) as error:
        print(json.dumps({"refused": " ".join(str(error).split())}))
        return
    print(json.dumps({"machine": machine(), **measure(experiment)}))


if __name__ == "__main__":
    main()
