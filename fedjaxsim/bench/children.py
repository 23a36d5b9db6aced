"""Processes that measure one run each, and end with their parent."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any


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


def end_with_parent() -> None:
    """End this process when its input ends, which the parent holds open while it lives."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
