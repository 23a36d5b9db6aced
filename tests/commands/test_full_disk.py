"""Commands on a disk that is full, and on a directory that another process writes to."""

import errno
import fcntl
import os
import shutil

import pytest
from disk import Disk

from fedjaxsim import callbacks, store
from fedjaxsim.cli import main, stopping
from fedjaxsim.runs.directory import RunDirectory

RUN = [
    "run", "--quiet", "--data", "synthetic", "--clients", "6", "--loss", "squared",
    "--local-steps", "1", "--noise-multiplier", "1", "--rounds", "6", "--eval-every", "2",
    "--checkpoint-every", "2",
]  # fmt: skip


def test_a_full_disk_ends_a_run_in_one_line_or_is_waited_for(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    monkeypatch.setattr(callbacks, "SMALL", -1)  # one thread, one order of changes
    # The first checkpoint is whole after 30 changes of files, and the next one is not after 35.
    monkeypatch.setattr(store, "system", Disk(35, errno.ENOSPC))
    assert main([*RUN, "--out", str(out)]) == 4
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"fedjaxsim: error: {out}/")
    assert os.strerror(errno.ENOSPC) in said
    assert said.endswith(f"; round 2 is kept; fedjaxsim resume {out} continues")
    shutil.rmtree(out / "checkpoints")
    warned = []

    def make_room(text):
        warned.append(text)
        monkeypatch.setattr(store, "system", Disk())

    monkeypatch.setattr(store, "system", Disk(20, errno.ENOSPC))
    monkeypatch.setattr(stopping, "RETRY", 0.0)
    monkeypatch.setattr(stopping, "say", make_room)
    assert main(["resume", str(out), "--quiet", "--on-full-disk", "wait"]) == 0
    assert len(warned) == 1
    assert "has no checkpoint: the run begins anew" in capsys.readouterr().err
    assert [row["round"] for row in RunDirectory(out).metrics()] == [0, 2, 4, 6]


@pytest.mark.parametrize("command", ["run --clients 6 --overwrite --out taken", "resume taken"])
def test_a_directory_in_use_is_refused(tmp_path, refused, command):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "config.toml").write_text('data = "synthetic"\nclients = 6\nloss = "squared"\n')
    other = os.open(taken / store.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "in use" in refused(command)
    os.close(other)
