"""Processes that measure, each for one request, and never longer than their parent lives."""

import json
import os
import subprocess
import sys
from typing import Any

Record = dict[str, Any]


def of_script(script: str, *arguments: Any) -> Any:
    """Runs a script again with `--child` and arguments, for numbers of a process of its own.

    Args:
      script: its `__file__`; with `--child` it prints JSON and nothing else.
      arguments: that follow `--child`.

    Returns:
      What it printed.

    Raises:
      subprocess.CalledProcessError: if it fails; it has said why on its standard error.
    """
    command = [sys.executable, script, "--child", *map(str, arguments)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(printed)


def in_child(workload: str | None, data: str | None, repeats: int) -> Record:
    """Measures in a new process.

    Args:
      workload: its name; None to see what a process takes that does nothing.
      data: what real data there are, see `Workload.build`.
      repeats: see `measure`.

    Returns:
      What `measure` gives.

    Raises:
      ChildProcessError: if the process fails, with its last words.
    """
    request = json.dumps({"workload": workload, "data": data, "repeats": repeats})
    reader, writer = os.pipe()
    # A session of its own, so that a Ctrl-C of the terminal reaches the parent alone.
    process = subprocess.Popen(
        [sys.executable, "-m", "fedjaxsim.bench.measure", request],
        stdin=reader,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate()
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        # A child whose parent is killed before this line sees the end of its input, and ends.
        os.close(writer)
    if process.returncode != 0:
        words = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise ChildProcessError(words[-1])
    return json.loads(output.splitlines()[-1])
