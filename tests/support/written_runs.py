"""The files of runs, as if they had been computed."""

from fedjaxsim.privacy.entries import Drawn, Entry, SamplingScheme
from fedjaxsim.privacy.events import Gaussian, PrivacySpend
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.report.files import lines, write_json
from fedjaxsim.runs.directory import RunDirectory


def write_run(path, algorithm, value, *, seed=0, noise=2.0):
    """Write the files of a run of 5 clients with a test accuracy."""
    charged = PrivacySpend(SamplingScheme("full", 5, 5), Gaussian(), (Entry(noise, 1.0, 4),))
    found = report([charged], 0.01, draws=(Drawn(f"d{seed}", 4),))
    last = {"test_accuracy": value, "epsilon": found.find("zero_out").epsilon}
    config = {"algorithm": algorithm, "data": "csv:x.csv", "model": "linear", "seed": seed}
    RunDirectory.create(path).write_config(config)
    records = [{"round": 0, **last, "epsilon": 0.0}, {"round": 4, **last}]
    (path / "metrics.jsonl").write_bytes(lines(records))
    write_json(path / "guarantee.json", found.to_json())
    write_json(path / "summary.json", {
        "algorithm": algorithm, "data": "csv:x.csv", "model": "linear", "rounds": 4,
        "rounds_planned": 4, "interrupted": False, **last, "epsilon_replace": None, "delta": 0.01,
        "rounds_per_second": 2.0,
    })  # fmt: skip
