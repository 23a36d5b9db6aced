"""A run of many clients that is killed at a random moment of its life ends as if nobody had.

`benchmarks/reliability.py kills` does so for a million clients, sweeps, tunings and processes.
"""

import random
import shutil
import subprocess
import time

import pytest
from support.several import PROGRAM, start

from fedjaxsim.runs.directory import CLIENTS, CONFIG, GUARANTEE, METRICS, RunDirectory

RUN = [
    "run", "--quiet", "--data", "random", "--clients", "20000", "--rows", "2", "--shape", "4",
    "--labels", "2", "--test-fraction", "0.5", "--epsilon", "3",
    "--sampling-rate", "0.005", "--local-steps", "1", "--rounds", "40", "--eval-every", "10",
]  # fmt: skip
OFTEN = ["--checkpoint-every", "10"]


def process(out):
    begins = [*RUN, "--out", str(out)]
    command = ["resume", "--quiet", str(out)] if (out / CONFIG).exists() else begins
    return start("-c", PROGRAM, *command, *OFTEN)


def finish(running):
    _, errors = running.communicate()
    assert running.returncode == 0, errors


def content(out):
    state = RunDirectory(out).checkpoints().last()
    assert state is not None
    return [
        state.file.read_bytes(),
        *((out / n).read_bytes() for n in (METRICS, GUARANTEE, CLIENTS)),
    ]


@pytest.mark.thorough
def test_a_killed_run_of_many_clients_resumes_byte_for_byte(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    begin = time.monotonic()
    finish(process(whole))
    length, chance = time.monotonic() - begin, random.Random(0)
    while True:
        running = process(killed)
        try:
            _, errors = running.communicate(timeout=chance.uniform(0, length))
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            break
        assert running.returncode == 0, errors
        # The machine is faster than it was: again, and earlier.
        shutil.rmtree(killed)
        length /= 2
    if not RunDirectory(killed).is_finished():
        finish(process(killed))
    assert content(killed) == content(whole)
