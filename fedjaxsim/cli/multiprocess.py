"""Start of JAX on the devices of one or several processes, which do a command together."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

import jax

from fedjaxsim.cli.compiled import keep_compiled_programs
from fedjaxsim.cli.messages import (
    INTERRUPTED,
    REFUSED,
    is_out_of_memory,
    one_line,
    refuse,
    say,
)
from fedjaxsim.engine import processes
from fedjaxsim.runs.parts import own_line
from fedjaxsim.store import StorageError

Result = TypeVar("Result")


def start_jax(
    devices_wanted: int | None = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process: int | None = None,
    *,
    cluster: bool = False,
) -> None:
    """Set JAX up before it computes.

    Args:
      devices_wanted: number of devices; None for all.
      coordinator: HOST:PORT of the first of several processes; None for one process.
      num_processes: number of processes.
      process: index of this process.
      cluster: whether a cluster manager provides the three arguments above.
    """
    processes.use_devices(devices_wanted)
    # Reading a user's own part starts JAX before the command does.
    if not jax.distributed.is_initialized() and (cluster or coordinator is not None):
        processes.join(coordinator, num_processes, process)
    keep_compiled_programs()


def in_all_processes(
    prepare: Callable[[], Callable[[], int]], devices_wanted: int | None
) -> Callable[[], int]:
    """Prepare a command in all processes: none starts what one refuses, or waits for a dead one.

    Args:
      prepare: checks all input, calls `processes.agree` before anything is written or computed, and
        returns the function that does the work.
      devices_wanted: the number of devices; None for all.
    """
    if not processes.several():
        processes.require(devices_wanted)
        return prepare()
    if not processes.is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end

    def checked() -> Callable[[], int]:
        try:
            processes.require(devices_wanted)
            work = prepare()
            processes.agree({})  # no process has refused since
        except processes.DisagreeError:
            raise
        except REFUSED as error:
            if not processes.is_loss(error):
                processes.refuse(one_line(error))
            raise
        return work

    def done() -> int:
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
        if isinstance(error, Exception) and is_out_of_memory(error):
            processes.leave(refuse(error))
        if isinstance(error, Exception) and processes.is_loss(error):
            processes.lose(one_line(error))
        if isinstance(error, passing):
            raise
        if isinstance(error, KeyboardInterrupt):
            say("interrupted")
            processes.leave(INTERRUPTED)
        known = isinstance(error, StorageError) or own_line(error) is not None
        if isinstance(error, Exception) and known:
            processes.leave(refuse(error))
        traceback.print_exc()
        processes.leave(1)
