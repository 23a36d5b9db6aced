"""`fedjaxsim plan`."""

import json

import pytest

from fedjaxsim.cli import main

SHAPES = "--features 32 --clients 1000 --rows-per-client 4"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{SHAPES} --classes 3 --devices 0 --device-memory 80", "devices"),
        (f"{SHAPES} --classes 3 --devices 4 --device-memory -1", "device-memory"),
        (f"{SHAPES} --classes 3 --device-memory 80", "--devices"),
        (f"{SHAPES} --classes 3 --host-memory 80", "host-memory"),
        (f"{SHAPES} --classes 3 --out runs/plan", "out"),
        (f"{SHAPES} --classes 3 --data synthetic", "data"),
        (f"{SHAPES} --classes 3 --alpha 1", "alpha"),
        (f"{SHAPES} --classes 3 --sampling-rate 2", "sampling-rate"),
        (f"{SHAPES} --classes 3 --model gru", "gru"),
        (SHAPES, "classes"),
        ("--features 32 --clients 1000", "rows-per-client"),
        ("--features 0 --clients 10 --rows-per-client 3", "features"),
        ("--features 3 --clients 10 --rows-per-client 1 --classes 3", "rows"),
        ("--features 3 --clients 3000000000 --rows-per-client 2", "clients"),
        ("--features 3 --clients 1000000000 --rows-per-client 3 --classes 3", "int32"),
        ("--rows-per-client 3", "rows-per-client"),
        ("--mu 1", "mu"),
        ("--epsilon 1 --clip inf", "clip"),
        ("--epsilon 1 --accountant clt", "accountant"),
        (f"{SHAPES} --classes 3 --epsilon 1 --accountant clt", "accountant"),
        (f"{SHAPES} --classes 3 --sampling-rate 1e-6", "sampling-rate"),
        ("--data npz:absent.npz", "absent.npz"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(refused, flags, words):
    assert words in refused(f"plan {flags}")


@pytest.mark.thorough
def test_accelerators_are_planned_beside_this_machine(capsys):
    flags = f"{SHAPES} --classes 3 --sampling-rate 0.1 --devices 4 --device-memory 80"
    assert main(["plan", *flags.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    here, there = found["this machine"], found["4 accelerators of 80 GB"]
    names = ["in memory", "over 4 devices", "mapped", "streamed"]
    assert [each["name"] for each in there["placements"]] == names
    assert all(each["fits"] for each in there["placements"])
    assert [each["device"] for each in here["placements"]] == [None] * len(here["placements"])
    assert there["placements"][1]["device"]["states"] == 1000 // 4 * 4 * 33 * 3


@pytest.mark.thorough
def test_what_fits_nowhere_is_said_to_come_nearest_somewhere(capsys):
    flags = f"{SHAPES} --classes 3 --sampling-rate 0.1 --devices 4 --device-memory 1e-6"
    assert main(["plan", *flags.split(), "--host-memory", "1e-6"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "nothing fits" in line]
    assert len(lines) == 1
    assert "comes nearest, needs" in lines[0]
    assert "which has 1 kB;" in lines[0]


def test_data_that_do_not_suit_the_loss_are_refused(refused):
    assert "labels" in refused("plan --data synthetic --clients 4")
