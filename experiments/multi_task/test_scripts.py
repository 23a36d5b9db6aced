"""The scripts of experiments/multi_task from end to end, on a few clients and rounds."""

import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

import fedjaxsim as fjs

pytestmark = pytest.mark.thorough
SCRIPTS = Path(__file__).parent
CLIENTS = 4
SIZES = {
    "rate": 0.5,
    "epsilons": (2.0, math.inf),
    "rounds": 2,
    "points": 1,
    "seeds": 2,
    "tuning_seeds": 1,
    "every": None,
}


def read(folder, seed, validation):
    """A few writers, of images as large as FEMNIST's."""
    del folder
    rng = np.random.default_rng(seed)
    clients = [
        {"x": rng.random((10, 784), np.float32), "y": rng.integers(0, 10, 10)}
        for _ in range(CLIENTS)
    ]
    return fjs.data.split(
        fjs.Population.from_clients(clients), validation=validation, test=0.2, seed=seed
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a script on small problems, and gives the folder of its results and pictures."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        patch.chdir(folder)
        problems = importlib.import_module("data_sets").PROBLEMS
        small = dataclasses.replace(problems["femnist"], read=read, **SIZES)
        patch.setitem(problems, "femnist", small)

        def script(name, *arguments, **constants):
            module = importlib.import_module(name)
            for place in ("RESULTS", "PICTURES"):
                patch.setattr(module, place, folder, raising=False)
            for constant, value in constants.items():
                patch.setattr(module, constant, value)
            patch.setattr(sys, "argv", [name, "nowhere", *arguments])
            module.main()
            return folder

        yield script


@pytest.fixture(scope="module")
def compared(run):
    return run(
        "equal_privacy", "--problems", "femnist",
        "--methods", "pmtl", "pmtl-offset", "fedavg", "local",
        "--out", ".", "--picture", "equal-privacy.png",
    )  # fmt: skip


def result(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_naive_stands_beside_the_others_at_the_same_epsilon(run, compared, capsys):
    folder = run("naive", EPSILONS={"femnist": (2.0,)})
    levels = result(folder, "naive")["femnist"]["levels"]
    assert [one["epsilon"] for one in levels] == [2.0]
    head, _, *rows = capsys.readouterr().out.strip().split("\n\n")[1].splitlines()
    assert all(title in head for title in ("naive DP", "PMTL update", "FedAvg", "Local"))
    assert len(rows) == 1
    assert (folder / "pmtl-1.png").exists()


def test_all_systems_have_their_noise_for_both_adjacencies(run, monkeypatch, capsys):
    module = importlib.import_module("all_systems")
    rng = np.random.default_rng(0)

    def schools(folder, seed, validation):
        rows = [{"x": rng.random((10, 3)), "y": rng.random(10)} for _ in range(CLIENTS)]
        return fjs.data.split(fjs.Population.from_clients(rows), validation=validation, test=0.3)

    small = {**SIZES, "rate": 1.0, "read": schools}
    school = dataclasses.replace(module.PROBLEMS["school"], **small)
    monkeypatch.setitem(module.PROBLEMS, "school", school)
    names = ("local", "pmtl", "mpmtl-low-rank")
    monkeypatch.setitem(module.STUDIES, "school", (names, (1.0,), 1))
    folder = run("all_systems", "school", POINTS=2, SEEDS=2)
    methods = result(folder, "all-systems-school")["methods"]
    assert list(methods["local"]) == ["∞"]
    for name, sensitivity in (("pmtl", 2), ("mpmtl-low-rank", math.sqrt(2))):
        zero_out, replace, none = (row["noise_multiplier"] for row in methods[name].values())
        assert replace == pytest.approx(sensitivity * zero_out, rel=2e-3)
        assert none == 0
        assert all(len(row["nmse"]) == len(row["mse"]) == 2 for row in methods[name].values())
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * (2 + len(names))


def test_dpfedmtl_fills_its_table(run, compared, capsys):
    module = importlib.import_module("dpfedmtl")
    small = dataclasses.replace(module.problem(), rate=0.5, rounds=4, points=1, every=2)
    folder = run("dpfedmtl", problem=lambda: small, CLIENTS=CLIENTS)
    head, _, *rows = capsys.readouterr().out.strip().split("\n\n")[-1].splitlines()
    assert len(rows) == 5
    assert head.count("|") == 8
    noised = result(folder, "dpfedmtl")["methods"]["dpfedmtl"]
    assert list(noised) == ["0.0", "0.11", "0.65", "2.42", "9.69"]
    assert [len(test["curve"]) for test in noised["9.69"]["test"]] == [2, 2]
    assert (folder / "dpfedmtl-4.png").exists()


def test_all_algorithms_have_a_row_and_their_bytes(run, capsys):
    names = ("local", "fedavg", "knn-per")
    sizes = {"points": 1, "seeds": 2, "tuning_seeds": 1, "epsilons": (2.0, math.inf), "rounds": 2}
    folder = run(
        "twenty", "--problems", "femnist", "--methods", *names,
        "--out", ".", "--picture", "twenty.png", SIZES=sizes, QUESTION=("femnist",),
    )  # fmt: skip
    found = result(folder, "twenty-femnist")
    assert set(found["methods"]) == set(names)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(names)
    model = 4 * (784 * 62 + 62)
    assert found["cost"]["fedavg"] == {"received": model, "sent": model}
    assert found["cost"]["local"] == {"received": 0, "sent": 0}


def test_fine_tuning_starts_where_the_first_stage_ended(run, compared):
    folder = run("finetuning", EPSILONS=(2.0, None), POINTS=2, EPOCHS=1)
    stages, before = (result(folder, name) for name in ("finetuning", "compare-femnist"))
    for system, levels in stages["stages"].items():
        for level, row in zip(levels, before["methods"][system], strict=True):
            first = [test["first"] for test in level["test"]]
            np.testing.assert_allclose(
                first, [test["test_accuracy"] for test in row["test"]], atol=1e-5
            )
