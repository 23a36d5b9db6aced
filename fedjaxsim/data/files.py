"""Files of data and settings: errors name the file, and nothing is larger than the file holds."""

import contextlib
import os
import textwrap
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INFLATION = 1100
"""Above the largest ratio of deflate, 1032."""
_MOST_SETTINGS = 10_000_000
"""Most bytes of a file of settings."""
_PADDED, _PADDING = 1 << 28, 64
"""Texts may be padded to this many bytes, or by this factor."""


@contextlib.contextmanager
def in_file(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Put the path, if there is one, before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        if path is None:
            raise
        raise ValueError(f"{os.fspath(path)}: {error}") from error


@contextlib.contextmanager
def reading(kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise a ValueError for those `errors` that a library raises on damaged files."""
    try:
        yield
    except (*errors, RecursionError, MemoryError) as error:
        said = textwrap.shorten(str(error) or type(error).__name__, 160, placeholder=" …")
        raise ValueError(f"not a readable {kind}: {said}") from error


def check_size(size: int, what: str) -> None:
    """Check that `size` bytes fit into the memory of this machine.

    Raises:
      ValueError: if they do not; the message begins with `what`.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise ValueError(f"{what} takes {size:,} bytes of memory, and there are {memory:,}")


def check_inflated(size: int, stored: int, what: str) -> None:
    """Check that `stored` bytes can inflate to `size` bytes, which fit into memory.

    Raises:
      ValueError: if not; the message begins with `what`.
    """
    if size > _INFLATION * (stored + 1):
        raise ValueError(f"{what} is damaged: it declares {size:,} bytes, and holds {stored:,}")
    check_size(size, what)


def check_padded(count: int, longest: int, total: int, what: str) -> None:
    """Check that texts may be padded to the longest one.

    Args:
      count: number of texts.
      longest: characters of the longest.
      total: characters of all.
      what: beginning of the message.

    Raises:
      ValueError: if padding would take far more memory than the texts.
    """
    if 4 * count * longest > max(_PADDED, _PADDING * 4 * total):
        raise ValueError(
            f"{what} have {total / count:.0f} characters on average, and one has {longest}: all "
            "would be padded to it"
        )


def members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the members of a zip file, whose sizes and places are possible and fit into memory.

    Raises:
      ValueError: if they are not.
    """
    found = archive.infolist()
    for each in found:
        if {"", ".", ".."} & set(each.filename.removesuffix("/").split("/")):
            raise ValueError(f"its member {each.filename!r} has no place in a folder")
        if each.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            check_inflated(each.file_size, each.compress_size, f"its member {each.filename!r}")
    check_size(sum(each.file_size for each in found), "it unpacked")
    return found


def existing(path: str | os.PathLike[str], kind: str, *, folder: bool = False) -> Path:
    """Return the path of a file or folder, or raise FileNotFoundError."""
    found = Path(path)
    if not (found.is_dir() if folder else found.is_file()):
        raise FileNotFoundError(f"no {kind} at {found}")
    return found


def read_tables(path: Path, otherwise: str = "is damaged") -> dict[str, Any]:
    """Read TOML; raise ValueError if it is damaged."""
    try:
        if path.stat().st_size > _MOST_SETTINGS:
            raise ValueError(f"it has more than {_MOST_SETTINGS:,} bytes")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} {otherwise}: {error}") from error
