"""Settings of runs that several files of tests share: their simulations are compiled once.

Such a file has the mark `usual_runs`. Seeds, hyperparameters, privacy and numbers of rounds may
differ; two rounds between evaluations are one length of a segment for all.
"""

from typing import Any

DIGITS = ["--clients", "8", "--local-steps", "1", "--sampling-rate", "0.5", "--eval-every", "2"]
"""Flags of PMTL on digits."""
SQUARED: dict[str, Any] = {
    "data": "synthetic", "loss": "squared", "clients": 10, "local_steps": 1, "sampling_rate": 0.4,
    "learning_rate": 0.01, "eval_every": 2,
}  # fmt: skip
"""Settings of PMTL on linear regression."""
