"""Commands on a disk that is full, and on a directory that another process writes to."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from fedjaxsim import store
from fedjaxsim.cli import main
from fedjaxsim.runs.directory import RunDirectory

RUN = [
    "run", "--quiet", "--data", "synthetic", "--clients", "6", "--loss", "squared",
    "--local-steps", "1", "--noise-multiplier", "1", "--rounds", "6", "--eval-every", "2",
    "--checkpoint-every", "2",
]  # fmt: skip


@pytest.mark.thorough
def test_a_full_disk_ends_a_run_in_one_line_and_it_goes_on_when_there_is_space(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "run"

    def replace(source, target, moved=os.replace):
        if Path(target).name == "4.state":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        moved(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "replace", replace)
        assert main([*RUN, "--out", str(out)]) == 4
    said = capsys.readouterr().err.splitlines()[-1]
    file = out / "checkpoints" / "4.state"
    why = f"{file} cannot be written: {os.strerror(errno.ENOSPC)}"
    after = f"round 2 is kept; fedjaxsim resume {out} continues"
    assert said == f"fedjaxsim: error: {why}; {after}"
    assert main(["resume", str(out), "--quiet"]) == 0
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
