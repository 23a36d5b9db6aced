"""A command of several processes: all of them do it, or none."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from fedjaxsim.cli.refusals import REFUSED, one_line, refuse
from fedjaxsim.cli.start import INTERRUPTED, Machines
from fedjaxsim.engine import devices, processes
from fedjaxsim.runs.user_code_lines import own_line

Result = TypeVar("Result")


def together(prepare: Callable[[], Callable[[], int]], machines: Machines) -> Callable[[], int]:
    """Prepare a command in all processes: none starts what one refuses, or waits for a dead one.

    Args:
      prepare: checks all input, calls `processes.agree` before anything is written or computed, and
        returns what does the work.
      machines: devices and processes of the command.

    Raises:
      ValueError: as `prepare`, or if there are fewer devices than asked for.
    """
    if not processes.several():
        devices.require(machines.wanted)
        return prepare()
    if not processes.is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end

    def checked() -> Callable[[], int]:
        try:
            devices.require(machines.wanted)
            work = prepare()
            processes.agree({})  # nobody has refused since
        except processes.DisagreeError:
            raise
        except REFUSED as error:
            if not processes.is_loss(error):
                processes.refuse(one_line(error))
            raise
        return work

    def done() -> int:
        code = work()
        processes.from_all("done")  # the first writes for longer than the others
        return code

    work = _or_leave(checked, REFUSED)
    return lambda: _or_leave(done)


def _or_leave(function: Callable[[], Result], passing: tuple[type[Exception], ...] = ()) -> Result:
    """Return the result of `function`; print an error outside `passing` and end the process."""
    try:
        return function()
    except BaseException as error:
        if isinstance(error, Exception) and processes.is_loss(error):
            _say(f"error: a process has ended, and with it the run of all: {one_line(error)}")
            processes.leave(processes.LOST)
        if isinstance(error, passing):
            raise
        if isinstance(error, KeyboardInterrupt):
            _say("interrupted")
            processes.leave(INTERRUPTED)
        if isinstance(error, Exception) and own_line(error) is not None:
            processes.leave(refuse(error))
        traceback.print_exc()
        processes.leave(1)


def _say(words: str) -> None:
    print(f"fedjaxsim: {words}", file=sys.stderr)
