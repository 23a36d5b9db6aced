"""The process of a command, alone or beside others: how its work ends, and its compiled programs.

Compiled programs are kept in the user's cache folder by JAX's persistent compilation cache. They
are trusted and made for one kind of CPU, so the folder is the user's own and has one for each kind.
"""

import contextlib
import hashlib
import os
import platform
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from fedjaxsim import store
from fedjaxsim.cli.flags import Work
from fedjaxsim.cli.messages import (
    INTERRUPTED,
    REFUSED,
    is_expected,
    is_out_of_memory,
    one_line,
    refuse,
    say,
)
from fedjaxsim.engine import processes
from fedjaxsim.signals import Stop, stop_on_signal

Result = TypeVar("Result")
_MOST_BYTES = 2**30
"""Most bytes of compiled programs that are kept."""
_BROKEN = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")


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
def stoppable(kept: Callable[[], str]) -> Iterator[Stop]:
    """Yield the event that a signal sets.

    `kept` says what an end in the middle leaves (by a second signal, a failed write, or the loss of
    a process), and how to continue.
    """
    with stop_on_signal(kept) as stop:
        processes.when_lost(kept)
        try:
            yield stop
        except store.StorageError as error:
            raise store.StorageError(f"{error}; {kept()}") from error


# --- compiled programs ----------------------------------------------------------------------------


def keep_compiled_programs() -> None:
    """Turn the cache on before JAX compiles, unless the user has chosen another one or none.

    A full folder begins anew, as JAX's own limit takes a lock for every program. An unusable one
    gives a warning.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = [path for path in folder.rglob("*") if path.is_file()]
        if sum(path.stat().st_size for path in files) > _MOST_BYTES:
            for path in files:
                path.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        say(f"warning: compiled programs are not kept: {error}")
        return
    settings.update("jax_compilation_cache_dir", str(folder))
    # Many small programs take as long to compile as a large one.
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _watch_files(folder)


def cache_folder() -> Path:
    """Return the folder for programs of this kind of CPU and threads.

    A program says how its operations are spread over threads.
    """
    words = {platform.machine(), f"threads {os.environ.get(processes.THREADS)}"}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        words |= {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    kind_of_cpu = hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fedjaxsim" / "compiled" / kind_of_cpu


def _watch_files(folder: Path) -> None:
    """Say which files of JAX are broken, and remove them.

    JAX continues without a file that it cannot read, and never overwrites it.
    """
    usual, said = warnings.showwarning, set[str]()

    def show(message, *about):
        text, broken = one_line(message), _BROKEN.search(str(message))
        for path in folder.glob(f"{broken[1]}-*") if broken else ():
            path.unlink(missing_ok=True)
        if not broken:
            usual(message, *about)
        elif text not in said:
            said.add(text)
            say(f"warning: {text}")

    warnings.showwarning = show
