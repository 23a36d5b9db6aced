"""fedjaxsim beside pfl-research and FedJAX, in processes that alternate.

    python benchmarks/peers/compare.py leaf:PATH/TO/femnist/mytest.json.zip [--processes 5]
    python benchmarks/peers/compare.py draw --figure docs/figures/peers.png

Every run is a process, in the order of the table, and the whole table is repeated; the README
beside this file describes runs and settings. pfl and FedJAX are installed from the package index,
in the versions of the requirements files here, into virtual environments. All runs get the same
clients, split once. Where a peer has several ways to use the cores, each is tried for a few rounds,
and the fastest is measured. `draw` draws what was measured.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import tyro
from matplotlib.figure import Figure
from tyro.conf import Positional

import fedjaxsim as fjs
from fedjaxsim.bench.measure import machine
from fedjaxsim.bench.results import spread
from fedjaxsim.data.npz import save_npz
from fedjaxsim.data.transforms import invert
from fedjaxsim.report.files import read_json, write_json
from fedjaxsim.report.plots import COLOURS, STYLE, picture, save

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "peers.json"
TRIAL_ROUNDS, TIME_LIMIT = 2, 180
"""Timed rounds of a trial, and the most seconds of a child."""
Record = dict[str, Any]


class Setting(NamedTuple):
    """One way to run a child: arguments between Python and the script, and the environment."""

    name: str = ""
    launcher: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}


class Run(NamedTuple):
    """A row of the table.

    Attributes:
      script: of this folder.
      what: the name of the run in the script.
      warm: rounds before the clock starts.
      rounds: rounds that are timed.
      peer: the name of its environment; "" for that of this process.
      title: in the picture, with a remark in a second line.
    """

    script: str
    what: str
    warm: int
    rounds: int
    peer: str
    title: tuple[str, str]


RUNS = {
    name: Run(f"{peer}_femnist.py" if peer else "ours.py", what, 2, 10, peer, title)
    for name, what, peer, title in (
        ("fedjaxsim FedAvg, clip and noise", "fedavg", "", ("fedjaxsim, FedAvg", "clip and noise")),
        ("fedjaxsim PMTL, clip and noise", "pmtl", "",
         ("fedjaxsim, PMTL", "a model per client, clip and noise")),
        ("pfl FedAvg", "plain", "pfl", ("pfl-research, FedAvg", "not private")),
        ("pfl FedAvg, clip and noise", "dp", "pfl", ("pfl-research, FedAvg", "clip and noise")),
        ("FedJAX FedAvg", "plain", "fedjax", ("FedJAX, FedAvg", "not private; it has no noise")),
    )
}  # fmt: skip
FIRST = "fedjaxsim FedAvg, clip and noise"
RATIOS = (
    (FIRST, "pfl FedAvg"),
    (FIRST, "pfl FedAvg, clip and noise"),
    (FIRST, "FedJAX FedAvg"),
    ("fedjaxsim PMTL, clip and noise", "pfl FedAvg, clip and noise"),
)
"""Pairs whose rounds per second are divided, within one repetition."""


def settings(cores: int) -> dict[str, tuple[Setting, ...]]:
    """Return the settings to be tried, by peer; "" is fedjaxsim, with one."""
    devices = f"--xla_force_host_platform_device_count={cores}"
    old_cpu = "--xla_cpu_use_thunk_runtime=false"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(cores))
    # Without it, pmap's outputs keep their device axis, which FedJAX does not expect.
    pmap = {"JAX_PMAP_NO_RANK_REDUCTION": "0"}
    one, all_ = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": str(cores)}
    return {
        "": (Setting(),),
        "pfl": (
            Setting("1 worker, 1 thread", (), one),
            Setting(f"1 worker, {cores} threads", (), all_),
            Setting(f"{cores} workers, 1 thread each", torchrun, one),
        ),
        "fedjax": (
            Setting("jit"),
            Setting("pmap", (), pmap | {"XLA_FLAGS": devices}),
            Setting("jit, old CPU runtime", (), {"XLA_FLAGS": old_cpu}),
            Setting("pmap, old CPU runtime", (), pmap | {"XLA_FLAGS": f"{devices} {old_cpu}"}),
        ),
    }


def ready(peer: str, directory: Path) -> Path:
    """Return the Python of a peer's environment, made unless its requirements are in it."""
    requirements = HERE / f"requirements-{peer}.txt"
    environment = directory / f".venv-{peer}"
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    installed = environment / "installed.txt"
    if not installed.exists() or installed.read_text() != requirements.read_text():
        print(f"installing {peer} into {environment}", flush=True)
        venv.create(environment, clear=True, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True
        )
        shutil.copy(requirements, installed)
    return python


def start(run: Run, setting: Setting, python: Path, data: Path, seed: int, **rounds: int) -> Record:
    """Run a child to its end; return its report, or {"error": why there is none}.

    The report is the last line of its output that is a JSON object. `rounds` replace those of the
    run.
    """
    warm, timed = rounds.get("warm", run.warm), rounds.get("timed", run.rounds)
    command = [python, *setting.launcher, HERE / run.script, run.what, "--data", data]
    command += ["--warm", warm, "--rounds", timed, "--seed", seed, "--setting", setting.name]
    try:
        finished = subprocess.run(
            list(map(str, command)), env={**os.environ, **setting.variables},
            capture_output=True, text=True, timeout=TIME_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {TIME_LIMIT} s"}
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if finished.returncode or not lines:
        return {"error": (finished.stderr or finished.stdout or "no output").strip()[-4000:]}
    return json.loads(lines[-1])


def said(report: Record) -> str:
    """Return the speed of a report."""
    return "failed" if "error" in report else f"{report['rounds_per_s']:.3g} rounds/s"


def fastest(peer: str, python: Path, data: Path) -> tuple[Setting, Record]:
    """Return the fastest setting of a peer, and the reports of all.

    Raises:
      RuntimeError: if none of them ran.
    """
    ways = settings(os.cpu_count() or 1)[peer]
    run = next(run for run in RUNS.values() if run.peer == peer)
    trials = {}
    for way in ways if len(ways) > 1 else ():
        trials[way.name] = start(run, way, python, data, 0, warm=2, timed=TRIAL_ROUNDS)
        print(f"trial of {peer}, {way.name}: {said(trials[way.name])}", flush=True)
    ran = [way for way in ways if "error" not in trials.get(way.name, {})]
    if not ran:
        raise RuntimeError("\n".join(f"{name}: {each['error']}" for name, each in trials.items()))
    return max(ran, key=lambda way: trials.get(way.name, {}).get("rounds_per_s", 0)), trials


def ratios(
    repetitions: Sequence[Mapping[str, Record]], pairs: Sequence[tuple[str, str]]
) -> dict[str, Record]:
    """Return ratios of rounds per second, each within one repetition in which both runs ended."""
    found = {}
    for ours, theirs in pairs:
        both = [(each.get(ours, {}), each.get(theirs, {})) for each in repetitions]
        complete = [
            a["rounds_per_s"] / b["rounds_per_s"]
            for a, b in both
            if "rounds_per_s" in a and "rounds_per_s" in b
        ]
        if complete:
            found[f"{ours} / {theirs}"] = spread(complete)._asdict()
    return found


def summarize(repetitions: Sequence[Mapping[str, Record]]) -> Record:
    """Return the median and range over the repetitions of each run's numbers."""
    summary: Record = {}
    for name in repetitions[0]:
        reports = [repetition[name] for repetition in repetitions]
        done = [report for report in reports if "error" not in report]
        if not done:
            summary[name] = {"error": reports[0]["error"]}
            continue
        numbers = ("rounds_per_s", "warm_seconds", "peak_mb")
        summary[name] = {n: spread([r[n] for r in done])._asdict() for n in numbers} | {
            "learned": {
                measure: spread([r["learned"][measure] for r in done])._asdict()
                for measure in done[0]["learned"]
            },
            "setting": done[0]["setting"],
            "done": len(done),
        }
    return summary


def table(summary: Record, quotients: Mapping[str, Record]) -> str:
    """Return both as Markdown."""
    head = ("run", "rounds/s", "warm-up s", "peak MB", "after the last round", "setting")
    rows = [head, ["---"] * len(head)]
    for name, row in summary.items():
        if "error" in row:
            rows.append((name, "failed", "", "", "", reason(row["error"])))
            continue
        learned = ", ".join(f"{m} {v['median']:.3g}" for m, v in row["learned"].items())
        warm, peak = (row[key]["median"] for key in ("warm_seconds", "peak_mb"))
        speed = interval(row["rounds_per_s"])
        rows.append((name, speed, f"{warm:.1f}", f"{peak:.0f}", learned, row["setting"]))
    rows += [(), ("rounds/s of / of", "ratio"), ("---", "---")]
    rows += [(pair, interval(quotient)) for pair, quotient in quotients.items()]
    return "\n".join(f"| {' | '.join(row)} |" if row else "" for row in rows)


def reason(error: str) -> str:
    """Return the line of a traceback that names the exception, or else the last line."""
    lines = error.splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1][:100]


def interval(numbers: Mapping[str, float]) -> str:
    """Return a median with its range."""
    return f"{numbers['median']:.3g} ({numbers['least']:.3g} to {numbers['greatest']:.3g})"


def draw(results: Record) -> Figure:
    """Draw a bar to the median of each run, a dot for each process, and ratios to `FIRST`."""
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x"}):
        cores = results["machine"]["cores"]
        figure = picture(
            f"Training a CNN on FEMNIST's writers, 100 of 206 a round, on {cores} cores", 6.8, 3.1
        )
        axes = figure.subplots()
        for y, (name, run) in enumerate(RUNS.items()):
            median = results["summary"][name]["rounds_per_s"]["median"]
            rates = [each[name]["rounds_per_s"] for each in results["repetitions"] if name in each]
            axes.barh(y, median, 0.62, color="0.72" if run.peer else COLOURS[0])
            axes.plot(rates, [y] * len(rates), "o", ms=3, color="0.15", alpha=0.7)
            ratio = results["ratios"].get(f"{FIRST} / {name}")
            slower = f"   {ratio['median']:.1f} times slower" if ratio else ""
            axes.text(max(rates) + 0.07, y, f"{median:.2f}{slower}", va="center")
            what, remark = run.title
            axes.text(-0.05, y - 0.14, what, ha="right", va="center")
            axes.text(-0.05, y + 0.2, remark, ha="right", va="center", fontsize=7.5, color="0.4")
        axes.set(xlabel="rounds per second", yticks=[], ylim=(len(RUNS) - 0.5, -0.5))
        axes.set_xlim(0, 1.15 * results["summary"][FIRST]["rounds_per_s"]["greatest"])
    return figure


def compare(source: str, processes: int, environments: Path, data: Path) -> Record:
    """Measure everything."""
    clients = invert(fjs.data.load(source, test=0.2, seed=0))
    save_npz(data, clients)
    pythons = {"": Path(sys.executable)} | {p: ready(p, environments) for p in ("pfl", "fedjax")}
    found = {peer: fastest(peer, python, data) for peer, python in pythons.items()}
    repetitions, seconds, loads = [], [], []
    for seed in range(processes):
        begin, reports = time.perf_counter(), {}
        loads.append(os.getloadavg()[0])
        for name, run in RUNS.items():
            reports[name] = start(run, found[run.peer][0], pythons[run.peer], data, seed)
            print(f"repetition {seed + 1}, {name}: {said(reports[name])}", flush=True)
        repetitions.append(reports)
        seconds.append(time.perf_counter() - begin)
    return {
        "machine": {**machine(), "system": platform.platform()},
        "seconds_of_a_repetition": seconds,
        "load_before_a_repetition": loads,
        "summary": summarize(repetitions),
        "ratios": ratios(repetitions, RATIOS),
        "trials": {peer: trials for peer, (_, trials) in found.items() if trials},
        "repetitions": repetitions,
    }


def main(
    source: Positional[str],
    processes: int = 5,
    environments: Path = HERE,
    out: Path = RESULTS,
    figure: Path | None = None,
) -> None:
    """Compare, print tables, write the results and draw them.

    Args:
      source: leaf:PATH of the FEMNIST file; or draw, to measure nothing.
      processes: of each run.
      environments: the folder of the virtual environments.
      out: a JSON file for the results.
      figure: a .png file.
    """
    if source == "draw":
        results = read_json(out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = compare(source, processes, environments, Path(folder) / "clients.npz")
        write_json(out, results)
    print(table(results["summary"], results["ratios"]))
    if figure is not None:
        save(draw(results), figure)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
