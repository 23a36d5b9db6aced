"""Compiled programs in the user's cache folder, by JAX's persistent compilation cache.

They are trusted and made for one kind of CPU, so the folder is the user's own and has one for each
kind.
"""

import contextlib
import hashlib
import os
import platform
import re
import warnings
from pathlib import Path
from typing import Any, cast

import jax

from fedjaxsim.engine import processes

_MOST_BYTES = 2**30
"""Most bytes of compiled programs that are kept."""
_BROKEN = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")
"""JAX's warning of a file that it cannot read."""


def keep_compiled_programs() -> Path | None:
    """Keep compiled programs in the user's cache folder, where later processes find them.

    Call it before anything is compiled. The folder is `~/.cache/fedjaxsim`, or under
    `XDG_CACHE_HOME`, as the command line's; above 1 GiB it begins anew. Only you may be able
    to write to it, since its contents are executed.

    Returns:
      The folder; None if JAX has a cache already or is to have none (`jax_compilation_cache_dir`,
      `jax_enable_compilation_cache`), or if the folder cannot be used, which is a warning.
    """
    try:
        return use_cache()
    except (OSError, RuntimeError) as error:
        warnings.warn(f"compiled programs are not kept: {error}", stacklevel=2)
        return None


def use_cache() -> Path | None:
    """Turn the cache on before JAX compiles, unless the user has chosen another one or none.

    A full folder begins anew, as JAX's own limit takes a lock for every program.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return None
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    if sum(path.stat().st_size for path in files) > _MOST_BYTES:
        for path in files:
            path.unlink(missing_ok=True)
    settings.update("jax_compilation_cache_dir", str(folder))
    # Many small programs take as long to compile as a large one.
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def remove_broken(message: str) -> bool:
    """Remove the files that a warning of JAX's calls broken: it would never overwrite them.

    Return whether it does so, and the folder is ours.
    """
    broken, folder, settings = _BROKEN.search(message), cache_folder(), cast(Any, jax.config)
    if broken is None or settings.jax_compilation_cache_dir != str(folder):
        return False
    for path in folder.glob(f"{broken[1]}-*"):
        path.unlink(missing_ok=True)
    return True


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
