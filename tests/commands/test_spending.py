"""Budgets, released evaluations and private selection, from flags to files."""

import json
import math

import jax
import numpy as np
import pytest

from fedjaxsim.cli import main
from fedjaxsim.privacy import selection
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.entries import Drawn, Entry, SamplingScheme, drawn_twice
from fedjaxsim.privacy.events import GAUSSIAN, Gaussian, PrivacySpend
from fedjaxsim.runs.build import draws_of

DATA = [
    "--data",
    "synthetic",
    "--loss",
    "squared",
    "--clients",
    "6",
    "--validation-fraction",
    "0.3",
]
RUN = [
    *DATA, "--algorithm", "fedavg", "--rounds", "30", "--eval-every", "2", "--local-steps", "1",
    "--learning-rate", "0.01", "--sampling", "full", "--noise-multiplier", "4", "--delta", "1e-3",
    "--quiet",
]  # fmt: skip


def files(folder, *names):
    return [json.loads((folder / f"{name}.json").read_text()) for name in names]


@pytest.fixture(scope="module")
def budgeted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget") / "run"
    flags = ["--budget-epsilon", "4", "--evaluate-privately", "3", "--patience", "50"]
    assert main(["run", *RUN, *flags, "--out", str(folder)]) == 0
    return folder


@pytest.mark.thorough
def test_a_run_ends_with_its_budget_and_says_so(budgeted):
    summary, guarantee = files(budgeted, "summary", "guarantee")
    assert 0 < summary["rounds"] < 30
    assert (summary["budget_spent"], summary["interrupted"]) == (True, False)
    # Rounds at z = 4 and evaluations at z = 3, of which there may be two more than every other.
    T = summary["rounds"]
    mu = [math.sqrt(n / 4**2 + (n // 2 + 2) / 3**2) for n in (T, T + 1)]
    assert gaussian.epsilon(1e-3, mu[0]) <= 4.0 < gaussian.epsilon(1e-3, mu[1])
    found = guarantee["zero_out"]["joint_dp"]["gaussian"]
    assert found["epsilon"] == summary["epsilon"] == gaussian.epsilon(1e-3, mu[0])
    text = " ".join(found["assumptions"])
    assert f"allows {T} gaussian releases" in text
    assert "followed from these releases alone" in text
    assert "without noise" not in text
    rows = [json.loads(line) for line in (budgeted / "metrics.jsonl").read_text().splitlines()]
    assert all("private_loss" in row for row in rows[:-1])
    spent = [row["epsilon"] for row in rows]
    assert spent == sorted(spent)
    assert spent[-1] <= 4.0


@pytest.mark.thorough
def test_resumes_and_stages_keep_the_budget(budgeted, refused):
    assert "spent its budget" in refused(f"resume {budgeted}")
    assert "no room" in refused(f"run --from {budgeted} --out next")
    assert "before the first release" in refused(f"run --from {budgeted} --budget-epsilon 8")


def test_unsound_uses_are_refused(refused):
    run = " ".join(["run", *RUN])
    assert "budget-epsilon" in refused(f"{run} --patience 2 --evaluate-privately 3")
    little_noise = run.replace("--noise-multiplier 4", "--noise-multiplier 0.1")
    assert "no room" in refused(f"{little_noise} --budget-epsilon 1.5")


def test_the_best_of_a_random_number_of_runs_has_the_price_of_the_whole(tmp_path, capsys, refused):
    file, out = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text(
        'data = "synthetic"\nloss = "squared"\nclients = 6\nvalidation-fraction = 0.3\n'
        'algorithm = "fedavg"\nrounds = 3\nlocal-steps = 1\nsampling = "full"\ndelta = 1e-3\n'
        "noise-multiplier = 4\n[sweep]\nlearning-rate = [2e38, 3e38]\n"  # diverge
    )
    command = ["sweep", str(file), "--out", str(out), "--quiet"]
    assert "score-noise" in refused(" ".join([*command, "--select-privately", "geometric:2"]))
    assert "score-largest" in refused(" ".join([*command, "--score-largest", "2"]))
    privately = [*command, "--select-privately", "geometric:2", "--score-noise", "3"]
    several = file.read_text()
    file.write_text(several.replace("clients = 6\n", "") + "clients = [6, 7]\n")
    assert "number of clients" in refused(" ".join(privately))
    file.write_text(several)
    capsys.readouterr()
    assert main(privately) == 0
    said = "".join(capsys.readouterr())
    assert said.startswith("number_of_runs geometric:2"), (
        "a line or a warning of a run would count the runs"
    )
    guarantee, selected = files(out, "guarantee", "selection")
    one = [
        PrivacySpend(SamplingScheme("full", 6, 6), GAUSSIAN, (Entry(4.0, 1.0, 3),)),
        PrivacySpend(SamplingScheme("full", 6, 6), Gaussian(), (Entry(3.0, 1.0, 1),)),
    ]
    price = selection.epsilon(selection.parse("geometric:2"), [one], 1e-3)
    assert guarantee["zero_out"]["joint_dp"]["rdp_selection"]["epsilon"] == pytest.approx(price)
    assert selected["settings"]["learning_rate"] in (2e38, 3e38)
    assert np.isfinite(selected["private_loss"])
    assert len(np.load(out / "model.npz").files) > 0
    assert "ε ≤" in said
    drawn = [Drawn(**each) for each in guarantee["draws"]]
    of_a_run = draws_of(jax.random.key(0, impl="threefry2x32"), 3)
    assert "drew" in drawn_twice({"one": drawn, "other of its seed": drawn})
    assert not drawn_twice({"selection": drawn, "run of its seed": [of_a_run]})
    assert [each.rounds for each in drawn] == [1], "more would count the runs"


@pytest.mark.thorough
def test_candidates_of_a_private_selection_have_the_same_clients(tmp_path, refused):
    """Rows of a client were spread over the clients of another candidate, at ε 0.29."""
    (tmp_path / "sweep.toml").write_text(
        'data = "digits"\nclients = 8\nvalidation-fraction = 0.3\nalgorithm = "fedavg"\n'
        "rounds = 1\nnoise-multiplier = 4\n[sweep]\npartition-seed = [0, 1]\n"
    )
    privately = "--select-privately geometric:2 --score-noise 3"
    assert "candidates must have one partition" in refused(
        f"sweep {tmp_path / 'sweep.toml'} --out {tmp_path / 'out'} {privately}"
    )
