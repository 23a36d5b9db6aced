"""Processes that measure, each for one request, and never longer than their parent lives."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
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
    *_, last = reports([sys.executable, "-m", "fedjaxsim.bench.measure", request])
    return last


def reports(command: Sequence[str], seconds: float | None = None) -> Iterator[Record]:
    """What a process prints, one JSON object a line, as it comes.

    The process gets an input that ends with its parent, see `end_with_parent`.

    Args:
      command: of the process.
      seconds: after which it is ended; None for no limit.

    Raises:
      TimeoutError: if it is not done by then.
      ChildProcessError: if it fails, with its last words.
    """
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        reader, writer = os.pipe()
        # A session of its own, so that a Ctrl-C of the terminal reaches the parent alone.
        process = subprocess.Popen(
            command,
            stdin=reader,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        output, late = stack.enter_context(process.stdout), threading.Event()

        def cut():
            late.set()
            process.kill()

        clock = None if seconds is None else threading.Timer(seconds, cut)
        try:
            if clock is not None:
                clock.start()
            for line in output:
                if line.startswith("{"):
                    yield json.loads(line)
            process.wait()
        finally:
            if clock is not None:
                clock.cancel()
            process.kill()
            process.wait()
            os.close(reader)
            # A child whose parent is killed before this line sees the end of its input, and ends.
            os.close(writer)
        if late.is_set():
            raise TimeoutError(f"cut after {seconds:.0f} s")
        if process.returncode != 0:
            errors.seek(0)
            words = errors.read().strip().splitlines() or [f"exit code {process.returncode}"]
            raise ChildProcessError(words[-1])


def end_with_parent() -> None:
    """Ends this process when its input ends, whose other end the parent holds while it lives."""

    def wait():
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
