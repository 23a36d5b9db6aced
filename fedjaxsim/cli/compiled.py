"""Compiled programs in the user's cache folder, kept by JAX's persistent compilation cache.

Compiled code is trusted and made for one kind of CPU, so the folder is the user's own and has a
folder for each kind.
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

from fedjaxsim.cli.messages import say

VARIABLE = "FEDJAXSIM_COMPILATION_CACHE"
"""Environment variable: `off`, or a folder in place of the user's cache folder."""
OFF = "off"
MOST_BYTES = 2**30
"""Most bytes kept from one start to the next."""

_ERROR = re.compile(r"Error (\w+) persistent compilation cache entry for '([^']+)': (.*)")
_CONSEQUENCE = {
    "reading": "is compiled again, as its file cannot be read",
    "writing": "is not kept, as its file cannot be written",
}


def keep_compiled_programs() -> None:
    """Turn the cache on before JAX compiles, unless the user has chosen another one or none.

    An unusable folder gives a warning.
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
    """Return the folder for programs of this kind of CPU; None if the user wants none."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() == OFF:
        return None
    if chosen:
        return Path(chosen).expanduser() / _kind_of_cpu()
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # The XDG specification ignores relative ones.
        root = Path.home() / ".cache"
    return root / "fedjaxsim" / "compiled" / _kind_of_cpu()


def _kind_of_cpu() -> str:
    """Return a name that CPUs with other instructions do not have."""
    words = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        words |= {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:16]


def prune(folder: Path, most_bytes: int) -> None:
    """Remove the least recently used files below a folder until at most `most_bytes` are left.

    JAX's own limit needs a package for locks and takes a lock for every program.
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
    """Shorten warnings to one line each, and remove files of JAX that are broken.

    JAX continues without a file that it cannot read, and never overwrites it.
    """
    usual, said = warnings.showwarning, set[str]()

    def show(message, category, filename, lineno, file=None, line=None):
        error = _ERROR.match(str(message))
        if error is None and issubclass(category, UserWarning) and "fedjaxsim" in filename:
            if str(message) not in said:  # a plan is checked before the run and at its start
                say(f"warning: {message}")
            said.add(str(message))
            return
        if error is None:
            usual(message, category, filename, lineno, file, line)
            return
        action, program, reason = error.groups()
        for path in folder.glob(f"{program}-*"):
            path.unlink(missing_ok=True)
        say(f"warning: the compiled {program} {_CONSEQUENCE[action]} in {folder}: {reason}")

    warnings.showwarning = show
