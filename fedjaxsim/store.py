"""The file layer: after a crash, a full disk or a power cut a file is the old one or the new one.

`write` fills a temporary file, syncs it, renames it, and syncs the folder. `append` adds lines,
which are durable after `sync`, and `whole_lines` drops a line that was cut. `hold` makes this
process the only writer of a folder. A write that fails is a `StorageError`, of one line.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

LOCK = ".lock"
"""File in a held folder with the process that holds it."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)


class StorageError(OSError):
    """A file that cannot be written; the message names it and the cause."""


class System:
    """The operating system's changes of files; tests replace it to let any of them fail."""

    open = staticmethod(os.open)
    write = staticmethod(os.write)
    sync = staticmethod(os.fsync)
    truncate = staticmethod(os.ftruncate)
    rename = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)


system: Any = System()
_held: dict[Path, int] = {}
"""Descriptors of this process's locks."""
_wait: ContextVar[Callable[[str], bool] | None] = ContextVar("wait", default=None)


@contextlib.contextmanager
def waiting(wait: Callable[[str], bool]) -> Iterator[None]:
    """Repeat writes to a full disk instead of failing.

    Args:
      wait: called with the error's text before each repetition; False gives up.
    """
    token = _wait.set(wait)
    try:
        yield
    finally:
        _wait.reset(token)


def write(path: Path, content: bytes | Callable[[], Iterable[Any]]) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part.

    Args:
      path: the file, in a folder that exists.
      content: bytes, or a function that yields the parts, each with a buffer of bytes.

    Raises:
      StorageError: if that fails; the old content is kept.
    """

    def attempt() -> None:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with _opened(temporary, flags) as descriptor:
                for part in (content,) if isinstance(content, bytes) else content():
                    _write_all(descriptor, part)
                system.sync(descriptor)
            system.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                system.unlink(temporary)
            raise
        _sync_folder(path.parent)

    _attempted(path, attempt)


def append(path: Path, content: bytes) -> None:
    """Append to a file that exists; not durable before `sync`.

    Raises:
      StorageError: if that fails; the file is as before.
    """

    def attempt() -> None:
        with _opened(path, os.O_WRONLY | os.O_APPEND) as descriptor:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, content)
            except OSError:
                with contextlib.suppress(OSError):
                    system.truncate(descriptor, size)
                raise

    _attempted(path, attempt)


def sync(path: Path) -> None:
    """Make what was appended to a file durable.

    Raises:
      StorageError: if that fails.
    """

    def attempt() -> None:
        with _opened(path, os.O_RDONLY) as descriptor:
            system.sync(descriptor)

    _attempted(path, attempt)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists.

    Raises:
      StorageError: if that fails.
    """

    def attempt() -> None:
        if path.is_dir():
            shutil.rmtree(path)
            return
        with contextlib.suppress(FileNotFoundError):
            system.unlink(path)

    _attempted(path, attempt)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, durably.

    Raises:
      StorageError: if that fails.
    """

    def attempt() -> None:
        for folder in (*reversed(path.parents), path):
            if folder.is_dir():
                continue
            with contextlib.suppress(FileExistsError):
                system.mkdir(folder)
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            _sync_folder(folder.parent)

    _attempted(path, attempt)


def whole_lines(path: Path) -> list[bytes]:
    """Read a file's lines without their ends; a last one without an end was cut, and is dropped."""
    return path.read_bytes().split(b"\n")[:-1]


def hold(path: Path) -> None:
    """Make a folder and lock it until `release` or the end of the process, however it ends.

    Raises:
      StorageError: if the folder cannot be made or written to.
      ValueError: if another process holds it, with its number, its machine and the time.
    """
    path = path.resolve()
    if path in _held:
        return
    make_folder(path)
    lock = path / LOCK
    while True:
        descriptor = _attempted(lock, lambda: os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 4096)
            os.close(descriptor)
            if error.errno in _NO_LOCKS:  # a file system without locks
                return
            raise ValueError(f"{path} is in use by {_described(holder)}") from None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == os.stat(lock).st_ino:
                break
        os.close(descriptor)  # its holder has just removed it
    own = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    with contextlib.suppress(OSError):  # the lock holds without its text
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(own).encode())
    _held[path] = descriptor
    for left in (*path.glob(".*.*"), *path.glob("*/.*.*")):
        if len(left.name.rpartition(".")[2]) == 32:  # a temporary file of a killed process
            with contextlib.suppress(OSError):
                left.unlink()


def release() -> None:
    """Release all folders that this process holds."""
    while _held:
        path, descriptor = _held.popitem()
        with contextlib.suppress(OSError):
            os.unlink(path / LOCK)
        os.close(descriptor)


def _described(holder: bytes) -> str:
    try:
        found = json.loads(holder)
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _attempted(path: Path, attempt: Callable[[], Result]) -> Result:
    """Return the result of `attempt`, repeated while the disk is full and a wait was chosen."""
    while True:
        try:
            return attempt()
        except StorageError:
            raise
        except OSError as error:
            text = f"{path} cannot be written: {error.strerror or error}"
            wait = _wait.get()
            if error.errno in _FULL and wait is not None and wait(text):
                continue
            raise StorageError(text) from error


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = system.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, part: Any) -> None:
    left = memoryview(part).cast("B")
    while left:
        left = left[system.write(descriptor, left) :]


def _sync_folder(path: Path) -> None:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            system.sync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:  # some network file systems have none
                raise
