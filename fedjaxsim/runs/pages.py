"""The HTML report of a run or of several: one file, without scripts or network access."""

import base64
import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fedjaxsim import metrics
from fedjaxsim.report import figures, plots
from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import bytes_text, number
from fedjaxsim.report.results import (
    Run,
    System,
    cells,
    compared,
    default_metric,
    headings,
    runs_table,
    systems,
)
from fedjaxsim.runs.directory import CONFIG, drawn_twice, named, runs_of

_ENDINGS = {
    "interrupted": "was interrupted",
    "stopped_early": "ran out of patience",
    "budget_spent": "spent its budget",
    "progress_sample": "shows metrics of {:,} sampled clients on the way, of all at the end",
    "diverging": "diverges from round {} on",
    "nonfinite": "counted {} messages that were not finite as zero",
}
_SAID = (
    "algorithm", "data", "delta", "epsilon", "epsilon_replace", "model", "rounds",
    "rounds_per_second", "test_failed",
)  # fmt: skip
"""Entries of a summary that the page has above: in its title, in the results or below them."""


def runs_page(paths: Sequence[Path]) -> bytes:
    """Render the report of the run in a directory, or of several runs side by side."""
    directories = named(paths)
    runs = runs_of(directories, whole=True)
    of_seeds, several = systems(runs), len(runs) > 1
    looks, rows = figures.looks_of(of_seeds), compared(of_seeds)
    first, judged = runs[0], default_metric(runs[:1])
    parts = [first.config.get(key, "?") for key in ("algorithm", "model", "data")]
    table = runs_table([{"run": run.name, **run.summary} for run in runs])
    notes = [
        f"{run.name} {words.format(run.summary[key])}"
        for run in runs for key, words in _ENDINGS.items() if run.summary.get(key)
    ]  # fmt: skip
    curves = figures.comparison_figure(of_seeds) if several else figures.run_figure(first.rows, "")
    privacy: dict[str, list[str]] = {}
    for run in runs:
        privacy.setdefault(str(run.report), []).append(run.name)
    content = {
        "title": f"{len(runs)} runs side by side" if several else "{} {} on {}".format(*parts),
        "curves": plots.content(curves),
        "distribution": _distribution(of_seeds, looks, judged),
        "results": (table.headings, table.lines),
        "notes": [*table.notes, *notes],
        "compared": (headings(rows, metrics.label(rows[0]["metric"])), map(cells, rows))
        if len(of_seeds) < len(runs)
        else None,
        "summary": (["", *(run.name for run in runs)], _summary(runs)),
        "privacy": [(", ".join(names) if several else "", text) for text, names in privacy.items()],
        "shared_seeds": drawn_twice(directories),
        "files": [
            (run.name, shlex.join(_command(run.config, each.path if several else Path())),
             each.read(CONFIG).decode())
            for run, each in zip(runs, directories.values(), strict=True)
        ],
    }  # fmt: skip
    page = _environment().get_template("page.html.jinja").render(content)
    return page.encode(errors="replace")


def _distribution(found: Sequence[System], looks: Sequence[Any], column: str) -> bytes | None:
    """Draw the values of clients, pooled over the seeds of each system."""
    pooled = [
        np.concatenate([run.of_clients(column) for run in each.runs.values()]) for each in found
    ]
    known = [pair for pair in zip(looks, pooled, strict=True) if len(pair[1])]
    return plots.content(figures.clients_figure(known, column)) if known else None


def _summary(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for each entry of the runs' summaries."""
    names = dict.fromkeys(name for run in runs for name in run.summary if name not in _SAID)
    return [
        [name.replace("_", " "), *(_cell(name, run.summary.get(name)) for run in runs)]
        for name in names
    ]


def _cell(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return bytes_text(value)
    text = number(value) if isinstance(value, float) else "–" if value is None else str(value)
    return f"{text} s" if name.endswith("_seconds") and value is not None else text


def _command(config: Record, folder: Path) -> list[str]:
    words = ["fedjaxsim", "run", str(folder / CONFIG)]
    for stage in config.get("stages", [])[-1:]:
        words += ["--from", str(stage.get("directory", "DIR"))]
    return [*words, "--out", "DIR"]


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedjaxsim.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment
