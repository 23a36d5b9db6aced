"""The HTML report of a run or of several: one file, without scripts or network access."""

import base64
import functools
import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np

from fedjaxsim import metrics
from fedjaxsim.privacy.assumptions import METRICS
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.report import figures, plots
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import MEANING, data_name, epsilon_label
from fedjaxsim.report.progress import bytes_text, number
from fedjaxsim.report.results import (
    Estimate,
    Run,
    System,
    cells,
    compared,
    default_metric,
    headings,
    systems,
    without_seed,
)
from fedjaxsim.report.tables import runs_table
from fedjaxsim.runs.directory import CONFIG, drawn_twice, named
from fedjaxsim.runs.finished import runs_of

_FALSE_ALARMS = 0.05
_WORST = 5
_PIXELS = slice(16, 20)
"""The bytes of a PNG file that hold its width."""
_ENDINGS = {
    "interrupted": "was interrupted",
    "stopped_early": "ran out of patience",
    "budget_spent": "spent its budget",
    "progress_sample": "shows metrics of {:,} sampled clients on the way, of all at the end",
    "diverging": "diverges from round {} on",
    "nonfinite": "counted {} messages that were not finite as zero",
}
_SPREAD = {"_std": "standard deviation", "_worst_tenth": "worst tenth"} | {
    f"_{name}": name for name in ("p10", "p50", "p90")
}
"""Columns of the spread of a metric over clients, by the end of their names."""
_TRAFFIC = ["message up", "state down", "clients per round", "total up", "total down"]
_TIMES = ["compute time", "compile time"]


class _Card(NamedTuple):
    """A number at the head of a page: its name, the number, and a note."""

    name: str
    value: str
    note: str


def runs_page(paths: Sequence[Path]) -> bytes:
    """Render the report of the run in a directory, or of several runs side by side.

    Raises:
      FileNotFoundError: if a directory holds no finished run.
      ValueError: if a file is damaged.
    """
    directories = named(paths)
    found = runs_of(directories, whole=True)
    runs = {run.name: run for run in found}
    of_seeds, several = systems(found), len(found) > 1
    looks = figures.looks(of_seeds)
    rows = compared(of_seeds)
    first, configs = found[0], {run.name: run.config for run in found}
    judged = default_metric([first])
    what = (first.config.get(key, "?") for key in ("algorithm", "model", "data"))
    if several:
        picture = plots.content(figures.comparison_figure(of_seeds))
        cards = _cards_of_systems(of_seeds, looks, rows)
    else:
        picture = plots.content(plots.run_figure(first.rows, ""))
        cards = _cards_of_run(first, judged)
    table = runs_table([{"run": name, **run.summary} for name, run in runs.items()])
    content = {
        "several": several,
        "title": f"{len(runs)} runs side by side" if several else "{} {} on {}".format(*what),
        "cards": cards,
        "summary": first.summary,
        "results": table,
        "notes": table.notes + [
            f"{name} {words.format(run.summary[key])}"
            for name, run in runs.items() for key, words in _ENDINGS.items() if run.summary.get(key)
        ],
        "metric": metrics.label(judged),
        "compared": [cells(row) for row in rows] if len(of_seeds) < len(runs) else [],
        "compared_names": headings(rows, metrics.label(rows[0]["metric"])),
        "privacy": _privacy(_promises(of_seeds)),
        "shared_seeds": drawn_twice(directories),
        "curves": picture,
        "distribution": _distribution(of_seeds, looks, judged),
        "spread_names": list(_SPREAD.values()),
        "spread": _spread(runs, judged),
        "worst": [] if several else _worst(first.clients, judged),
        "cost_names": [*_TRAFFIC, *_TIMES, "rounds per s", "memory", "device memory"],
        "costs": [[name, *_costs(run.summary)] for name, run in runs.items()],
        "systems": [each.label for each in of_seeds],
        "differences": _differences(of_seeds),
        "files": {f"{n}/{CONFIG}": each.read(CONFIG).decode() for n, each in directories.items()},
        "file": CONFIG,
        "commands": [
            _command(run.config, directories[name].path if several else Path())
            for name, run in runs.items()
        ],
        "data": [
            [name, str(config.get("seed", "–")),
             config.get("resolved", {}).get("data_fingerprint", "–")]
            for name, config in configs.items()
        ],
        "versions": list(dict.fromkeys(
            ", ".join(f"{key} {value}" for key, value in config.get("versions", {}).items())
            for config in configs.values()
        )),
    }  # fmt: skip
    page = _environment().get_template("run.html.jinja").render(content)
    return page.encode(errors="replace")


def _cards_of_run(run: Run, judged: str) -> list[_Card]:
    """Return a card each for metric, ε, clients and rounds."""
    summary, config = run.summary, run.config
    worst = summary.get(f"{judged}_worst_tenth")
    examples = [
        _Card(
            "privacy of examples",
            epsilon_label(each.epsilon),
            f"δ = {number(each.delta)}, {each.meaning[0]}",
        )
        for each in run.report.guarantees
        if each.unit == "example" and each.epsilon is not None
    ]
    rounds, planned = summary["rounds"], summary["rounds_planned"]
    return [
        _Card(metrics.label(judged), _metric_text(summary.get(judged)),
             "" if worst is None else f"worst tenth {_metric_text(worst)}"),
        _epsilon_card(summary["epsilon"], summary["delta"]),
        *examples[:1],
        _Card("clients", str(config.get("resolved", {}).get("clients", "?")),
             data_name(config.get("data", ""))),
        _Card("rounds", str(rounds), "" if rounds == planned else f"of {planned} planned"),
    ]  # fmt: skip


def _epsilon_card(epsilon: float | None, delta: float | None) -> _Card:
    """Return a card of the ε spent, with its meaning."""
    spent = epsilon_label(epsilon)
    meaning = {"ε = 0": "nothing is released", "ε = ∞": "no guarantee for whole clients"}
    return _Card("privacy", spent, meaning.get(spent, f"δ = {number(delta)}, {MEANING}"))


def _cards_of_systems(
    found: Sequence[System], looks: Sequence[figures.Look], rows: Sequence[Record]
) -> list[_Card]:
    """Return a card for the metric and ε of each system, the mean over its seeds."""
    cards = []
    for system, (label, _), row in zip(found, looks, rows, strict=True):
        spent = figures.spent_by(system)
        count = f"{row['seeds']} seeds" if row["seeds"] > 1 else "1 seed"
        parts = [metrics.label(row["metric"]), spent if spent not in label else "", count]
        value = str(Estimate(*(row[name] for name in Estimate._fields)))
        cards.append(_Card(label, value, "; ".join(filter(None, parts))))
    return cards


def _promises(found: Sequence[System]) -> Iterator[tuple[str, Report]]:
    """Yield the report of each system, or of each of its seeds where they differ."""
    for system in found:
        alike = len({str(run.report) for run in system.runs.values()}) == 1
        for seed, run in system.runs.items():
            yield system.label if alike else f"{system.label}, seed {seed}", run.report


def _privacy(reports: Iterable[tuple[str, Report]]) -> Record:
    """Return the variables of the section on privacy; labels of equal reports are joined."""
    groups: dict[str, tuple[dict[str, None], Report]] = {}
    for label, report in reports:
        groups.setdefault(str(report), ({}, report))[0][label] = None
    known = [(", ".join(labels), report) for labels, report in groups.values()]
    several = len(known) > 1
    rows, sentences = [], {}
    for index, (name, report) in enumerate(known):
        for each in (each for each in report.guarantees if each.epsilon is not None):
            for sentence in each.assumptions:
                sentences.setdefault(sentence, {})[index] = name
            if each.view == "joint_dp" or each.unit == "example" or not several:
                neighbours, adversary = each.meaning
                found = math.ceil(round(1000 * each.largest_power(_FALSE_ALARMS), 6)) / 10
                rows.append([
                    *([name] if several else []), neighbours, adversary.removeprefix("against "),
                    each.value, number(each.delta), each.accountant, f"{found:g} %",
                ])  # fmt: skip
    # A sentence that does not hold for every guarantee names the runs for which it does.
    promising = set(itertools.chain(*sentences.values()))
    said = [
        sentence if len(of) == len(promising) else f"{', '.join(of.values())}: {sentence}"
        for sentence, of in sentences.items()
    ]
    return {
        "several": several,
        "short": [f"{name}: {each.short()}" if several else each.short() for name, each in known],
        "rows": rows,
        "false_alarms": _FALSE_ALARMS,
        "assumptions": list(dict.fromkeys([*said, METRICS])),
    }


# --- clients and costs ----------------------------------------------------------------------------


def _distribution(
    found: Sequence[System], looks: Sequence[figures.Look], column: str
) -> bytes | None:
    """Draw the values of clients, pooled over the seeds of each system."""
    pooled = [
        np.concatenate([run.of_clients(column) for run in each.runs.values()]) for each in found
    ]
    known = [pair for pair in zip(looks, pooled, strict=True) if len(pair[1])]
    return plots.content(figures.clients_figure(known, column)) if known else None


def _spread(runs: Mapping[str, Run], judged: str) -> list[list[str]]:
    """Return a row for each metric of the only run, or for the metric of each run."""
    shown = [(name, run, judged) for name, run in runs.items()]
    if len(runs) == 1:
        [run] = runs.values()
        columns = [key.removesuffix("_std") for key in run.summary if key.endswith("_std")]
        shown = [(metrics.label(column), run, column) for column in columns]
    rows = []
    for name, run, column in shown:
        values = run.of_clients(column)
        mean = float(np.mean(values)) if len(values) else None
        spread = [run.summary.get(f"{column}{end}") for end in _SPREAD]
        rows.append([name, str(len(values)), *map(_metric_text, (mean, *spread))])
    return rows


def _worst(clients: Sequence[Mapping[str, str]], column: str) -> list[list[str]]:
    upwards = metrics.of_column(column).larger_is_better
    known = [row for row in clients if row.get(column) and upwards is not None]
    known.sort(key=lambda row: float(row[column]), reverse=not upwards)
    return [
        [row["name"], _metric_text(float(row[column])), row["train_rows"], row["test_rows"]]
        for row in known[:_WORST]
    ]


def _traffic_cells(traffic: Record, rounds: int) -> list[str]:
    """Format what `memory.traffic` returns, and its totals over rounds."""
    up, down, cohort = (traffic.get(key) for key in ("message_bytes", "server_bytes", "cohort"))
    if up is None or down is None or cohort is None:
        return ["–"] * len(_TRAFFIC)
    totals = (bytes_text(each * cohort * rounds) for each in (up, down))
    return [bytes_text(up), bytes_text(down), number(cohort), *totals]


def _costs(summary: Record) -> list[str]:
    speed, rounds = summary["rounds_per_second"], summary["rounds"]
    return [
        *_traffic_cells(summary, rounds),
        *map(_seconds_text, (speed and rounds / speed, summary.get("compile_seconds"))),
        number(speed),
        *(bytes_text(summary.get(key)) for key in ("peak_bytes", "device_peak_bytes")),
    ]


# --- settings and origin --------------------------------------------------------------------------


def _differences(found: Sequence[System]) -> list[list[str]]:
    """Return the settings in which systems differ, a dash where one is not set, and seeds."""
    configs = [without_seed(each.first.config) for each in found]
    rows = [
        [key, *(str(config.get(key, "–")) for config in configs)]
        for key in dict.fromkeys(key for config in configs for key in config)
    ]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return [*rows, ["seed", *(", ".join(map(str, sorted(each.runs))) for each in found)]]


def _command(config: Record, folder: Path) -> list[str]:
    words = ["fedjaxsim", "run", str(folder / CONFIG)]
    for stage in config.get("stages", [])[-1:]:
        words += ["--from", str(stage.get("directory", "DIR"))]
    return words


# --- texts ----------------------------------------------------------------------------------------


def _metric_text(value: float | None) -> str:
    """Format a metric with four decimals, or four digits where decimals would hide it."""
    shows = value is not None and (value == 0 or 0.01 <= abs(value) < 100)
    return f"{value:.4f}" if shows else number(value)


def _seconds_text(seconds: float | None) -> str:
    """Format a time in seconds, a dash for None."""
    return "–" if seconds is None else f"{number(seconds)} s"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedjaxsim.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "base64": lambda content: base64.b64encode(content).decode(),
        "command": shlex.join,
        "pixels": lambda png: int.from_bytes(png[_PIXELS]),
        "transpose": lambda rows: list(zip(*rows, strict=True)),
    }
    return environment
