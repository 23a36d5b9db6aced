"""A disk that fails, and that forgets at a power cut what was not synced."""

import errno
import os
from pathlib import Path


class KilledError(BaseException):
    """The process ends here."""


class Disk:
    """The module `os` with its changes of files counted; one of them may fail.

    Put it in the place of `store.os`.

    Args:
      fails: number of the change that fails, from 0; None for none.
      error: raised then: `KilledError`, after which no change succeeds, or a number of `errno`,
        after which a full disk stays full.
    """

    def __init__(self, fails: int | None = None, error: type[BaseException] | int = KilledError):
        self.arm(fails, error)
        self._open: dict[int, tuple[Path, int]] = {}
        self._files, self._durable = dict[Path, int](), dict[Path, int]()
        self._contents = dict[int, bytes]()
        self._folders = set[Path]()

    def __getattr__(self, name):
        return getattr(os, name)

    def arm(self, fails: int | None, error: type[BaseException] | int = KilledError) -> None:
        """Count anew, as another process does."""
        self.count, self._fails, self._error, self._failed = 0, fails, error, False

    def _step(self, *, grows: bool = False) -> None:
        number, self.count = self.count, self.count + 1
        again = self._error is KilledError or (self._error == errno.ENOSPC and grows)
        if number == self._fails or (self._failed and again):
            self._failed = True
            if isinstance(self._error, int):
                raise OSError(self._error, os.strerror(self._error))
            raise self._error

    def open(self, path, flags, mode=0o666):
        self._step(grows=bool(flags & os.O_CREAT))
        descriptor = os.open(path, flags, mode)
        path = Path(path)
        if path.is_file() and path not in self._files:
            self._files[path] = max([-1, *self._contents, *self._files.values()]) + 1
        self._open[descriptor] = path, self._files.get(path, -1)
        return descriptor

    def write(self, descriptor, content):
        try:
            self._step(grows=True)
        except BaseException:
            os.write(descriptor, content[: len(content) // 2])
            raise
        return os.write(descriptor, content)

    def fsync(self, descriptor):
        self._step()
        path, number = self._open[descriptor]
        if number >= 0:
            self._contents[number] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            return
        for known in (*self._durable, *self._files):
            if known.parent == path:
                self._durable.pop(known, None)
                if known in self._files:
                    self._durable[known] = self._files[known]
        self._folders.add(path)

    def ftruncate(self, descriptor, size):
        self._step()
        os.ftruncate(descriptor, size)

    def replace(self, old, new):
        self._step()
        os.replace(old, new)
        self._files[Path(new)] = self._files.pop(Path(old))

    def unlink(self, path):
        self._step()
        os.unlink(path)
        self._files.pop(Path(path), None)

    def mkdir(self, path):
        self._step(grows=True)
        os.mkdir(path)

    def keep(self, root: Path) -> None:
        """Take the files below `root` for synced ones."""
        for number, path in enumerate(each for each in root.rglob("*") if each.is_file()):
            self._files[path] = self._durable[path] = number
            self._contents[number] = path.read_bytes()

    def cut(self, root: Path, after: Path) -> None:
        """Copy to `after` what a power cut leaves of `root`, with half of each unsynced end."""
        after.mkdir()
        for path, number in self._durable.items():
            content = self._contents.get(number, b"")
            # A folder that was removed as a whole, unsynced, may be there again.
            same = self._files.get(path) == number and path.exists()
            now = path.read_bytes() if same else content
            if now.startswith(content):
                content = now[: (len(content) + len(now)) // 2]
            copy = after / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
