"""Protected examples on the command line."""

import csv
import json
import sys

import pytest

from fedjaxsim.cli import main

SMALL = (
    "run --data synthetic --loss squared --clients 4 --rounds 2 --eval-every 2 --local-steps 2 "
    "--batch-size 4 --sampling full"
)


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
