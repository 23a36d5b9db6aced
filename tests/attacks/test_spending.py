"""An attack on evaluations that are released: one that nothing charges."""

import json

from fedjaxsim.cli import main

RUN = (
    "run --data synthetic --loss squared --clients 6 --validation-fraction 0.3 --algorithm fedavg "
    "--rounds 3 --eval-every 2 --local-steps 1 --learning-rate 0.01 --sampling full --delta 1e-3 "
    "--noise-multiplier 4 --evaluate-privately 3 --checkpoint-every 1 --quiet --out run"
)


def test_a_run_killed_after_its_last_evaluation_is_extended_when_that_is_charged(refused, tmp_path):
    assert main(RUN.split()) == 0
    released = json.loads((tmp_path / "run" / "guarantee.json").read_text())
    for name in ("checkpoints/3.state", "summary.json", "guarantee.json"):
        (tmp_path / "run" / name).unlink()
    assert "resume without --rounds first" in refused("resume run --rounds 6")
    assert main(["resume", "run", "--quiet"]) == 0
    assert json.loads((tmp_path / "run" / "guarantee.json").read_text()) == released
