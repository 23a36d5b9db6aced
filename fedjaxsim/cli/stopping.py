"""The end of a long command by a signal or a full disk."""

import contextlib
from collections.abc import Callable, Iterator

from fedjaxsim import store
from fedjaxsim.cli.messages import say
from fedjaxsim.signals import Stop, stop_on_signal

RETRY = 5.0
"""Seconds between attempts to write to a full disk."""


@contextlib.contextmanager
def stoppable(on_full_disk: str, kept: Callable[[], str]) -> Iterator[Stop]:
    """Yield the event that a signal sets.

    Args:
      on_full_disk: "wait" repeats writes to a full disk until they succeed or the event is set;
        "stop" lets them fail.
      kept: returns what a failed write leaves, and how to continue.

    Raises:
      StorageError: if a file cannot be written, with what is kept.
    """
    with contextlib.ExitStack() as stack:
        stop, said = stack.enter_context(stop_on_signal()), set[str]()

        def wait(text: str) -> bool:
            if text not in said:
                said.add(text)
                say(f"warning: {text}; waiting for space, Ctrl-C stops")
            return not stop.wait(RETRY)

        if on_full_disk == "wait":
            stack.enter_context(store.waiting(wait))
        try:
            yield stop
        except store.StorageError as error:
            raise store.StorageError(f"{error}; {kept()}") from error
