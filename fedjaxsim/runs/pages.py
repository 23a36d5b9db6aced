"""What the HTML report of a run, of runs side by side and of a sweep says: all from their files."""

import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.privacy.guarantee import ADJACENCY_TEXT, METRICS, VIEW_TEXT, Report
from fedjaxsim.report import plots, seeds
from fedjaxsim.report.files import Record
from fedjaxsim.report.html import (
    Section,
    bullets,
    folded,
    image,
    page,
    paragraph,
    table,
    verbatim,
)
from fedjaxsim.report.progress import bytes_text, number, runs_table
from fedjaxsim.runs.directory import CONFIG, CURVES, RunDirectory, drawn_twice, named
from fedjaxsim.runs.plan import SWEEP

_FALSE_ALARMS = 0.05
_WORST = 5
SPREAD = {"_std": "standard deviation", "_worst_tenth": "worst tenth"} | {
    f"_{name}": name for name in ("p10", "p50", "p90")
}
FAIRNESS = (
    "The worst tenth is the mean over the tenth of the clients with the worst values; p10, p50 and "
    "p90 are percentiles over clients."
)
_FOUND_OUT = (
    "ε bounds what anybody can find out about one client. The last column says it in detections: "
    f"of a test that raises a false alarm in {_FALSE_ALARMS:.0%} of the cases where nothing was "
    "changed, it is the greatest share of changes that it can find."
)
COUNTED = (
    "Messages and server state count as the simulation holds them, mostly as float32, without "
    "compression or secure aggregation; totals are those expected. Memory is the peak of the "
    "process, with all that it had done before."
)
FOR_WHOM = (
    "This page is for whoever runs the simulation: its metrics were computed without noise, which "
    "no guarantee covers, and it names the seed, from which the noise follows."
)
TIMES = ("computing", "compiling")
TRAFFIC = (
    "up: one message", "down: server state", "clients in a round", "up in all", "down in all"
)  # fmt: skip


def runs_page(paths: Sequence[Path]) -> bytes:
    """The report of a run, or of several side by side.

    Args:
      paths: their directories, at least one.

    Raises:
      FileNotFoundError: if one holds no finished run.
      ValueError: if a file is damaged.
    """
    directories = named(paths)
    sections = sections_of(directories)
    if len(directories) > 1:
        return page(f"{len(directories)} runs side by side", [FOR_WHOM], sections)
    (one,) = directories.values()
    config, summary = one.config(), one.summary()
    size = f"{config.get('resolved', {}).get('clients', '?')} clients"
    spent = f"{summary['rounds']} of {summary['rounds_planned']} rounds"
    return page(title_of(config), [f"{size}, {spent}.", FOR_WHOM], sections)


def title_of(config: Record) -> str:
    """What was run, from its settings."""
    return "{} {} on {}".format(*(config.get(key, "?") for key in ("algorithm", "model", "data")))


def sections_of(directories: Mapping[str, RunDirectory]) -> list[Section]:
    """What a report says of runs.

    Args:
      directories: by the names that runs have in it, at least one.

    Raises:
      FileNotFoundError: if one holds no finished run.
      ValueError: if a file is damaged.
    """
    runs = {
        name: seeds.Run(each.config(), each.summary(), each.metrics(), each.clients())
        for name, each in directories.items()
    }
    systems = seeds.systems(runs)
    if len(runs) == 1:
        [(name, run)] = runs.items()
        drawn = (directories[name].path / CURVES).is_file()  # not where matplotlib was missing
        figure = None if drawn else plots.run_figure(run.records, name)
        picture = directories[name].read(CURVES) if figure is None else plots.png(figure)
        alt = "Loss, quality with its 10–90 % band over clients, and ε, each over rounds"
    else:
        picture = plots.png(plots.comparison_figure(plots.of_systems(systems), "Runs"))
        alt = "Quality and ε of each system over rounds"
    files = {name: each.read(CONFIG).decode() for name, each in directories.items()}
    return [
        ("Results", _results(runs, systems)),
        ("Privacy", [*privacy(_promises(systems, runs, directories)), *_shared(directories)]),
        ("Curves", [image(picture, alt)]),
        ("Clients", _clients(runs, systems)),
        ("Bytes, time and memory", _costs(runs)),
        ("Settings", _settings(systems, files)),
        ("How to reproduce it", origin(
            (name, run.config, "run", str(directories[name].path) if len(runs) > 1 else "")
            for name, run in runs.items()
        )),
    ]  # fmt: skip


# --- results and privacy --------------------------------------------------------------------------


def _results(runs: Mapping[str, seeds.Run], systems: Sequence[seeds.System]) -> list[Element]:
    headings, lines, notes = runs_table([{"run": n, **run.summary} for n, run in runs.items()])
    said = {"interrupted": "was interrupted", "stopped_early": "ran out of patience"}
    for name, run in runs.items():
        for key, words in (said | {"diverging": "diverges"}).items():
            notes.extend([f"{name} {words}"] if run.summary.get(key) else [])
    content = [table("At the end, on test rows", headings, lines)]
    if notes:
        content.append(bullets(notes))
    if len(systems) < len(runs):
        rows = seeds.compared(systems)
        label = metrics.label(rows[0]["metric"])
        headings = ["system", "seeds", label, f"minus {systems[0].label}", "p (Holm)"]
        caption = "Means over seeds with 95 % intervals; differences on the seeds that both have"
        content.append(table(caption, headings, [seeds.cells(row, number) for row in rows]))
    return content


def _promises(
    systems: Sequence[seeds.System],
    runs: Mapping[str, seeds.Run],
    directories: Mapping[str, RunDirectory],
) -> Iterator[tuple[str, Report]]:
    """What each system promises, or each of its seeds where they differ."""
    for system in systems:
        own = {
            seed: directories[name].report()
            for seed, run in system.runs.items()
            for name, each in runs.items()
            if each is run
        }
        alike = len(set(map(str, own.values()))) == 1
        for seed, report in own.items():
            yield system.label if alike else f"{system.label}, seed {seed}", report


def _shared(directories: Mapping[str, RunDirectory]) -> list[Element]:
    """Name the runs that have no joint ε."""
    twice = drawn_twice(directories)
    return [paragraph(twice)] if twice else []


def privacy(reports: Iterable[tuple[str, Report]]) -> list[Element]:
    """What is promised: of those that promise the same, once."""
    groups: dict[str, tuple[list[str], Report]] = {}
    for label, report in reports:
        labels, _ = groups.setdefault(str(report), ([], report))
        labels.extend([] if label in labels else [label])
    several = len(groups) > 1
    rows = []
    sentences: dict[str, list[list[str]]] = {}
    for labels, report in groups.values():
        known = [each for each in report.guarantees if each.epsilon is not None]
        for each in known:
            if several and each.view != "joint_dp":
                continue
            found = math.ceil(round(1000 * each.most_found(_FALSE_ALARMS), 6)) / 10
            cells = [", ".join(labels), ADJACENCY_TEXT[each.adjacency]]
            cells += [VIEW_TEXT[each.view].removeprefix("against "), each.value]
            cells += [number(each.delta), each.accountant, f"{found:g} %"]
            rows.append(cells[not several :])
        for line in dict.fromkeys(line for each in known for line in each.assumptions):
            sentences.setdefault(line, []).append(labels)
    short = [
        f"{', '.join(labels)}: {report.short()}" if several else report.short()
        for labels, report in groups.values()
    ]
    content = [bullets(short) if several else paragraph(short[0])]
    if rows:
        headings = ["of", "what is changed", "who looks", "ε", "δ", "accountant", "found at most"]
        caption = "What the releases tell about one client"
        shown = table(caption, headings[not several :], rows, left=3 if several else 2)
        content += [paragraph(_FOUND_OUT), shown]
        content.append(paragraph("What this rests on, and what it does not cover:"))
    # What does not hold of all that promise something is said of those of whom it does.
    promising = sum(
        any(each.epsilon is not None for each in report.guarantees) for _, report in groups.values()
    )
    said = [
        line if len(of) == promising else f"{', '.join(itertools.chain(*of))}: {line}"
        for line, of in sentences.items()
    ]
    return [*content, bullets(dict.fromkeys([*said, METRICS]))]


# --- clients --------------------------------------------------------------------------------------


def _clients(runs: Mapping[str, seeds.Run], systems: Sequence[seeds.System]) -> list[Element]:
    first, several = next(iter(runs.values())), len(runs) > 1
    judged = plots.quality_key(first.records)
    if several:
        shown = [(name, run, judged) for name, run in runs.items()]
    else:
        measured = [key.removesuffix("_std") for key in first.summary if key.endswith("_std")]
        shown = [(metrics.label(column), first, column) for column in measured]
    rows = []
    for name, run, column in shown:
        values = run.of_clients(column)
        mean = metric_text(float(np.mean(values)) if len(values) else None)
        spread = [metric_text(run.summary.get(f"{column}{end}")) for end in SPREAD]
        rows.append([name, str(len(values)), mean, *spread])
    caption = f"{metrics.label(judged) if several else 'Test metrics'}, every client counted once"
    headings = ["run" if several else "metric", "clients", "mean", *SPREAD.values()]
    content = [table(caption, headings, rows), paragraph(FAIRNESS)]
    pooled = [
        np.concatenate([run.of_clients(judged) for run in each.runs.values()]) for each in systems
    ]
    known = [pair for pair in zip(plots.of_systems(systems), pooled, strict=True) if len(pair[1])]
    if known:
        figure = plots.clients_figure(known, judged)
        content.insert(0, image(plots.png(figure), "The share of clients at or below each value"))
    if known and not several:
        content.append(_worst(first.clients, judged))
    return content


def metric_text(value: float | None) -> str:
    """A metric, with as many decimals as others have, unless that hides it."""
    shows = value is not None and (value == 0 or 0.01 <= abs(value) < 100)
    return f"{value:.4f}" if shows else number(value)


def _worst(clients: Sequence[Mapping[str, str]], column: str) -> Element:
    upwards = metrics.of_column(column).larger_is_better
    known = [row for row in clients if row.get(column)]
    known.sort(key=lambda row: float(row[column]), reverse=not upwards)
    rows = [
        [row["name"], metric_text(float(row[column])), row["train_rows"], row["test_rows"]]
        for row in known[:_WORST]
    ]
    headings = ["client", metrics.label(column), "training rows", "test rows"]
    return table("The clients worst off", headings, rows)


# --- costs ----------------------------------------------------------------------------------------


def seconds_text(seconds: float | None) -> str:
    """A time for people."""
    return "–" if seconds is None else f"{number(seconds)} s"


def traffic_cells(told: Record, rounds: int) -> list[str]:
    """What passes in a round and in all, as `memory.traffic` tells it."""
    up, down, cohort = (told.get(key) for key in ("message_bytes", "server_bytes", "cohort"))
    if up is None or down is None or cohort is None:
        return ["–"] * len(TRAFFIC)
    in_all = (bytes_text(each * cohort * rounds) for each in (up, down))
    return [bytes_text(up), bytes_text(down), number(cohort), *in_all]


def _costs(runs: Mapping[str, seeds.Run]) -> list[Element]:
    rows = []
    for name, run in runs.items():
        told, speed = run.summary, run.summary["rounds_per_second"]
        rows.append([
            name,
            *traffic_cells(told, told["rounds"]),
            *map(seconds_text, (speed and told["rounds"] / speed, told.get("compile_seconds"))),
            number(speed),
            *(bytes_text(told.get(key)) for key in ("peak_bytes", "device_peak_bytes")),
        ])  # fmt: skip
    headings = ["run", *TRAFFIC, *TIMES, "rounds per s", "memory", "of the device"]
    if len(rows) == 1:
        headings, rows = ["what", "how much"], list(zip(headings, rows[0], strict=True))[1:]
    return [table("What it took", headings, rows), paragraph(COUNTED)]


# --- settings, and where it comes from ------------------------------------------------------------


def _settings(systems: Sequence[seeds.System], files: Mapping[str, str]) -> list[Element]:
    """The file of a run; of several, in what their systems differ, above the files."""
    if len(files) == 1:
        return [verbatim(text) for text in files.values()]
    configs = [next(iter(each.runs.values())).config for each in systems]
    rows = [
        [key, *(_shown(config, key) for config in configs)]
        for key in dict.fromkeys(key for config in configs for key in config)
        if key not in ("seed", "resolved", "versions", "stages")
    ]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    rows.append(["seed", *(", ".join(map(str, sorted(each.runs))) for each in systems)])
    headings = ["setting", *(each.label for each in systems)]
    return [
        table("Where they differ", headings, rows, left=len(headings)),
        *(folded(f"{name}/{CONFIG}", verbatim(text)) for name, text in files.items()),
    ]


def _shown(config: Record, key: str) -> str:
    """The value of a setting; "–" where it is not set, or nothing reads it."""
    return str(config.get(key, "–"))


def origin(made: Iterable[tuple[str, Record, str, str]]) -> list[Element]:
    """Commands, fingerprints of the data, and with what it was computed.

    Args:
      made: of each run or sweep its name, settings, command, and the folder of its file.
    """
    commands, rows = [], []
    for name, config, command, folder in made:
        file = str(Path(folder) / (SWEEP if command == "sweep" else CONFIG))
        earlier = [str(stage.get("directory", "DIR")) for stage in config.get("stages", [])[-1:]]
        words = [
            "fedjaxsim",
            command,
            file,
            *(word for each in earlier for word in ("--from", each)),
        ]
        commands.append(f"{shlex.join(words)} --out DIR")
        rows.append((name, config))
    return [
        paragraph(f"With the settings above as {SWEEP if 'sweep' in commands[0] else CONFIG}:"),
        verbatim("\n".join(commands)),
        *provenance(rows),
    ]


def provenance(made: Iterable[tuple[str, Record]]) -> list[Element]:
    """Fingerprints of the data, and with what it was computed.

    Args:
      made: of each run or sweep its name and settings.
    """
    rows, versions = [], {}
    for name, config in made:
        data = config.get("resolved", {}).get("data_fingerprint", "–")
        rows.append([name, str(config.get("seed", "–")), data])
        with_ = ", ".join(f"{key} {value}" for key, value in config.get("versions", {}).items())
        versions[with_] = None
    return [
        table("Whose data", ["of", "seed", "fingerprint"], rows, left=3),
        paragraph(f"Computed with {'; and with '.join(versions)}."),
    ]
