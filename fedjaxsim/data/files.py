"""What is wrong in a file is said with the file's name."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def in_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the path before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
