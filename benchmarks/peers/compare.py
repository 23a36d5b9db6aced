"""fedjaxsim beside pfl-research, FedJAX and plain numpy, in processes that alternate.

    python benchmarks/peers/compare.py leaf:PATH/TO/femnist/mytest.json.zip [--processes 5]
    python benchmarks/peers/compare.py text --out benchmarks/results/peers_text.json

Every run is a process of its own, in the order of the table, and the whole table is repeated; see
the README beside this file for what is run and with which settings. pfl and FedJAX are installed
from the package index, in the versions of the requirements files here, into virtual environments
of their own. All of them get the same clients, split once; those of `text` have random characters.
Where a peer has several ways to use the cores, each is tried once for a few rounds, and the fastest
runs from then on.
"""

import argparse
import dataclasses
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import child

from fedjaxsim.bench.measure import machine
from fedjaxsim.bench.results import spread
from fedjaxsim.data import load
from fedjaxsim.data.npz import save_npz

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "peers.json"
TRIAL_ROUNDS, TIME_LIMIT = 2, 180
"""Timed rounds of a trial, and seconds after which a child is given up."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run a child: what stands between Python and the script, and the environment."""

    name: str = ""
    launcher: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Run:
    """A row of the table.

    Attributes:
      script: of this folder.
      what: which of the runs that the script knows.
      warm: rounds before the clock starts.
      rounds: rounds that are timed.
      peer: whose environment; "" for that of this process.
    """

    script: str
    what: str
    warm: int
    rounds: int
    peer: str = ""


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
_OLD_CPU = "--xla_cpu_use_thunk_runtime=false"


def settings(cores: int, *, convolutions: bool = True) -> dict[str, tuple[Setting, ...]]:
    """The ways to be tried, by peer; "" is ourselves, with one way.

    XLA's older CPU runtime can be faster for convolutions, and is tried for them alone.
    """
    devices = f"--xla_force_host_platform_device_count={cores}"
    # Without the first, pmap's outputs keep their device axis, which FedJAX does not expect.
    pmap = ("JAX_PMAP_NO_RANK_REDUCTION", "0")
    older = (
        Setting("jit, old CPU runtime", (), (("XLA_FLAGS", _OLD_CPU),)),
        Setting("pmap, old CPU runtime", (), (pmap, ("XLA_FLAGS", f"{devices} {_OLD_CPU}"))),
    )
    return {
        "": (Setting(),),
        "pfl": (
            Setting("1 worker, 1 thread", (), (("OMP_NUM_THREADS", "1"),)),
            Setting(f"1 worker, {cores} threads", (), (("OMP_NUM_THREADS", str(cores)),)),
            Setting(
                f"{cores} workers, 1 thread each",
                (*_TORCHRUN, str(cores)),
                (("OMP_NUM_THREADS", "1"),),
            ),
        ),
        "fedjax": (
            Setting("jit"),
            Setting("pmap", (), (pmap, ("XLA_FLAGS", devices))),
            *(older if convolutions else ()),
        ),
    }


RUNS = {
    "fedjaxsim FedAvg, clip and noise": Run("ours.py", "fedavg", 6, 6),
    "pfl FedAvg": Run("pfl_femnist.py", "plain", 2, 10, "pfl"),
    "pfl FedAvg, clip and noise": Run("pfl_femnist.py", "dp", 2, 10, "pfl"),
    "FedJAX FedAvg": Run("fedjax_femnist.py", "plain", 2, 10, "fedjax"),
    "fedjaxsim PMTL, clip and noise": Run("ours.py", "pmtl", 6, 6),
    "numpy PMTL, linear": Run("numpy_loops.py", "pmtl", 30, 30),
    "fedjaxsim PMTL, linear": Run("ours.py", "pmtl-linear", 30, 30),
    "numpy PP-SGD": Run("numpy_loops.py", "ppsgd", 100, 100),
    "fedjaxsim PP-SGD": Run("ours.py", "ppsgd", 100, 100),
}
RATIOS = (
    ("fedjaxsim FedAvg, clip and noise", "pfl FedAvg"),
    ("fedjaxsim FedAvg, clip and noise", "pfl FedAvg, clip and noise"),
    ("fedjaxsim FedAvg, clip and noise", "FedJAX FedAvg"),
    ("fedjaxsim PMTL, clip and noise", "pfl FedAvg, clip and noise"),
    ("fedjaxsim PMTL, linear", "numpy PMTL, linear"),
    ("fedjaxsim PP-SGD", "numpy PP-SGD"),
)
"""Whose rounds per second are divided by whose, within one repetition."""

TEXT = "text"
TEXT_RUNS = {
    "fedjaxsim FedAvg, LSTM, clip and noise": Run("ours.py", "lstm", 2, 2),
    "FedJAX FedAvg, LSTM": Run("fedjax_text.py", "plain", 2, 2, "fedjax"),
}
TEXT_RATIOS = (("fedjaxsim FedAvg, LSTM, clip and noise", "FedJAX FedAvg, LSTM"),)
"""Likewise, where the source is `text`."""


# --- environments and data ------------------------------------------------------------------------


def ready(peer: str, directory: Path) -> Path:
    """The Python of a peer's environment, which is made unless its requirements are in it."""
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


def write_clients(source: str, path: Path) -> None:
    """The clients for everybody: of FEMNIST a fifth of the rows to test on, ink 1 on paper 0."""
    if source == TEXT:
        sizes = {"shape": (child.LENGTH,), "rows": (24,)}  # four of which are for testing
        kinds = {"labels": child.CHARACTERS, "tokens": child.CHARACTERS}
        given: dict[str, Any] = {"num_clients": 100, **sizes, **kinds}
        save_npz(path, load("random", test=1 / 6, **given))
        return
    clients = load(source, test=0.2, seed=0)
    fields = {"x": 1 - clients.fields["x"], "y": clients.fields["y"]}
    save_npz(path, dataclasses.replace(clients, fields=fields))


# --- children -------------------------------------------------------------------------------------


def last_report(output: str) -> dict[str, Any]:
    """The report of a child: the last line of its output that is a JSON object.

    Raises:
      ValueError: if there is none.
    """
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise ValueError(f"a child printed no report, but {output[-500:]!r}")


def start(
    run: Run, setting: Setting, python: Path, data: Path, warm: int, rounds: int, seed: int
) -> dict[str, Any]:
    """Runs a child to its end; its report, or {"error": why there is none}."""
    command = [python, *setting.launcher, HERE / run.script, run.what, "--data", data]
    command += ["--warm", str(warm), "--rounds", str(rounds), "--seed", str(seed)]
    try:
        finished = subprocess.run(
            [*map(str, command), "--setting", setting.name],
            env={**os.environ, **dict(setting.variables)},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {TIME_LIMIT} s"}
    if finished.returncode:
        return {"error": (finished.stderr or finished.stdout or "no output").strip()[-4000:]}
    return last_report(finished.stdout)


def fastest(trials: Mapping[str, Mapping[str, Any]]) -> str:
    """The name of the setting with the most rounds per second.

    Raises:
      RuntimeError: if none of them ran.
    """
    ran = {name: trial["rounds_per_s"] for name, trial in trials.items() if "error" not in trial}
    if not ran:
        reasons = "\n".join(f"{name}: {trial['error']}" for name, trial in trials.items())
        raise RuntimeError(f"no setting ran:\n{reasons}")
    return max(ran, key=lambda name: ran[name])


# --- numbers --------------------------------------------------------------------------------------


def ratios(
    repetitions: Sequence[Mapping[str, Mapping[str, Any]]], pairs: Iterable[tuple[str, str]]
) -> dict[str, dict[str, float]]:
    """Ratios of rounds per second, each within one repetition; those that failed are left out.

    Args:
      repetitions: of each, the reports by the name of the run.
      pairs: (whose, by whose).
    """
    found = {}
    for pair in pairs:
        both = [[repetition.get(name, {}) for name in pair] for repetition in repetitions]
        complete = [
            a["rounds_per_s"] / b["rounds_per_s"]
            for a, b in both
            if "rounds_per_s" in a and "rounds_per_s" in b
        ]
        if complete:
            found[" / ".join(pair)] = spread(complete)._asdict()
    return found


def summarize(repetitions: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Median and range over the repetitions of each run's numbers."""
    summary = {}
    for name in repetitions[0]:
        reports = [repetition[name] for repetition in repetitions]
        done = [report for report in reports if "error" not in report]
        if not done:
            summary[name] = {"error": reports[0]["error"]}
            continue
        numbers = ("rounds_per_s", "warm_seconds", "peak_mb")
        summary[name] = {n: spread([r[n] for r in done])._asdict() for n in numbers}
        measures = done[0]["learned"]
        summary[name]["learned"] = {
            m: spread([r["learned"][m] for r in done])._asdict() for m in measures
        }
        summary[name]["setting"] = done[0]["setting"]
        summary[name]["done"] = len(done)
    return summary


def table(summary: Mapping[str, Any], quotients: Mapping[str, Mapping[str, float]]) -> str:
    """Both as Markdown."""
    lines = [
        "| run | rounds/s | warm-up s | peak MB | after the last round | setting |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in summary.items():
        if "error" in row:
            lines.append(f"| {name} | failed | | | | {reason(row['error'])} |")
            continue
        measures = row["learned"].items()
        learned = ", ".join(f"{m.replace('_', ' ')} {v['median']:.3g}" for m, v in measures)
        lines.append(
            f"| {name} | {interval(row['rounds_per_s'])} | {row['warm_seconds']['median']:.1f} "
            f"| {row['peak_mb']['median']:.0f} | {learned} | {row['setting']} |"
        )
    lines += ["", "| rounds/s of / of | ratio |", "|---|---|"]
    lines += [f"| {pair} | {interval(quotient)} |" for pair, quotient in quotients.items()]
    return "\n".join(lines)


def reason(error: str) -> str:
    """The line of a traceback that names the exception, or else the last line."""
    lines = error.splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1][:100]


def interval(numbers: Mapping[str, float]) -> str:
    return f"{numbers['median']:.3g} ({numbers['least']:.3g} to {numbers['greatest']:.3g})"


# --- the comparison -------------------------------------------------------------------------------


def choose(
    runs: Mapping[str, Run], pythons: Mapping[str, Path], data: Path
) -> tuple[dict[str, Setting], dict[str, Any]]:
    """The fastest setting of each peer, and what all of them gave."""
    chosen, trials = {}, {}
    known = settings(os.cpu_count() or 1, convolutions=runs is not TEXT_RUNS)
    for peer in pythons:
        ways = known[peer]
        if len(ways) == 1:
            chosen[peer] = ways[0]
            continue
        trials[peer] = {}
        run = next(run for run in runs.values() if run.peer == peer)
        for way in ways:
            report = start(run, way, pythons[peer], data, 2, TRIAL_ROUNDS, 0)
            trials[peer][way.name] = report
            rate = f"{report['rounds_per_s']:.3g} rounds/s" if "error" not in report else "failed"
            print(f"trial of {peer}, {way.name}: {rate}", flush=True)
        best = fastest(trials[peer])
        chosen[peer] = next(way for way in ways if way.name == best)
    return chosen, trials


def compare(args: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Everything that is measured."""
    runs, pairs = (TEXT_RUNS, TEXT_RATIOS) if args.source == TEXT else (RUNS, RATIOS)
    peers = sorted({run.peer for run in runs.values()} - {""})
    pythons = {"": Path(sys.executable)} | {p: ready(p, args.environments) for p in peers}
    write_clients(args.source, data)
    chosen, trials = choose(runs, pythons, data)
    repetitions, seconds, loads = [], [], []
    for seed in range(args.processes):
        begin, reports = time.perf_counter(), {}
        loads.append(os.getloadavg()[0])
        for name, run in runs.items():
            report = start(
                run, chosen[run.peer], pythons[run.peer], data, run.warm, run.rounds, seed
            )
            reports[name] = report
            rate = f"{report['rounds_per_s']:.3g} rounds/s" if "error" not in report else "failed"
            print(f"repetition {seed + 1}, {name}: {rate}", flush=True)
        repetitions.append(reports)
        seconds.append(time.perf_counter() - begin)
    return {
        "machine": {**machine(), "system": platform.platform()},
        "seconds_of_a_repetition": seconds,
        "load_before_a_repetition": loads,
        "summary": summarize(repetitions),
        "ratios": ratios(repetitions, pairs),
        "trials": trials,
        "repetitions": repetitions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="leaf:PATH of the FEMNIST file, or text")
    parser.add_argument("--processes", type=int, default=5, help="of each run")
    parser.add_argument(
        "--environments", type=Path, default=HERE, help="where the virtual environments lie"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = compare(args, Path(folder) / "clients.npz")
    print("\n" + table(results["summary"], results["ratios"]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
