"""Too little memory is one line, and so is a signal."""

import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import HANGS
from support.several import start

from fedjaxsim.cli import main, program

RUN = ["run", "--data", "synthetic", "--loss", "squared", "--clients", "6", "--local-steps", "1"]


@pytest.mark.parametrize("allocate", [np.ones, jax.jit(jnp.ones, static_argnums=0)])
def test_too_little_memory_is_one_line_with_the_size(monkeypatch, capsys, allocate):
    command = types.SimpleNamespace(arguments={}, prepare=lambda: lambda: allocate(10**17))
    monkeypatch.setattr(program, "parse", lambda *_: command)
    assert main(["run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedjaxsim: error: out of memory at ")
    assert "B for an array" in error or "bytes" in error
    assert error.count("\n") == 1


@pytest.mark.thorough
def test_a_signal_while_a_run_is_prepared_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    with start("-m", "fedjaxsim", *RUN, "--quiet", "--algorithm", "mine:late") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == 130
    assert errors == "fedjaxsim: ended by Ctrl-C\n"
