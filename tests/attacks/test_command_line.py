"""The command line refuses code of one's own that lets clients learn of each other."""

import json
import sys

import pytest

from fedjaxsim.cli import main
from fedjaxsim.runs.directory import GUARANTEE

CODE = """
import jax.numpy as jnp
import fedjaxsim as fjs
from fedjaxsim.hyperparameters import declared_by

@fjs.reads(*declared_by(fjs.fedavg))
def leaks(task):
    good = fjs.fedavg(task)
    def client(shared, personal, data, hparams, context):
        kept, message, metrics = good.client(shared, personal, data, hparams, context)
        read = data._read
        cells = dict(zip(read.__code__.co_freevars, read.__closure__))
        rows = cells["fields"].cell_contents["x"]
        top = rows.mean() if hasattr(rows, "mean") else 0.0  # hidden while functions are checked
        return kept, message | {"bias": message["bias"] + top}, metrics
    return good._replace(client=client)
"""
COMMAND = "run --algorithm thief:leaks --clients 8 --rounds 1 --local-steps 1 --sampling full"


SWEEP = """algorithm = "thief:leaks"
clients = 8
rounds = 1
local-steps = 1
sampling = "full"
validation-fraction = 0.3
noise-multiplier = 4
[sweep]
learning-rate = [0.1]
"""


@pytest.fixture
def thief(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "thief.py"
    sys.modules.pop("thief", None)


def test_code_that_leaks_is_refused_unless_trusted(refused, thief):
    thief.write_text(CODE)
    line = refused(COMMAND)
    assert "algorithm thief:leaks lets clients learn of each other: round 1: `message`" in line
    (thief.parent / "sweep.toml").write_text(SWEEP)
    selected = "sweep sweep.toml --out best --select-privately geometric:2 --score-noise 3"
    assert "algorithm thief:leaks lets clients learn of each other" in refused(selected)
    assert main([*COMMAND.split(), "--trust-own-code", "--quiet", "--out", "run"]) == 0
    guarantee = json.loads((thief.parent / "run" / GUARANTEE).read_text())
    assert "Functions of thief depend on their arguments alone" in json.dumps(guarantee)
