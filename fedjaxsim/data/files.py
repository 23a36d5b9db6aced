"""Files of data and settings, in whose errors the file is named."""

import contextlib
import os
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedjaxsim.checks import prefixed
from fedjaxsim.extras import MissingExtraError


@contextlib.contextmanager
def in_file(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Put the path, if there is one, before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        if path is None:
            raise
        raise prefixed(f"{os.fspath(path)}: ", error) from error


@contextlib.contextmanager
def reading(kind: str) -> Iterator[None]:
    """Raise a ValueError for whatever a library raises on a damaged file."""
    try:
        yield
    except MissingExtraError:
        raise
    except Exception as error:  # libraries raise errors of many types
        reason = textwrap.shorten(str(error) or type(error).__name__, 160, placeholder=" …")
        raise ValueError(f"not a readable {kind}: {reason}") from error


def existing(path: str | os.PathLike[str], kind: str, *, folder: bool = False) -> Path:
    """Return the path of a file or folder, or raise FileNotFoundError."""
    as_path = Path(path)
    if not (as_path.is_dir() if folder else as_path.is_file()):
        raise FileNotFoundError(f"no {kind} at {as_path}")
    return as_path


def members_of(folder: Any) -> list[Any]:
    """List a folder, also in a zip, sorted by name, without hidden files and macOS's own."""
    shown = [member for member in folder.iterdir() if not member.name.startswith((".", "__MACOSX"))]
    return sorted(shown, key=lambda member: member.name)


def read_tables(path: Path, otherwise: str = "is damaged") -> dict[str, Any]:
    """Read TOML; raise ValueError if it is damaged."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} {otherwise}: {error}") from error
