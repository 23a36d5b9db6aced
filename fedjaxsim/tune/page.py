"""What the HTML report of a tuning says: all from its files."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.report.files import Record, read_json
from fedjaxsim.report.html import Section, folded, image, page, paragraph, table, verbatim
from fedjaxsim.report.progress import number
from fedjaxsim.report.seeds import standard_error
from fedjaxsim.report.symbols import key_label, remember, setting_of
from fedjaxsim.runs.directory import CONFIG, RunDirectory
from fedjaxsim.runs.pages import FOR_WHOM, provenance, sections_of, title_of
from fedjaxsim.runs.settings import flag
from fedjaxsim.runs.settings_files import read_toml
from fedjaxsim.tune.descent import Point
from fedjaxsim.tune.files import PATH_JSON, PICTURE, RUN, TUNED
from fedjaxsim.tune.watch import with_error

_ALT = (
    "The objective and the hyperparameters over what they cost, and the path in their planes where "
    "there are two or three"
)
_WHOSE = {
    "validation": "validation rows of the run's own clients",
    "held-out": "test rows of held-out clients",
    "public": "test rows of public data",
}
_COSTS = (
    "A run-equivalent is one run of all rounds for one seed; a point costs more of them, for its "
    "derivatives. Errors are standard errors over seeds, for the clients at hand."
)
_TOOK = "Bytes, time and memory"
_BESIDES = "Of the final run alone. The tuning before it took {} run-equivalents{}."


def _picture(path: Path) -> list[Element]:
    """Show the picture; a tuning without matplotlib has none."""
    return [image(path.read_bytes(), _ALT)] if path.is_file() else []


def tune_page(path: Path) -> bytes:
    """The report of a tuning.

    Args:
      path: its directory.

    Raises:
      FileNotFoundError: if a file is missing, or the final run was not made.
      ValueError: if a file is damaged.
    """
    for name in (PATH_JSON, TUNED):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} holds no {name}: not a tuning, or not a finished one")
    run = RunDirectory(path / RUN)
    final, config = dict(sections_of({"final run": run})), run.config()
    record = read_json(path / PATH_JSON)
    remember(read_toml(path / TUNED).records.values())
    try:
        tuned = _said(record)
        sections: list[Section] = [
            ("Results", [*_results(record), *_picture(path / PICTURE)]),
            ("Privacy", [
                paragraph(record["statement"]), paragraph(record["shared_seed"]), *final["Privacy"],
            ]),
            ("Points tried", _points(record)),
            ("The final run", [*final["Results"], *final["Curves"]]),
            ("Clients", final["Clients"]),
            (_TOOK, [paragraph(_spent(record)), *final[_TOOK]]),
            ("Settings", [
                _settings(record),
                verbatim((path / TUNED).read_text(encoding="utf-8")),
                folded(f"{RUN}/{CONFIG}", *final["Settings"]),
            ]),
            ("How to reproduce it", [
                paragraph(f"With the settings above as {TUNED}, the tuning and the final run:"),
                verbatim(f"{_command(record)}\nfedjaxsim run {TUNED} --out DIR"),
                *provenance([("final run", config)]),
            ]),
        ]  # fmt: skip
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: it does not hold what a tuning writes") from error
    return page(f"Tuning of {title_of(config)}", [f"Tuned: {tuned}.", FOR_WHOM], sections)


def _results(record: Record) -> list[Element]:
    """Where it began, what it found, and the grid's best."""
    steps, grid = record["steps"], record["grid"]
    start, best = steps[0], steps[record["best"]]
    rows = [
        ["start", *_cells(start["point"], start["values"]), number(start["runs"])],
        ["tuned", *_cells(best["point"], best["values"]), number(steps[-1]["runs"])],
    ]
    if grid is not None:
        at = grid["best"]
        cells = _cells(grid["points"][at], grid["values"][at])
        rows.append(["best on the grid", *cells, number(grid["runs"])])
    gain = with_error(*(math.nan if each is None else each for each in record["gain"].values()))
    title, count = metrics.METRICS[record["metric"]].title, record["seeds"]
    said = (
        f"The {title} fell by {gain} from the start, taken seed by seed over {count} seeds. "
        f"It ended: {record['stopped']}."
    )
    caption = f"Means over {count} seeds, on {_WHOSE[record['tuned_on']]}"
    headings = ["", *_headings(record), "run-equivalents spent"]
    return [paragraph(said), table(caption, headings, rows), paragraph(_COSTS)]


def _points(record: Record) -> list[Element]:
    """Every point of the descent, and of the grid."""
    steps, grid = record["steps"], record["grid"]
    rows = []
    for index, step in enumerate(steps):
        fate = "kept" if step["accepted"] else "taken back"
        best = ", the best" if index == record["best"] else ""
        cells = _cells(step["point"], step["values"])
        rows.append([str(index), *cells, number(step["runs"]), f"{fate}{best}"])
    headings = ["step", *_headings(record), "run-equivalents so far", "what became of it"]
    content = [table("The descent; step 0 is the start", headings, rows)]
    if grid is not None:
        pairs = zip(grid["points"], grid["values"], strict=True)
        lines = [
            [str(index), *_cells(point, values)] for index, (point, values) in enumerate(pairs)
        ]
        shown = table("The grid", ["point", *_headings(record)], lines)
        content.append(folded(f"The grid of {len(lines)} points", shown))
    return content


def _names(record: Record) -> list[str]:
    """What was tuned."""
    return list(record["steps"][0]["point"])


def _said(record: Record) -> str:
    """What was tuned, as the command line and the tables name it."""
    settings = _names(record)
    return ", ".join(f"{flag(setting_of(name))} ({key_label(name)})" for name in settings)


def _headings(record: Record) -> list[str]:
    metric = metrics.label(f"{record['split']}_{record['metric']}")
    return [*(key_label(name) for name in _names(record)), metric]


def _cells(point: Point, values: Sequence[float | None]) -> list[str]:
    """Hyperparameters, and the metric with its error; null in a file was not finite."""
    seeds = np.asarray(values, np.float64)
    finite = bool(np.isfinite(seeds).all())
    value = with_error(float(seeds.mean()), standard_error(seeds)) if finite else "not finite"
    return [*map(number, point.values()), value]


def _spent(record: Record) -> str:
    grid = record["grid"]
    beside = "" if grid is None else f", and the grid {number(grid['runs'])}"
    return _BESIDES.format(number(record["steps"][-1]["runs"]), beside)


def _settings(record: Record) -> Element:
    """Those of the tuning; those of the runs are in their file."""
    sizes, noise = record["clients"], record["noise_multiplier"]
    asked = record["asked"]
    rows = [
        ["tuned", _said(record)],
        ["minimized", f"{record['metric']} on {_WHOSE[record['tuned_on']]}"],
        ["seeds", str(record["seeds"])],
        ["steps at most", str(asked["steps"])],
        ["rule", record["rule"]],
        ["rounds of each run", str(record["rounds"])],
        ["clients: tuning, final run", f"{sizes['tuning']}, {sizes['run']}"],
        ["z: tuning, final run", f"{number(noise['tuning'])}, {number(noise['run'])}"],
    ]
    return table("The tuning", ["what", "setting"], rows, left=2)


def _command(record: Record) -> str:
    """What tunes again from the same start: the file has what was found."""
    asked: Mapping[str, Any] = record["asked"]
    words = ["fedjaxsim", "tune", TUNED]
    for name, value in record["steps"][0]["point"].items():
        words += [f"--{flag(setting_of(name))}", repr(value)]
    words += ["--wrt", ",".join(map(flag, _names(record)))]
    for name in ("seeds", "steps", "rule", "metric", "public_data", "compare_grid"):
        words += [] if asked[name] is None else [f"--{flag(name)}", str(asked[name])]
    return f"{shlex.join(words)} --out DIR"
