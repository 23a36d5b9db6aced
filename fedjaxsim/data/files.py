"""Errors about files that name the file."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the path before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def existing(path: str | os.PathLike[str], kind: str, *, folder: bool = False) -> Path:
    """Return the path of a file or folder, or raise FileNotFoundError."""
    found = Path(path)
    if not (found.is_dir() if folder else found.is_file()):
        raise FileNotFoundError(f"no {kind} at {found}")
    return found
