"""The file layer: whole or absent, one line of an error, one writer."""

import errno
import fcntl
import itertools
import os
import subprocess
import sys

import pytest
from support.disk import Disk, KilledError

from fedjaxsim import store
from fedjaxsim.store import StorageError


def faults(monkeypatch, error, change):
    """Do `change` on disks whose n-th operation fails, until one is not reached; yield each n."""
    for n in itertools.count():
        monkeypatch.setattr(store, "os", Disk(n, error))
        try:
            change()
        except (StorageError, KilledError):
            yield n
        else:
            assert n >= 2
            return


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, KilledError])
def test_a_write_that_fails_leaves_the_old_content_or_the_new(tmp_path, monkeypatch, error):
    file = tmp_path / "file"
    file.write_bytes(b"old")
    for _ in faults(monkeypatch, error, lambda: store.write(file, b"new")):
        assert file.read_bytes() in (b"old", b"new")
        left = [path for path in tmp_path.iterdir() if path != file]
        assert error is KilledError or not left
    assert file.read_bytes() == b"new"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch, error):
    file = tmp_path / "file"
    file.write_bytes(b"one\n")
    for _ in faults(monkeypatch, error, lambda: store.append(file, b"two\n")):
        assert file.read_bytes() == b"one\n"
    assert store.whole_lines(file) == [b"one", b"two"]


def test_a_line_that_was_cut_is_dropped(tmp_path):
    (tmp_path / "file").write_bytes(b"one\ntw")
    assert store.whole_lines(tmp_path / "file") == [b"one"]


def test_after_a_power_cut_a_file_is_old_or_new_and_what_was_reported_is_there(
    tmp_path, monkeypatch
):
    for n in itertools.count():
        root, disk = tmp_path / f"{n}", Disk(n)
        root.mkdir()
        monkeypatch.setattr(store, "os", disk)
        reported = b""
        try:
            for content in (b"one\n", b"two\n"):
                store.write(root / "file", content)
                reported = content
            store.append(root / "file", b"three\n")
            store.sync(root / "file")
            reported = b"two\nthree\n"
        except KilledError:
            pass
        disk.cut(root, after := tmp_path / f"after{n}")
        left = (after / "file").read_bytes() if (after / "file").exists() else b""
        assert left.startswith(reported) or (reported, left) == (b"one\n", b"two\n")
        if reported == b"two\nthree\n":
            return


def test_an_error_names_file_and_cause_in_one_line(tmp_path):
    file = tmp_path / "absent" / "file"
    with pytest.raises(StorageError) as error:
        store.write(file, b"")
    assert str(error.value) == f"{file} cannot be written: No such file or directory"


def test_a_folder_has_one_writer_until_it_releases_it(tmp_path):
    other = os.open(tmp_path / store.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    os.write(other, b"process 7 on there since noon")
    with pytest.raises(ValueError, match="process 7 on there since noon"):
        store.lock_folder(tmp_path)
    for held in (tmp_path, tmp_path.parent):
        with pytest.raises(ValueError, match=f"{tmp_path} is in use by process 7"):
            store.check_free(held)
    os.close(other)  # as at the end of a process
    (tmp_path / f".metrics.{'0' * 32}").touch()
    store.check_free(tmp_path)
    store.lock_folder(tmp_path)
    store.lock_folder(tmp_path)
    store.check_free(tmp_path)  # this process's own
    assert [path.name for path in tmp_path.iterdir()] == [store.LOCK]
    store.unlock_folders()
    assert list(tmp_path.iterdir()) == []


def test_of_processes_that_start_on_one_new_folder_one_wins(tmp_path):
    script = f"""
import sys
from pathlib import Path
from fedjaxsim import store
try:
    store.lock_folder(Path({str(tmp_path / "new")!r}))
    print("wins", flush=True)
except ValueError as error:
    print("loses" if "in use by" in str(error) else error, flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True)
        for _ in range(4)
    ]
    said = [process.stdout.readline().strip() for process in started if process.stdout]
    for process in started:
        process.kill()
        process.communicate()
    assert sorted(said) == ["loses", "loses", "loses", "wins"]
    store.lock_folder(tmp_path / "new")  # the lock of a killed process is free
    store.unlock_folders()
