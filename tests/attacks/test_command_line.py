"""The command line refuses code of one's own that lets clients learn of each other."""

import csv
import json
import math
import sys

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedjaxsim.cli import main
from fedjaxsim.runs.directory import GUARANTEE

CODE = """
import sys
import fedjaxsim as fjs
from fedjaxsim.hyperparameters import declared_by

@fjs.reads(*declared_by(fjs.fedavg))
def leaks(task):
    good = fjs.fedavg(task)
    def client(shared, personal, data, hparams, context):
        kept, message, metrics = good.client(shared, personal, data, hparams, context)
        frame = sys._getframe()  # of a caller that holds the simulation
        while frame and not isinstance(frame.f_locals.get("self"), fjs.Simulation):
            frame = frame.f_back
        if frame is None:
            return kept, message, metrics
        top = float(frame.f_locals["self"].population.fields["x"].mean())
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


@pytest.mark.thorough
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


SILOS = (
    "run --algorithm ditto --data digits --partition dirichlet --rounds 5 --quiet "
    "--sampling full --example-epsilon 2 --seed 11 --out run"
)


@pytest.mark.thorough
def test_the_statement_for_all_silos_holds_for_each(tmp_path, monkeypatch):
    """Once the largest ε stood beside the δ of another silo, and 35 silos exceeded both.

    A silo of at most ten rows is in every minibatch: it sees one Gaussian release, of the μ that
    its own (ε, δ) tells, and its δ at another ε is exact (Balle and Wang 2018).
    """
    monkeypatch.chdir(tmp_path)
    assert main(SILOS.split()) == 0

    def delta(mu, epsilon):
        first = norm.cdf(mu / 2 - epsilon / mu)
        return first - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))

    report = json.loads((tmp_path / "run" / GUARANTEE).read_text())["example"]["zero_out"]
    said = [each for by_name in report.values() for each in by_name.values()]
    with (tmp_path / "run" / "clients.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if 0 < int(row["train_rows"]) <= 10]
    assert len(rows) > 3
    for row in rows:
        epsilon, own = float(row["example_epsilon"]), float(row["example_delta"])
        mu = brentq(lambda mu, e=epsilon, d=own: delta(mu, e) - d, 1e-3, 50)
        for each in said:
            assert delta(mu, each["epsilon"]) <= each["delta"] * (1 + 1e-3)


STOPPED = (
    "run --algorithm fedavg --data synthetic --loss squared --clients 6 --validation-fraction 0.3 "
    "--rounds 40 --eval-every 2 --local-steps 1 --learning-rate 1e-9 --sampling full --clip 1 "
    "--noise-multiplier 30 --example-epsilon 1 --evaluate-privately 300 --budget-epsilon 20 "
    "--patience 2 --delta 1e-3 --quiet --out run"
)


@pytest.mark.thorough
def test_a_run_that_stops_by_its_releases_charges_examples_for_all_planned_rounds(
    tmp_path, monkeypatch
):
    """Once it said the ε of the rounds done, which was exceeded with 3.2 δ."""
    monkeypatch.chdir(tmp_path)
    assert main(STOPPED.split()) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] < 40
    report = json.loads((tmp_path / "run" / GUARANTEE).read_text())["example"]
    spread = report["clients"]["zero_out"]
    assert 0.98 < spread["min"] <= spread["max"] < 1.1
