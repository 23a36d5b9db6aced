"""Contents of folders: runs, sweeps and tunings, each in a few words."""

import os
from collections.abc import Iterator
from pathlib import Path

from fedjaxsim.data.files import read_tables
from fedjaxsim.data.readers import DataSpec
from fedjaxsim.divergence import Record
from fedjaxsim.metrics import column_metric, primary_metric
from fedjaxsim.report.files import KINDS, intact, read_json
from fedjaxsim.report.labels import short_name
from fedjaxsim.runs.directory import CONFIG, SUMMARY, RunDirectory, metrics_in
from fedjaxsim.runs.sweep_files import SWEEP

KEYS = (
    "path", "kind", "name", "tags", "algorithm", "data", "seed", "rounds", "metric_name", "metric",
    "epsilon", "tuned", "problem",
)  # fmt: skip
"""The keys of a record; one that is not known is missing."""


def results_in(root: Path) -> Iterator[Record]:
    """Yield what a folder and the folders in it hold, by path: `KEYS` that are known."""
    for place, folders, files in os.walk(root):
        path = Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        kind = next((KINDS[name] for name in KINDS if name in files), None)
        if kind is not None:
            folders.clear()
            row = {"path": str(path), "kind": kind}
            try:
                yield row | {"run": _run, "sweep": _sweep, "tuning": _tuning}[kind](path)
            except ValueError as error:
                yield row | {"rounds": "", "problem": str(error)}


def _run(path: Path) -> Record:
    directory = RunDirectory(path)
    config = directory.config()
    done = directory.summary() if (path / SUMMARY).is_file() else {}
    records = metrics_in(config, path / CONFIG)
    planned = config.get("resolved", {}).get("rounds", config.get("rounds"))
    row = {
        **config.get("known_as", {}), "algorithm": short_name(config.get("algorithm", "")),
        "seed": config.get("seed"), "data": DataSpec(config.get("data", "")).short_name,
    }  # fmt: skip
    if not done or done["interrupted"]:
        begun = done.get("rounds", directory.released())
        return row | {"rounds": f"{begun} of {planned}"}
    column = primary_metric(done, records)
    if column is not None:
        row |= {"metric_name": column_metric(column, records).title, "metric": done.get(column)}
    return row | {"rounds": str(done["rounds"]), "epsilon": done["epsilon"]}


def _tuning(path: Path) -> Record:
    tuning, tuned = read_json(path / "path.json"), path / "tuned.toml"
    config = read_tables(tuned) if tuned.is_file() else {}
    with intact(path):
        accepted = [step["value"] for step in tuning["steps"] if step["accepted"]]
        row = {
            "rounds": f"{len(tuning['steps']) - 1} of {tuning['asked']['steps']} steps",
            "tuned": tuning["asked"]["wrt"],
            "metric_name": tuning.get("title", tuning["metric"]),
            "metric": accepted[-1],
        }  # fmt: skip
        if not config:
            return row
        algorithm, data = short_name(config["algorithm"]), DataSpec(config["data"]).short_name
        return row | {"algorithm": algorithm, "data": data}


def _sweep(path: Path) -> Record:
    config, report = read_tables(path / SWEEP), path / "report.json"
    content = read_json(report) if report.exists() else {"summary": {}}
    with intact(path):
        runs = config.get("resolved", {}).get("runs", "")
        return {"rounds": f"{content['summary'].get('finished', '?')} of {runs} runs"}
