"""Processes that compute one run together, started by tests."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from fedjaxsim.engine.processes import THREADS

PROGRAM = """
import sys
from support import compiling
from fedjaxsim.cli import main
compiling.quicken()
sys.exit(main(sys.argv[1:]))
"""
"""The program, which compiles as tests do."""
_OF_SEVERAL = f"from fedjaxsim.engine import processes\nprocesses._HEARTBEAT = 20{PROGRAM}"
"""A stopped process is lost sooner than for users, for whom busy machines are worse."""


def free_port() -> int:
    """Return a free port that no system hands out by itself (Linux from 32,768, others higher)."""
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process on a CPU, which finds what tests import.

    Threads that a command asked for in this process, an earlier test's, aren't the new one's.
    """
    inherited = {name: value for name, value in os.environ.items() if name != THREADS}
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    of_python = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return inherited | {"JAX_PLATFORMS": "cpu"} | of_python | variables


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a Python process in such an environment."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )


def start_commands(*commands: list[str]) -> list[subprocess.Popen[str]]:
    """Starts as many processes of one run, on a device each, with these command lines."""
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(len(commands))]
    return [
        start("-c", _OF_SEVERAL, *command, "--devices", "1", *where, "--process", str(index))
        for index, command in enumerate(commands)
    ]


def start_as_slurm(*commands: list[str]) -> list[subprocess.Popen[str]]:
    """The same, told by the environment that srun makes."""
    # JAX makes a port of the job's number.
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost"}
    job |= {"SLURM_NTASKS": str(len(commands))}
    return [
        start(
            "-c", _OF_SEVERAL, *command, "--devices", "1", "--cluster",
            **job, SLURM_PROCID=str(index), SLURM_LOCALID=str(index),
        )
        for index, command in enumerate(commands)
    ]  # fmt: skip
