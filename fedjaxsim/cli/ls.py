"""`fedjaxsim ls`: the runs, sweeps and tunings in folders."""

import json as format_json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedjaxsim.cli.flags import Work

_KEYS = (
    "path", "kind", "name", "tags", "algorithm", "data", "seed", "rounds", "metric_name", "metric",
    "epsilon", "tuned", "problem",
)  # fmt: skip
"""The keys of each line as JSON."""
_HEADINGS = ("path", "kind", "algorithm", "data", "rounds", "metric", "ε", "tags")


def ls(folders: tuple[Path, ...] = (), *, tag: str | None = None, json: bool = False) -> Work:
    """List the runs, sweeps and tunings in folders.

    Args:
      folders: Folders, by default runs.
      tag: List only runs with this tag.
      json: Print JSON instead of a table.
    """
    from fedjaxsim.cli.messages import say
    from fedjaxsim.cli.printing import print_json, print_rows
    from fedjaxsim.privacy.entries import epsilon_text
    from fedjaxsim.report.progress import decimals

    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no directory {folder}")
    roots = folders or (Path("runs") if Path("runs").is_dir() else Path(),)
    rows = [row for root in roots for row in _results_in(root)]
    if tag is not None:
        rows = [row for row in rows if tag in row.get("tags", ())]

    def work() -> int:
        if json:
            print_json([dict.fromkeys(_KEYS) | row for row in rows])
            return 0
        lines = []
        for row in rows:
            name = row.get("name")
            value = row.get("metric")
            epsilon = epsilon_text(row["epsilon"]) if "epsilon" in row else ""
            lines.append([
                f"{row['path']} ({name})" if name else row["path"], row["kind"],
                row.get("algorithm", ""), row.get("data", ""), row["rounds"],
                f"{row['metric_name']} {decimals(value)}" if value is not None else "",
                epsilon, ", ".join(row.get("tags", ())),
            ])  # fmt: skip
        print_rows(_HEADINGS, lines, left=4)
        for problem in filter(None, (row.get("problem") for row in rows)):
            say(f"warning: {problem}")
        return 0

    return work


def _results_in(root: Path) -> Iterator[dict[str, Any]]:
    """Yield what a folder and the folders in it hold, by path."""
    from fedjaxsim.report.files import KINDS

    for place, folders, files in os.walk(root):
        path = Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        kind = next((KINDS[name] for name in KINDS if name in files), None)
        if kind is not None:
            folders.clear()
            yield {"run": _run, "sweep": _sweep, "tuning": _tuning}[kind](path)


def _run(path: Path) -> dict[str, Any]:
    from fedjaxsim.metrics import column_metric, primary_metric
    from fedjaxsim.report.labels import data_name, short_name
    from fedjaxsim.runs.directory import CONFIG, RunDirectory, metrics_in

    directory = RunDirectory(path)
    try:
        config = directory.config()
        done = directory.summary() if (path / "summary.json").is_file() else {}
        records = metrics_in(config, path / CONFIG)
    except ValueError as error:
        return {"path": str(path), "kind": "run", "rounds": "", "problem": str(error)}
    planned = config.get("resolved", {}).get("rounds", config.get("rounds"))
    row = {
        "path": str(path), "kind": "run", **config.get("known_as", {}),
        "algorithm": short_name(config.get("algorithm", "")), "seed": config.get("seed"),
        "data": data_name(config.get("data", "")),
    }  # fmt: skip
    if not done or done["interrupted"]:
        begun = done.get("rounds", directory.released())
        return row | {"rounds": f"{begun} of {planned}"}
    column = primary_metric(done, records)
    if column is not None:
        row |= {"metric_name": column_metric(column, records).title, "metric": done.get(column)}
    return row | {"rounds": str(done["rounds"]), "epsilon": done["epsilon"]}


def _tuning(path: Path) -> dict[str, Any]:
    from fedjaxsim.data.files import read_tables
    from fedjaxsim.report.files import read_json
    from fedjaxsim.report.labels import data_name, short_name

    row = {"path": str(path), "kind": "tuning"}
    try:
        tuning, tuned = read_json(path / "path.json"), path / "tuned.toml"
        accepted = [step["value"] for step in tuning["steps"] if step["accepted"]]
        row |= {
            "rounds": f"{len(tuning['steps']) - 1} of {tuning['asked']['steps']} steps",
            "tuned": tuning["asked"]["wrt"], "metric_name": tuning["metric"],
            "metric": accepted[-1],
        }  # fmt: skip
        if tuned.is_file():
            config = read_tables(tuned)
            row |= {"algorithm": short_name(config["algorithm"]), "data": data_name(config["data"])}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return row | {"rounds": "", "problem": f"{path} is damaged: {error}"}
    return row


def _sweep(path: Path) -> dict[str, Any]:
    from fedjaxsim.data.files import read_tables
    from fedjaxsim.runs.sweep_files import SWEEP

    row = {"path": str(path), "kind": "sweep"}
    try:
        runs = read_tables(path / SWEEP).get("resolved", {}).get("runs", "")
        report = path / "report.json"
        summary = format_json.loads(report.read_text("utf-8"))["summary"] if report.exists() else {}
    except (ValueError, KeyError) as error:
        return row | {"rounds": "", "problem": f"{path} is damaged: {error}"}
    return row | {"rounds": f"{summary.get('finished', '?')} of {runs} runs"}
