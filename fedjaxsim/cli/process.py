"""The process of a command, alone or one of several, and its end."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from fedjaxsim import store
from fedjaxsim.cli.flags import Work
from fedjaxsim.cli.messages import (
    INTERRUPTED,
    REFUSED,
    in_flags,
    is_expected,
    is_out_of_memory,
    one_line,
    refuse,
    say,
)
from fedjaxsim.engine import processes
from fedjaxsim.signals import Stop, stop_on_signal, stopped

Result = TypeVar("Result")


def in_all_processes(prepare: Callable[[], Work], devices_wanted: int | None) -> Work:
    """Prepare a command in all processes: none starts what one refuses, or waits for a dead one.

    `prepare` checks all input, calls `processes.agree` before anything is written or computed, and
    returns the work.
    """
    if not processes.several():
        processes.require(devices_wanted)
        return prepare()
    if not processes.is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end

    def checked() -> Work:
        try:
            processes.require(devices_wanted)
            work = prepare()
            processes.agree({})  # no process has refused since
        except processes.DisagreeError:
            raise
        except REFUSED as error:
            if not processes.is_loss(error):
                processes.refuse(one_line(in_flags(error)))
            raise
        return work

    def done() -> int | None:
        code = work()
        processes.from_all("done")  # the first process writes for longer than the others
        return code

    work = _or_leave(checked, REFUSED)
    return lambda: _or_leave(done)


def _or_leave(function: Callable[[], Result], passing: tuple[type[Exception], ...] = ()) -> Result:
    """Return the result of `function`; print an error outside `passing` and end the process."""
    try:
        return function()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            say("interrupted")
            processes.leave(INTERRUPTED)
        if isinstance(error, Exception):
            if processes.is_loss(error):
                processes.lose(one_line(error))
            if isinstance(error, passing) and not is_out_of_memory(error):
                raise
            if is_expected(error):
                processes.leave(refuse(error))
        traceback.print_exc()
        processes.leave(1)


@contextlib.contextmanager
def stoppable(recovery_hint: Callable[[], str]) -> Iterator[Stop]:
    """Yield the event that a signal sets.

    `recovery_hint` says what an end in the middle leaves (by a second signal, a failed write, or
    the loss of a process), and how to continue.
    """
    with stop_on_signal(recovery_hint) as stop:
        processes.when_lost(recovery_hint)
        try:
            yield stop
        except store.StorageError as error:
            raise store.StorageError(f"{error}; {recovery_hint()}") from error


def end_stopped(numbers: Iterable[int], what: str) -> int:
    """Say by which signal a command was stopped, and `what` that leaves; return its exit code."""
    name, code = stopped(numbers)
    print(f"stopped by {name}{what}", file=sys.stderr)
    return code
