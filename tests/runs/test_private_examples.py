"""Protected examples on the command line."""

import contextlib
import csv
import json
import math
import re
import sys

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

import fedjaxsim as fjs
from fedjaxsim.cli import main
from fedjaxsim.data import save_npz
from fedjaxsim.privacy.entries import epsilon_text

SMALL = (
    "run --data synthetic --loss squared --clients 4 --rounds 2 --eval-every 2 --local-steps 2 "
    "--batch-size 4 --sampling full"
)


@pytest.mark.thorough
def test_each_client_has_its_epsilon_with_code_of_ones_own_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "mended.py").write_text(
        "import fedjaxsim as fjs\nfrom fedjaxsim.hyperparameters import declared_by\n"
        "@fjs.reads(*declared_by(fjs.fedavg))\ndef own(task):\n    return fjs.fedavg(task)\n"
    )
    out = tmp_path / "out"
    flags = ["--algorithm", "mended:own", "--example-epsilon", "3", "--out", str(out)]
    assert main([*SMALL.split(), *flags]) == 0
    printed = capsys.readouterr().out
    assert "one client, no guarantee: no noise was added; one example, zero_out: ε of" in printed
    assert "; replace: ε of clients" in printed
    assert "; δ ≤ 0.0" in printed
    with (out / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = json.loads((out / "guarantee.json").read_text())["example"]["clients"]["zero_out"]
    assert found["max"] == pytest.approx(max(float(row["example_epsilon"]) for row in rows))
    assert 2.9 < found["min"] <= found["max"] <= 3


@pytest.mark.thorough  # the law is that of attacks/test_examples.py; here it reaches the files
def test_the_epsilon_and_delta_of_a_report_hold_for_every_client(tmp_path, capsys):
    """Once the largest ε was reported beside the δ of its own client, and small silos exceeded it.

    Silos of at most b rows are in every minibatch, so their profile is that of one Gaussian.
    """

    def delta(mu, epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(
            epsilon + norm.logcdf(-mu / 2 - epsilon / mu)
        )

    rng, out = np.random.default_rng(0), tmp_path / "out"
    rows = [{"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n)} for n in (2, 3, 5, 50)]
    save_npz(tmp_path / "silos.npz", fjs.data.Population.from_clients(rows))
    flags = (
        "run --loss squared --rounds 2 --local-steps 2 --batch-size 4 --sampling full "
        "--algorithm ditto --example-epsilon 2"
    )
    assert main([*flags.split(), "--data", f"npz:{tmp_path / 'silos.npz'}", "--out", str(out)]) == 0
    example = json.loads((out / "guarantee.json").read_text())["example"]["zero_out"]
    reported = example["released_sequence"]["pld"]
    small = 0
    with (out / "clients.csv").open() as file:
        for row in csv.DictReader(file):
            if int(row["train_rows"]) <= 4:
                own, small = (float(row["example_epsilon"]), float(row["example_delta"])), small + 1
                mu = brentq(lambda mu, own=own: delta(mu, own[0]) - own[1], 1e-3, 50)
                assert delta(mu, reported["epsilon"]) <= reported["delta"] * (1 + 1e-6)
    assert small == 3
    summary = json.loads((out / "summary.json").read_text())
    assert summary["epsilon"] is None
    for name, adjacency in (
        ("example_epsilon", "zero_out"),
        ("example_epsilon_replace", "replace"),
    ):
        of_examples = json.loads((out / "guarantee.json").read_text())["example"][adjacency]
        assert summary[name] == of_examples["released_sequence"]["pld"]["epsilon"]
    table = capsys.readouterr().out
    assert "example ε" in table
    assert f" {epsilon_text(summary['example_epsilon'])} " in table


@pytest.mark.thorough
def test_tables_of_sweeps_have_the_epsilon_of_examples_and_name_runs_without(tmp_path, capsys):
    """Clients with b rows or fewer take all in each minibatch: releases of a Gaussian."""
    rng = np.random.default_rng(0)
    rows = [{"x": rng.normal(size=(4, 3)), "y": rng.normal(size=4)} for _ in range(3)]
    save_npz(tmp_path / "silos.npz", fjs.data.Population.from_clients(rows))
    (tmp_path / "sweep.toml").write_text(
        'data = "npz:silos.npz"\nloss = "squared"\nrounds = 2\neval-every = 2\n'
        'local-steps = 2\nbatch-size = 4\nsampling = "full"\n'
        '[[sweep]]\nalgorithm = ["fedavg"]\nexample-noise-multiplier = [2.0, 4.0]\n'
        '[[sweep]]\nalgorithm = ["stl"]\n'
    )
    out = tmp_path / "out"
    with contextlib.chdir(tmp_path):
        assert main(["sweep", "sweep.toml", "--out", str(out)]) == 0
    sweep = capsys.readouterr().out
    assert main(["compare", str(out)]) == 0
    runs = capsys.readouterr().out
    compared = fjs.compare([out])
    for row, z in ((0, 2.0), (1, 4.0)):
        epsilon, delta = compared[["example_epsilon", "example_delta"]].to_numpy()[row]
        assert delta == pytest.approx(1 / 30)  # of three training rows
        mu = math.sqrt(4) / z  # two rounds of two steps
        exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )
        assert exact == pytest.approx(delta, rel=1e-2)
        for table in (sweep, runs):
            assert re.search(rf"{re.escape(epsilon_text(epsilon))} .* 0\.033334\b", table)
    assert np.isnan(compared["example_epsilon"].to_numpy()[2])
    assert "– among example ε: no single example" in sweep
    assert "– among example ε: no single example" in runs


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--example-clip 2", "example-epsilon"),
        ("--example-epsilon 1 --example-noise-multiplier 1", "exclude"),
        ("--algorithm qffl --example-epsilon 1", "examples cannot be private"),
        ("--algorithm stl --example-epsilon 1", "has no effect"),
    ],
)
def test_what_protects_nothing_is_refused(refused, flags, said):
    assert said in refused(f"{SMALL} {flags}")
