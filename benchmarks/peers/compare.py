"""fedjaxsim beside Flower, fluke, PFLlib, pfl and FedJAX, in processes that alternate.

    python benchmarks/peers/compare.py --pfllib FOLDER [--short] [--only gru] [--processes 5]
    python benchmarks/peers/compare.py docs/figures/peers.png --processes 0

Four workloads, FedAvg and Ditto. Every cell of the table is a process, and the whole table is
repeated; the README beside this file describes workloads and settings. Peers are installed from the
package index into virtual environments; PFLlib is no package, so FOLDER is a checkout of it. Where
a library has several ways to use the cores, each is tried for a few rounds and the fastest is
measured. The results file is written after each process, and the same command goes on from it.
The second measures nothing and draws.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import child
import matplotlib as mpl
import numpy as np
import tyro
from matplotlib.figure import Figure

import fedjaxsim as fjs
from fedjaxsim.bench.measure import machine, spread
from fedjaxsim.data.npz import save_npz
from fedjaxsim.data.transforms import invert
from fedjaxsim.report.files import read_json, write_json
from fedjaxsim.report.plots import COLOURS, STYLE, picture, save

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "peers.json"
TIME_LIMIT = 240
"""The most seconds of a child."""
FEMNIST = Path(os.environ.get("FEDJAXSIM_DATA", "")) / "femnist" / "mytest.json.zip"
OURS = "fedjaxsim"
Record = dict[str, Any]


class Setting(NamedTuple):
    """One way to run a child: arguments between Python and the script, and the environment."""

    name: str = ""
    launcher: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}


class Library(NamedTuple):
    """What is compared.

    Attributes:
      script: of this folder.
      title: in tables and pictures.
      systems: which of FedAvg and Ditto it has.
      noise: whether FedAvg clips and noises clients' messages.
    """

    script: str
    title: str
    systems: tuple[str, ...] = ("fedavg",)
    noise: bool = False


LIBRARIES = {
    OURS: Library("ours.py", "fedjaxsim", ("fedavg", "ditto"), noise=True),
    "pfl": Library("pfl_rounds.py", "pfl", noise=True),
    "fedjax": Library("fedjax_rounds.py", "FedJAX"),
    "flower": Library("flower_rounds.py", "Flower", noise=True),
    "fluke": Library("fluke_rounds.py", "fluke", ("fedavg", "ditto")),
    "pfllib": Library("pfllib_rounds.py", "PFLlib", ("fedavg", "ditto")),
}
TRIALS = {"softmax": 200, "mlp": 100, "cnn": 10, "gru": 20}
"""Timed rounds of fedjaxsim's trials; a peer's has two."""
TITLES = {
    "softmax": "softmax 784→10, 100 of 1,000 clients",
    "mlp": "MLP 784-100-62, 100 of 206 FEMNIST writers",
    "cnn": "CNN, 100 of 206 FEMNIST writers",
    "gru": "GRU, 80 characters, 10 of 100 clients",
}
SYSTEMS = {"fedavg": "FedAvg", "ditto": "Ditto"}


def settings(cores: int) -> dict[str, tuple[Setting, ...]]:
    """Return the settings to be tried, by library."""
    devices = f"--xla_force_host_platform_device_count={cores}"
    old_cpu = "--xla_cpu_use_thunk_runtime=false"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(cores))
    # Without it, pmap's outputs keep their device axis, which FedJAX does not expect.
    pmap = {"JAX_PMAP_NO_RANK_REDUCTION": "0"}
    one, all_ = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": str(cores)}
    quiet = one | {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    threads = (Setting("1 thread", (), one), Setting(f"{cores} threads", (), all_))
    return {
        OURS: (Setting("one device"), Setting("a device per core")),
        "pfl": (*threads, Setting(f"{cores} workers, 1 thread each", torchrun, one)),
        "fedjax": (
            Setting("jit"),
            Setting("pmap", (), pmap | {"XLA_FLAGS": devices}),
            Setting("jit, old CPU runtime", (), {"XLA_FLAGS": old_cpu}),
            Setting("pmap, old CPU runtime", (), pmap | {"XLA_FLAGS": f"{devices} {old_cpu}"}),
        ),
        "flower": (Setting("1 worker", (), quiet), Setting(f"{cores} workers", (), quiet)),
        "fluke": threads,
        "pfllib": (*threads, Setting("rows in memory, 1 thread", (), one)),
    }


def ready(library: str, directory: Path) -> Path:
    """Return the Python of a peer's environment, made unless its requirements are in it."""
    if library == OURS:
        return Path(sys.executable)
    requirements = HERE / f"requirements-{library}.txt"
    environment = directory / f".venv-{library}"
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    installed = environment / "installed.txt"
    if not installed.exists() or installed.read_text() != requirements.read_text():
        print(f"installing {library} into {environment}", flush=True)
        venv.create(environment, clear=True, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True
        )
        shutil.copy(requirements, installed)
    return python


def data_of(workload: str, femnist: Path, path: Path) -> None:
    """Write the clients of a workload, split once into training and test rows."""
    if workload in ("mlp", "cnn"):
        population = invert(fjs.data.load(f"leaf:{femnist}", test=0.2, seed=0))
        return save_npz(path, population)
    rng, classes = np.random.default_rng(0), child.WORKLOADS[workload].classes
    if workload == "softmax":
        m, rows = 1000, 25
        labels = rng.integers(0, classes, m * rows)
        noise = rng.standard_normal((m * rows, 784), dtype=np.float32)
        centres = rng.standard_normal((classes, 784), dtype=np.float32)
        fields = {"x": 0.1 * centres[labels] + noise, "y": labels.astype(np.int32)}
    else:  # a text in which five symbols may follow each, as many as lines of Shakespeare's roles
        m, rows = 100, 25
        follow = rng.integers(0, classes, (classes, 5))
        text = [rng.integers(0, classes, m * rows)]
        for choice in rng.integers(0, 5, (80, m * rows)):
            text.append(follow[text[-1], choice])
        text = np.stack(text, axis=1).astype(np.int32)
        fields = {"x": text[:, :-1], "y": text[:, 1:]}
    split = np.where(np.arange(rows) < 0.8 * rows, 0, 2)
    clients = np.repeat(np.arange(m), rows)
    return save_npz(path, fjs.Population.from_rows(fields, clients, m, np.tile(split, m)))


def start(
    library: str, workload: str, system: str, setting: Setting, python: Path, *options: Any
) -> Record:
    """Run a child to its end; return its report, or {"error": why there is none}.

    The report is the last line of its output that is a JSON object.
    """
    script, tag = HERE / LIBRARIES[library].script, uuid.uuid4().hex
    command = [python, *setting.launcher, script, workload, system, *options]
    process = subprocess.Popen(
        [*map(str, command), "--setting", setting.name],
        env={**os.environ, **setting.variables, child.TAG: tag},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {TIME_LIMIT} s"}
    finally:
        for folder in child.processes(tag):  # workers that outlive their parent, too
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(folder.name), signal.SIGKILL)
        process.wait()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"error": (errors or out or "no output").strip()[-4000:]}
    return json.loads(lines[-1])


def said(report: Record) -> str:
    """Return the speed of a report."""
    if "error" in report:
        return f"failed: {reason(report['error'])}"
    return f"{report['rounds_per_s']:.3g} rounds/s, {report['cpu_ms']:.3g} CPU ms a round"


def reason(error: str) -> str:
    """Return the line of a traceback that names the exception, or else the last line."""
    lines = error.splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1][:100]


def fastest(trials: Mapping[str, Record]) -> str | None:
    """Return the setting with most rounds a second, None if none ran."""
    ran = {name: each["rounds_per_s"] for name, each in trials.items() if "error" not in each}
    return max(ran, key=ran.__getitem__, default=None)


class Comparison:
    """The measurements, kept in a file."""

    def __init__(self, out: Path, femnist: Path, environments: Path, folder: Path):
        self.out, self.femnist, self.environments, self.folder = out, femnist, environments, folder
        self.record = read_json(out) if out.exists() else {"trials": {}, "cells": {}}

    def trials(self, library: str, workload: str) -> Record:
        """Return the reports of all settings, tried unless they are in the file."""
        key = f"{workload} {library}"
        if key not in self.record["trials"]:
            rounds = TRIALS[workload] if library == OURS else 2
            self.record["trials"][key] = {
                way.name: self.run(library, workload, "fedavg", way, rounds, 0)
                for way in settings(os.cpu_count() or 1)[library]
            }
            write_json(self.out, self.record)
        return self.record["trials"][key]

    def run(self, library, workload, system, setting, rounds, seed) -> Record:
        """Run a child; the clients' file is written first if it is missing."""
        path = self.folder / f"{'femnist' if workload in ('mlp', 'cnn') else workload}.npz"
        if not path.exists():
            data_of(workload, self.femnist, path)
        python = ready(library, self.environments)
        options = "--data", path, "--rounds", rounds, "--seed", seed
        report = start(library, workload, system, setting, python, *options)
        print(f"{workload}, {library}, {system}, {setting.name}: {said(report)}", flush=True)
        return report

    def measure(
        self, library: str, workload: str, system: str, seconds: float | None, seed: int
    ) -> None:
        """Measure a cell for about so many seconds, unless the file has this repetition.

        Without seconds it is two rounds in the first setting.
        """
        cell = self.record["cells"].setdefault(f"{workload} {library} {system}", [])
        if len(cell) > seed:
            return
        ways = {way.name: way for way in settings(os.cpu_count() or 1)[library]}
        best, rounds, trials = next(iter(ways)), 2, {}
        if seconds is not None:
            trials = self.trials(library, workload)
            best = fastest(trials)
        if best is None:
            cell.append(next(iter(trials.values())))
        else:
            if seconds is not None:
                rounds = max(2, min(20_000, round(seconds * trials[best]["rounds_per_s"])))
            load = os.getloadavg()[0]
            report = self.run(library, workload, system, ways[best], rounds, seed)
            cell.append(report | {"load": load})
        write_json(self.out, self.record)


def summarize(cells: Mapping[str, Sequence[Record]]) -> Record:
    """Return the median and range of each cell's numbers, and ratios taken within a repetition."""
    summary: Record = {}
    for name, reports in cells.items():
        workload, _, system = name.split()
        done = [report for report in reports if "error" not in report]
        if not done:
            summary[name] = {"error": reports[0]["error"]}
            continue
        numbers = ("rounds_per_s", "cpu_ms", "warm_seconds", "peak_mb", "accuracy")
        summary[name] = {n: spread([r[n] for r in done])._asdict() for n in numbers}
        summary[name] |= {"setting": done[0]["setting"], "done": len(done)}
        pairs = zip(cells.get(f"{workload} {OURS} {system}", ()), reports, strict=False)
        both = [(a, b) for a, b in pairs if "error" not in a and "error" not in b]
        if both:
            faster = [a["rounds_per_s"] / b["rounds_per_s"] for a, b in both]
            cheaper = [b["cpu_ms"] / a["cpu_ms"] for a, b in both]
            summary[name]["rounds_per_s_ratio"] = spread(faster)._asdict()
            summary[name]["cpu_ms_ratio"] = spread(cheaper)._asdict()
    return summary


def table(summary: Record) -> str:
    """Return the summary as Markdown, a table for each workload."""
    lines = []
    for workload, title in TITLES.items():
        head = (title, "rounds/s", "fedjaxsim is faster by", "CPU ms a round", "less CPU by",
                "peak MB", "first rounds, s", "accuracy", "setting")  # fmt: skip
        rows = [head, ["---"] * len(head)]
        for system, library in ((s, name) for s in SYSTEMS for name in LIBRARIES):
            row = summary.get(f"{workload} {library} {system}")
            if row is None:
                continue
            about = LIBRARIES[library]
            name = f"{about.title} {SYSTEMS[system]}" + ("" if about.noise else ", no noise")
            if "error" in row:
                rows.append((name, "failed", *[""] * 6, reason(row["error"])))
                continue
            median = {key: row[key]["median"] for key in ("cpu_ms", "peak_mb", "warm_seconds")}
            ratio = [
                "" if library == OURS or name_ not in row else interval(row[name_])
                for name_ in ("rounds_per_s_ratio", "cpu_ms_ratio")
            ]
            rows.append((
                name, interval(row["rounds_per_s"]), ratio[0], f"{median['cpu_ms']:.3g}", ratio[1],
                f"{median['peak_mb']:.0f}", f"{median['warm_seconds']:.1f}",
                f"{row['accuracy']['median']:.2f}", row["setting"],
            ))  # fmt: skip
        if len(rows) > 2:
            lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    return "\n".join(lines)


def interval(numbers: Mapping[str, float]) -> str:
    """Return a median with its range."""
    return f"{numbers['median']:.3g} ({numbers['least']:.3g} to {numbers['greatest']:.3g})"


def slower(ratio: float) -> str:
    """Return in words how many times slower a library is."""
    times, word = (ratio, "slower") if ratio >= 1 else (1 / ratio, "faster")
    return f"{times:.{int(times < 10)}f}× {word}"


def draw(summary: Record, cores: int) -> Figure:
    """Draw a bar to the median of each library with FedAvg, with its range."""
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = picture(f"Rounds per second of FedAvg on {cores} CPU cores", 7.4, 4.6)
        for axes, (workload, title) in zip(figure.subplots(2, 2).flat, TITLES.items(), strict=True):
            rows = {name: summary.get(f"{workload} {name} fedavg", {}) for name in LIBRARIES}
            shown = {name: row for name, row in rows.items() if "rounds_per_s" in row}
            order = sorted(shown, key=lambda name: -shown[name]["rounds_per_s"]["median"])
            for y, name in enumerate(order):
                rate = shown[name]["rounds_per_s"]
                axes.barh(y, rate["median"], 0.65, color=COLOURS[0] if name == OURS else "0.75")
                axes.plot([rate["least"], rate["greatest"]], [y, y], color="0.2", lw=1)
                ratio = shown[name].get("rounds_per_s_ratio", {}).get("median")
                beside = "" if name == OURS or not ratio else f"  {slower(ratio)}"
                label = f"{rate['median']:.3g}{beside}"
                axes.text(rate["greatest"] * 1.1, y, label, va="center", fontsize=8)
            axes.set_yticks(
                range(len(order)),
                [LIBRARIES[n].title + ("*" if LIBRARIES[n].noise else "") for n in order],
            )
            axes.set_title(title, fontsize=9)
            least = min((row["rounds_per_s"]["least"] for row in shown.values()), default=1)
            most = max((row["rounds_per_s"]["greatest"] for row in shown.values()), default=1)
            axes.set(xscale="log", xlim=(least / 2, 12 * most), ylim=(len(order) - 0.4, -0.6))
        figure.supxlabel("rounds per second, logarithmic; * with clipping and noise", fontsize=8)
    return figure


def main(
    femnist: Path = FEMNIST,
    pfllib: Path | None = None,
    only: str = "",
    short: bool = False,
    processes: int = 5,
    seconds: float = 4.0,
    environments: Path = HERE,
    out: Path = RESULTS,
    draw_to: tyro.conf.Positional[Path | None] = None,
) -> None:
    """Compare, write the results, print tables and draw them.

    Args:
      femnist: LEAF's FEMNIST file.
      pfllib: a checkout of PFLlib; without it there is no PFLlib.
      only: words that a cell's name must have: workloads, libraries or systems.
      short: one process of two rounds in each cell, without trials, to see that all run.
      processes: of each cell.
      seconds: about how long a process trains.
      environments: the folder of the virtual environments.
      out: a JSON file for the results; a second call goes on from it.
      draw_to: a .png file. With `--processes 0` nothing is measured.
    """
    if pfllib is not None:
        os.environ["PFLLIB"] = str(pfllib.resolve() / "system")
    environments.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(out, femnist, environments.resolve(), Path(folder))
        if short or processes:
            comparison.record["machine"] = {**machine(), "system": platform.platform()}
        for seed in range(1 if short else processes):
            for workload in TITLES:
                for library, about in LIBRARIES.items():
                    for system in about.systems:
                        wanted = set(only.split()) <= {workload, library, system}
                        if wanted and (library != "pfllib" or pfllib is not None):
                            took = None if short else seconds
                            comparison.measure(library, workload, system, took, seed)
    summary = summarize(comparison.record["cells"])
    print(table(summary))
    if draw_to is not None:
        save(draw(summary, comparison.record["machine"]["cores"]), draw_to)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
