"""The largest memory of this process while something runs, on Linux."""

import threading
import time
from pathlib import Path


def anonymous() -> int:
    """Anonymous memory of this process, in bytes: what is neither code nor a mapped file."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


class Watch:
    """The largest anonymous memory since it began, in bytes."""

    def __init__(self):
        self.peak = anonymous()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.005)
