"""Functions that several scripts share."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

from fedjaxsim.runs.build import Experiment, prepare
from fedjaxsim.runs.settings_files import read_toml

WORKLOADS = Path(__file__).parent / "workloads"


def of_script(script: str, *arguments: Any, seconds: float | None = None) -> Any:
    """Run a script again with `--child` and arguments, for the numbers of a process of its own.

    Args:
      script: its `__file__`; with `--child` it prints a line of JSON at its end.
      arguments: the words after `--child`.
      seconds: the time limit; None for none.

    Returns:
      The content of that line.

    Raises:
      subprocess.CalledProcessError: if it fails; it has said why on its standard error.
      subprocess.TimeoutExpired: if the time is over.
    """
    command = [sys.executable, script, "--child", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=seconds)
    return json.loads(done.stdout.splitlines()[-1])


def use_all_cores() -> None:
    """Give a CPU one device for each core, over which clients are divided; before JAX computes."""
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)


def experiment_of(workload: str, **changes: Any) -> Experiment:
    """Build the run of a workload, with changes of its settings."""
    config = read_toml(WORKLOADS / f"{workload}.toml")
    return prepare(config.replace(**changes) if changes else config)


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes: neither code nor mapped files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


class Watch:
    """The largest anonymous memory since it began, in bytes, on Linux."""

    def __init__(self):
        self.peak = anonymous()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.005)
