"""A mechanism of one's own that announces other noise than its hyperparameter: what is written."""

import json
import math
import sys

import pytest

from fedjaxsim.cli import main
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.runs import execute
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings_files import read_toml

CODE = """
import jax.numpy as jnp
import fedjaxsim as fjs
from fedjaxsim.privacy.mechanisms import CLIP_NORM, NOISE_MULTIPLIER

@fjs.reads(CLIP_NORM, NOISE_MULTIPLIER)
def halved():
    "Noise of z/2, as it says."
    base = fjs.gaussian()
    def release(accumulator, denominator, key, state, hparams, round_):
        z = hparams.noise_multiplier / 2
        return base.release(
            accumulator, denominator, key, state, hparams.replace(noise_multiplier=z), round_
        )
    return base._replace(release=release)

@fjs.reads(CLIP_NORM, NOISE_MULTIPLIER)
def warm():
    "No noise in the first round."
    base = fjs.gaussian()
    def release(accumulator, denominator, key, state, hparams, round_):
        z = jnp.where(round_ == 0, 0.0, hparams.noise_multiplier)
        return base.release(
            accumulator, denominator, key, state, hparams.replace(noise_multiplier=z), round_
        )
    return base._replace(release=release)
"""
SETTINGS = """data = "synthetic"
loss = "squared"
clients = 6
rounds = 4
algorithm = "fedavg"
mechanism = "announced:{}"
local-steps = 1
sampling = "full"
noise-multiplier = 4.0
validation-fraction = 0.3
delta = 1e-3
[sweep]
learning-rate = [0.01, 0.1]
"""
EXACT = gaussian.epsilon(1e-3, math.sqrt(4) / 2)
"""ε of four rounds at z = 2."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "announced.py").write_text(CODE)
    for name in ("halved", "warm"):
        (tmp_path / f"{name}.toml").write_text(SETTINGS.format(name))
    yield tmp_path
    sys.modules.pop("announced", None)


def epsilon_in(path):
    content = json.loads(path.read_text())
    (found,) = content["zero_out"]["joint_dp"].values()
    return found["epsilon"]


@pytest.mark.thorough
def test_a_sweep_reports_the_ledgers_of_its_runs(folder):
    assert main(["sweep", "halved.toml", "--out", "swept", "--quiet"]) == 0
    content = json.loads((folder / "swept" / "report.json").read_text())
    for each in content["guarantees"]:
        (found,) = each["guarantee"]["zero_out"]["joint_dp"].values()
        assert found["epsilon"] == pytest.approx(EXACT, rel=1e-6)
    runs = json.loads((folder / "swept" / "ledgers.json").read_text())["runs"]
    assert [spends[0][1]["entries"] for spends in runs.values()] == [[[2.0, 1.0, 4]]] * 2
    (folder / "swept" / "ledgers.json").unlink()
    assert main(["sweep", "halved.toml", "--out", "swept", "--quiet"]) == 0
    content = json.loads((folder / "swept" / "report.json").read_text())
    (found,) = content["guarantees"][0]["guarantee"]["zero_out"]["joint_dp"].values()
    assert found["epsilon"] is None
    assert "kept no ledger" in found["reason"]


@pytest.mark.thorough
def test_a_private_selection_is_priced_at_the_noise_that_is_drawn(folder, refused):
    select = "--select-privately geometric:3 --score-noise 20 --score-largest 5"
    assert main(f"sweep halved.toml --out best {select}".split()) == 0
    # The best of several runs never costs less than one of them.
    assert epsilon_in(folder / "best" / "guarantee.json") > EXACT
    assert "no noise was added" in refused(f"sweep warm.toml --out worst {select}")


def test_rounds_lost_by_a_kill_are_charged_at_the_noise_that_was_drawn(folder):
    """Rounds on record and without a checkpoint have a plan alone."""
    for name, epsilon in (("halved", EXACT), ("warm", None)):
        (folder / "run.toml").write_text(SETTINGS.format(name).partition("[sweep]")[0])
        experiment = prepare(read_toml(folder / "run.toml"))
        report = execute._guarantee(experiment, experiment.init(), planned=4, released=4)
        assert report.find("zero_out").epsilon == (epsilon and pytest.approx(epsilon, rel=1e-6))
