"""The line of a user's code that an error comes from, among the many frames of JAX and of ours."""

import traceback

_PACKAGES: set[str] = set()
"""Packages with the algorithms and models of users."""


def remember(module: str) -> None:
    """Count a module, and those beside it in its package, as a user's code."""
    package = module.partition(".")[0]
    if package != __name__.partition(".")[0]:
        _PACKAGES.add(package)


def own_line(error: BaseException) -> str | None:
    """Return the last line of a user's code that an error passed, as FILE:LINE; else None."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
            return f"{frame.f_code.co_filename}:{line}"
    return None
