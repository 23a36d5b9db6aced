"""Signals that stop a command: Ctrl-C (SIGINT), SIGTERM and SIGHUP.

A Python signal handler waits until the compiled program in flight returns, which can take minutes.
The C handler writes the wake-up descriptor at once, so a thread that reads it answers meanwhile.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

NAMES = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM", int(signal.SIGHUP): "SIGHUP"}
"""Names of the signals that stop a command, for messages, by number."""


PATIENCE = 60.0
"""Seconds after a signal in which the rounds in flight must return."""
_ASKED = 1.0
"""Seconds in which it must be known what is kept."""


class Stop(threading.Event):
    """Event that a signal of `number` sets; unless it is read, `deadline` ends the process.

    Once `is_writing` is true the rounds are over, and a first signal ends nothing before the files
    are whole.
    """

    number, is_writing = 0, False
    deadline: threading.Timer | None = None

    def is_set(self) -> bool:
        """Return whether there was a signal; who reads it ends the work in time."""
        signalled = super().is_set()
        if signalled and self.deadline is not None:
            self.deadline.cancel()
        return signalled


def stopped(numbers: Iterable[int]) -> tuple[str, int]:
    """Return the name of the first signal of `Stop.number` of each process, and the exit code."""
    number = next(filter(None, numbers), int(signal.SIGINT))
    return NAMES[number], 128 + number


@contextmanager
def stop_on_signal(recovery_hint: Callable[[], str] = str) -> Iterator[Stop]:
    """Yield an event that the first signal sets.

    A second one ends the process at once, and so does a round that does not return in time;
    `recovery_hint` says what that leaves, and how to continue.
    """
    stop = Stop()

    def end(why: str = "") -> None:
        hints = list[str]()

        def ask() -> None:
            with suppress(Exception):
                hints.append(recovery_hint())

        # Whatever is wrong with files, or a file system that does not answer, the process ends.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ASKED)
        _end(stop.number, "; ".join([why, *filter(None, hints)]))

    def receive(number: int) -> None:
        first, stop.number = stop.number == 0, number
        if not first:
            end()
            return
        again = f"{NAMES[number]} again ends at once\n"
        if stop.is_writing:
            stop.set()
            _say(f"\nthe run is over and ends once its results are written; {again}")
            return
        what, most = "the rounds in flight or the compilation", f"within {PATIENCE:g} seconds"
        stop.deadline = threading.Timer(PATIENCE, end, [f": {what} did not return {most}"])
        stop.deadline.daemon = True
        stop.deadline.start()
        stop.set()
        _say(f"\nstopping after {what}, {most}; {again}")

    try:
        with _listening(receive):
            yield stop
    finally:  # nobody listens any longer, so no other timer begins
        if stop.deadline is not None:
            stop.deadline.cancel()
            stop.deadline.join()


@contextmanager
def end_on_signal() -> Iterator[None]:
    """End the process in one line at the first signal, also while it imports or compiles."""

    def receive(number: int) -> None:
        _end(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone
        return
    with _listening(receive):
        yield


def _end(number: int, why: str = "") -> None:
    """End the process in one line; past a bar, which hides the cursor and holds what is printed."""
    with suppress(OSError):  # the terminal may be gone
        cursor = "\033[?25h" if os.isatty(2) else ""
        os.write(2, f"{cursor}fedjaxsim: ended by {NAMES[number]}{why}\n".encode())
    os._exit(128 + number)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be gone
        sys.stderr.write(text)
        sys.stderr.flush()


@contextmanager
def _listening(receive: Callable[[int], None]) -> Iterator[None]:
    # nohup ignores SIGHUP, and shells ignore Ctrl-C for what they start in the background.
    heard = [
        number
        for number in NAMES
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
    ]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while received := os.read(reader, 1):
            if received[0] in heard:
                receive(received[0])

    previous = {number: signal.signal(number, lambda *_: None) for number in heard}
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_writer)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: C code's
        os.close(writer)
        watcher.join()
        os.close(reader)
