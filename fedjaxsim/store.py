"""The file layer: after a crash, a full disk or a power cut a file is the old one or the new one.

`write` fills a temporary file, syncs it, renames it, and syncs the folder. `append` adds lines,
which are durable after `sync`, and `whole_lines` drops a line that was cut. `hold` makes this
process the only writer of a folder. A write that fails is a `StorageError`, of one line, and what
was there stays as it was.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

LOCK = ".lock"
"""File in a held folder with the process that holds it."""
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)


class StorageError(OSError):
    """Error of a file that cannot be written; it names the file and the cause."""


_held: dict[Path, int] = {}
"""Descriptors of this process's locks."""


def write(path: Path, content: bytes | Callable[[], Iterable[Any]]) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part.

    `content` is bytes, or a function that yields buffers of bytes.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with _reported(path):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with _opened(temporary, flags) as descriptor:
                for part in (content,) if isinstance(content, bytes) else content():
                    _write_all(descriptor, part)
                os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Append to a file that exists; not durable before `sync`."""
    with _reported(path), _opened(path, os.O_WRONLY | os.O_APPEND) as descriptor:
        size = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, content)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise


def sync(path: Path) -> None:
    """Make what was appended to a file durable."""
    with _reported(path), _opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    with _reported(path), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() else os.unlink(path)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, durably."""
    with _reported(path):
        for folder in (*reversed(path.parents), path):
            if folder.is_dir():
                continue
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            _sync_folder(folder.parent)


def whole_lines(path: Path) -> list[bytes]:
    """Read a file's lines without their ends; a last one without an end was cut, and is dropped."""
    return path.read_bytes().split(b"\n")[:-1]


def lock_folder(path: Path) -> None:
    """Make a folder and lock it until `unlock_folders` or the end of the process, however it ends.

    Raises ValueError if another process holds it, with its number, its machine and the time.
    """
    path = path.resolve()
    if path in _held:
        return
    make_folder(path)
    lock = path / LOCK
    while True:
        with _reported(lock):
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        is_locked = False
        try:
            is_locked = _flock(descriptor, path)
        finally:
            if not is_locked:
                os.close(descriptor)
        if not is_locked:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == os.stat(lock).st_ino:
                break
        os.close(descriptor)  # its holder has just removed it
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = f"process {os.getpid()} on {socket.gethostname()} since {since}"
    with contextlib.suppress(OSError):  # the lock holds without its text
        os.ftruncate(descriptor, 0)
        os.write(descriptor, owner.encode())
    _held[path] = descriptor
    for left in (*path.glob(".*.*"), *path.glob("*/.*.*")):
        if len(left.name.rpartition(".")[2]) == 32:  # a temporary file of a killed process
            with contextlib.suppress(OSError):
                left.unlink()


def check_free(path: Path) -> None:
    """Check that no other process holds a folder, or one in it; a ValueError names the process."""
    for lock in (path / LOCK, *path.glob(f"*/{LOCK}")):
        if lock.parent.resolve() in _held:
            continue
        with contextlib.suppress(OSError), _opened(lock, os.O_RDWR) as descriptor:
            _flock(descriptor, lock.parent)


def unlock_folders() -> None:
    """Unlock all folders that this process holds."""
    while _held:
        path, descriptor = _held.popitem()
        with contextlib.suppress(OSError):
            os.unlink(path / LOCK)
        os.close(descriptor)


def _flock(descriptor: int, path: Path) -> bool:
    """Lock a folder by its opened lock; return whether its file system has locks.

    Raises ValueError if another process holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        holder = os.read(descriptor, 4096).decode(errors="replace")
        raise ValueError(f"{path} is in use by {holder or 'another process'}") from None
    return True


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn an error of the system into a `StorageError` of one line."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, part: Any) -> None:
    left = memoryview(part)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(path: Path) -> None:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:  # some network file systems have none
                raise
