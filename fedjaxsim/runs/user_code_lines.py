"""Which line of a user's own code an error comes from, among the many frames of JAX and of ours."""

import traceback

_PACKAGES: set[str] = set()
"""Whose modules hold algorithms and models of users' own."""


def remember(module: str) -> None:
    """Takes a module, and those beside it in its package, for a user's own."""
    package = module.partition(".")[0]
    if package != __name__.partition(".")[0]:
        _PACKAGES.add(package)


def own_line(error: BaseException) -> str | None:
    """The last place in a user's own code that an error passed, as FILE:LINE; None if none did."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
            return f"{frame.f_code.co_filename}:{line}"
    return None
