"""Extras: optional libraries, and the error where one is not installed."""

import contextlib
import importlib.util
from collections.abc import Iterator

EXTRAS: dict[str, tuple[str, ...]] = {
    "cuda": ("jax_cuda12_plugin",),
    "equinox": ("equinox",),
    "hf": ("datasets",),
    "images": ("PIL",),
    "plots": ("matplotlib",),
    "tables": ("pandas", "pyarrow"),
    "tpu": ("libtpu",),
    "verify": ("dp_accounting",),
}
"""The modules that the package imports of each extra."""
_OTHERS = {"jax_cuda12_plugin": "jax_cuda13_plugin"}
"""Modules that serve as well."""


class MissingExtraError(ModuleNotFoundError):
    """Error of a library that is not installed, with the command that installs it."""


def missing(name: str) -> str | None:
    """Return what of the extra `name` is not installed, without importing it; None if all is."""
    for library in EXTRAS[name]:
        either = library, _OTHERS.get(library, library)
        if not any(importlib.util.find_spec(module) for module in either):
            return _how_to_install(name, library)
    return None


def require(name: str) -> None:
    """Check that the libraries of the extra `name` are installed, without importing them."""
    if message := missing(name):
        raise MissingExtraError(message)


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Import libraries of the extra `name` in a `with` block."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library in EXTRAS[name]:
            raise MissingExtraError(_how_to_install(name, library)) from None
        raise


def _how_to_install(name: str, library: str) -> str:
    return f"{library} is not installed: pip install 'fedjaxsim[{name}]'"
