"""An attack on evaluations that are released: one that nothing charges."""

import json
import shutil
import sys

import pytest

from fedjaxsim.cli import main
from fedjaxsim.runs.parts import part_of

RUN = (
    "run --data synthetic --loss squared --clients 6 --validation-fraction 0.3 --algorithm fedavg "
    "--rounds 3 --eval-every 2 --local-steps 1 --learning-rate 0.01 --sampling full --delta 1e-3 "
    "--noise-multiplier 4 --evaluate-privately 3 --checkpoint-every 1 --quiet --out run"
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that each test copies."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    assert main([*RUN.split()[:-1], str(folder)]) == 0
    return folder


@pytest.mark.thorough
def test_a_run_killed_after_its_last_evaluation_is_extended_when_that_is_charged(
    ended, refused, tmp_path
):
    shutil.copytree(ended, "run")
    released = json.loads((tmp_path / "run" / "guarantee.json").read_text())
    for name in ("checkpoints/3.state", "summary.json", "guarantee.json"):
        (tmp_path / "run" / name).unlink()
    assert "resume without --rounds first" in refused("resume run --rounds 6")
    assert main(["resume", "run", "--quiet"]) == 0
    assert json.loads((tmp_path / "run" / "guarantee.json").read_text()) == released


@pytest.mark.thorough
def test_a_run_killed_before_its_first_checkpoint_begins_anew_with_its_settings_alone(
    ended, refused, tmp_path
):
    """Other messages under the noise of what was released would be subtracted."""
    shutil.copytree(ended, "run")
    for path in [*(tmp_path / "run" / "checkpoints").iterdir(), tmp_path / "run" / "summary.json"]:
        path.unlink()
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rate = 0.01", "rate = 0.1"))
    assert "began with other settings" in refused("resume run")


OWN = """
import jax
import fedjaxsim as fjs
from fedjaxsim.hyperparameters import declared_by

@fjs.reads(*declared_by(fjs.fedavg))
def mine(task):
    good = fjs.fedavg(task)
    return good._replace(predict=lambda *seen: jax.tree.map(lambda w: 1 * w, good.predict(*seen)))
"""


@pytest.mark.thorough
def test_a_killed_run_resumes_with_the_code_alone_that_made_what_it_released(
    refused, tmp_path, monkeypatch, capsys
):
    """Other code under the noise of released evaluations: their difference has no noise."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def forget():  # as a process that begins
        sys.modules.pop("drifting")
        part_of.cache_clear()

    code = tmp_path / "drifting.py"
    code.write_text(OWN)
    assert main(RUN.replace("fedavg", "drifting:mine").split()) == 0
    for name in ("checkpoints/3.state", "summary.json", "guarantee.json"):
        (tmp_path / "run" / name).unlink()
    code.write_text(OWN.replace("1 * w", "0 * w"))
    forget()
    assert "with other code of yours" in refused("resume run")
    code.write_text(OWN)
    forget()
    assert main(["resume", "run", "--quiet"]) == 0
    assert "other code" not in capsys.readouterr().err
    code.write_text(OWN.replace("1 * w", "0 * w"))
    forget()
    assert main(["resume", "run", "--quiet", "--rounds", "5"]) == 0
    assert "the first 3 rounds are of other code of yours" in capsys.readouterr().err
    forget()
