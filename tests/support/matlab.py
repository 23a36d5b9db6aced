"""MATLAB files that are read without the process that reads any file for users."""

import contextlib
import io
from subprocess import CompletedProcess
from types import SimpleNamespace

from fedjaxsim.data.tables import matlab_cells


def read_here(monkeypatch) -> None:
    """Read whole files in this process: another one imports scipy, for half a second."""

    def run(command, **_):
        content = io.BytesIO()
        out = io.TextIOWrapper(content)
        with contextlib.redirect_stdout(out):
            matlab_cells._write_cells(command[-1])
        return CompletedProcess(command, 0, content.getvalue(), b"")

    monkeypatch.setattr(matlab_cells, "subprocess", SimpleNamespace(run=run))
