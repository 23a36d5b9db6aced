"""Compiled programs are kept in the user's cache folder, by JAX's persistent compilation cache.

A second run of the same shapes compiles nothing. Compiled code is trusted and made for one kind of
CPU, so the folder is the user's own and has a part for each kind.
"""

import contextlib
import hashlib
import os
import platform
import re
import warnings
from pathlib import Path
from typing import Any

import jax

from fedjaxsim.commands.messages import say

VARIABLE = "FEDJAXSIM_COMPILATION_CACHE"
"""The environment variable that holds `off`, or another folder than the user's cache folder."""
OFF = "off"
MOST_BYTES = 2**30
"""What is kept from one start to the next, at most."""

_ERROR = re.compile(r"Error (\w+) persistent compilation cache entry for '([^']+)': (.*)")
_CONSEQUENCE = {
    "reading": "is compiled anew, as its file cannot be read",
    "writing": "is not kept, as its file cannot be written",
}


def keep_compiled_programs() -> None:
    """Turns the cache on, unless the user has chosen another one or none.

    To be called before JAX compiles anything. A folder that cannot be used is a line on stderr.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return
    try:
        folder = cache_folder()
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {folder}")
    except (OSError, RuntimeError) as error:
        say(f"warning: compiled programs are not kept: {error}")
        return
    prune(folder, MOST_BYTES)
    settings.update("jax_compilation_cache_dir", str(folder))
    # Many small programs take as long to compile as a large one.
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _watch_files(folder)


def cache_folder() -> Path | None:
    """The folder for the programs of this kind of CPU; None where the user wants none.

    Raises:
      RuntimeError: if the user has no home.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() == OFF:
        return None
    if chosen:
        return Path(chosen).expanduser() / _kind_of_cpu()
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # The XDG specification has relative ones ignored.
        root = Path.home() / ".cache"
    return root / "fedjaxsim" / "compiled" / _kind_of_cpu()


def _kind_of_cpu() -> str:
    """A name that CPUs with other instructions do not have."""
    words = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        words |= {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:16]


def prune(folder: Path, most_bytes: int) -> None:
    """Removes files, those first that were not used for longest, until the others fit.

    JAX's own limit needs a package for locks and takes a lock for every program.

    Args:
      folder: whose files are counted, with those of its folders.
      most_bytes: how much may be left.
    """
    # Other programs may remove the same files meanwhile.
    with contextlib.suppress(OSError):
        known = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
        left = sum(status.st_size for _, status in known)
        for path, status in sorted(known, key=lambda each: max(each[1].st_atime, each[1].st_mtime)):
            if left <= most_bytes:
                return
            path.unlink(missing_ok=True)
            left -= status.st_size


def _watch_files(folder: Path) -> None:
    """Makes JAX's warnings of its files one line each, and has broken files written anew.

    JAX goes on without a file that it cannot read or write, but never writes over one.
    """
    usual = warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None):
        error = _ERROR.match(str(message))
        if error is None:
            usual(message, category, filename, lineno, file, line)
            return
        action, program, reason = error.groups()
        for path in folder.glob(f"{program}-*"):
            path.unlink(missing_ok=True)
        say(f"warning: the compiled {program} {_CONSEQUENCE[action]} in {folder}: {reason}")

    warnings.showwarning = show
