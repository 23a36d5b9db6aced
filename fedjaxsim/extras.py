"""Extras: optional libraries, and the error where one is not installed."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import NamedTuple


class Extra(NamedTuple):
    """Extra of the package: the subject and verb of its error, and the modules that it installs."""

    subject: str
    libraries: tuple[str, ...]


EXTRAS = {
    "audit": Extra("audits need", ("jax_privacy",)),
    "cuda": Extra("programs for NVIDIA's GPUs need", ("jax_cuda12_plugin",)),
    "equinox": Extra("equinox modules need", ("equinox",)),
    "hf": Extra("Hugging Face data sets need", ("datasets",)),
    "images": Extra("images need", ("PIL",)),
    "plots": Extra("pictures need", ("matplotlib",)),
    "tables": Extra("data frames, table files and sweeps need", ("pandas", "pyarrow")),
    "tensorboard": Extra("the logger tensorboard needs", ("tensorboardX",)),
    "tpu": Extra("programs for TPUs need", ("libtpu",)),
    "wandb": Extra("the logger wandb needs", ("wandb",)),
}
"""Extras whose libraries the package imports."""

_TITLES = {"PIL": "pillow", "jax_cuda12_plugin": "jax-cuda12-plugin", "jax_privacy": "jax-privacy"}
"""Names of libraries that differ from their modules'."""
_OTHERS = {"jax_cuda12_plugin": "jax_cuda13_plugin"}
"""Modules that serve as well."""


class MissingExtraError(ModuleNotFoundError):
    """Error of a library that is not installed, with the command that installs it."""


def require(name: str) -> None:
    """Check that the libraries of the extra `name` are installed, without importing them."""
    for library in EXTRAS[name].libraries:
        either = library, _OTHERS.get(library, library)
        if not any(map(importlib.util.find_spec, either)):
            raise _missing(name, library)


def missing(name: str) -> str | None:
    """Return the error text of `require`; None if all libraries of the extra are installed."""
    try:
        require(name)
    except MissingExtraError as error:
        return str(error)
    return None


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Import libraries of the extra `name` in a `with` block."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library in EXTRAS[name].libraries:
            raise _missing(name, library) from None
        raise


def _missing(name: str, library: str) -> MissingExtraError:
    title = _TITLES.get(library, library)
    return MissingExtraError(
        f"{EXTRAS[name].subject} {title}, which is not installed: pip install 'fedjaxsim[{name}]'",
        name=library,
    )
