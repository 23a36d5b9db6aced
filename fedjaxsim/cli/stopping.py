"""The end of a long command by a signal, or by a file that cannot be written."""

import contextlib
from collections.abc import Callable, Iterator

from fedjaxsim import store
from fedjaxsim.engine import processes
from fedjaxsim.signals import Stop, stop_on_signal


@contextlib.contextmanager
def stoppable(kept: Callable[[], str]) -> Iterator[Stop]:
    """Yield the event that a signal sets.

    Args:
      kept: returns what a failed write, or the loss of a process, leaves, and how to continue.
    """
    with stop_on_signal() as stop:
        processes.when_lost(kept)
        try:
            yield stop
        except store.StorageError as error:
            raise store.StorageError(f"{error}; {kept()}") from error
