"""Measure what docs/runs.md promises: kills, the cost of checkpoints, and a soak.

    python benchmarks/reliability.py kills --kills 200
    python benchmarks/reliability.py kills --kills 80 --work sweep tuning
    python benchmarks/reliability.py cost
    python benchmarks/reliability.py soak --minutes 60

Kills end processes by SIGKILL at random moments of their life and compare, once the work is done,
all files without times with those of work that nobody disturbed.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import common
import pyarrow.parquet as pq

import fedjaxsim as fjs
from fedjaxsim.callbacks import Callback, Checkpoints, MetricsFile
from fedjaxsim.report.files import read_json
from fedjaxsim.runs.directory import CHECKPOINTS, CLIENTS, CONFIG, GUARANTEE, METRICS, RunDirectory

RESULTS = common.RESULTS / "reliability.json"
PROBLEM = [
    "--quiet", "--data", "synthetic", "--clients", "20", "--loss", "squared", "--epsilon", "3",
    "--sampling-rate", "0.4", "--local-steps", "1", "--learning-rate", "0.01",
]  # fmt: skip
RUN = ["run", *PROBLEM, "--rounds", "1000", "--eval-every", "10", "--checkpoint-every", "10"]
LARGE = [
    "run", "--quiet", "--data", "random", "--clients", "1000000", "--rows", "2", "--shape", "8",
    "--test-fraction", "0.5", "--epsilon", "3", "--sampling-rate", "0.0001", "--local-steps", "1",
    "--rounds", "400", "--eval-every", "100", "--checkpoint-every", "100",
]  # fmt: skip
SWEEP = """
data = "synthetic-stream"
clients = 20
algorithm = "ppsgd"
loss = "squared"
sampling-rate = 0.5
rounds = 1000
eval-every = 20
[sweep]
seed = [3, 4]
noise-multiplier = [0, 5]
learning-rate = [0.1, 0.4]
"""


class Work(NamedTuple):
    """One kind of work that is killed.

    Attributes:
      commands: the command of each process, given the directory.
      content: the results without times, given the directory.
      finished: whether the directory, whose process was killed, holds everything.
      resumes: whether `fedjaxsim resume` continues it; otherwise the same commands do.
    """

    commands: Callable[[Path], list[list[str]]]
    content: Callable[[Path], list[bytes]]
    finished: Callable[[Path], bool] = lambda out: RunDirectory(out).is_finished()
    resumes: bool = True


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measure", choices=("kills", "cost", "soak"))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--work", nargs="+", default=None, help="kinds of work to kill")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.measure == "kills":
            found = kills(Path(folder), options.kills, options.work)
        elif options.measure == "cost":
            found = cost(Path(folder))
        else:
            found = soak(Path(folder), 60 * options.minutes)
    if options.measure == "kills" and options.out.exists():
        found = read_json(options.out).get("kills", {}) | found
    common.update(options.out, {options.measure: found})


def kills(folder: Path, total: int, names: Sequence[str] | None) -> common.Record:
    """Kill kinds of work (None for each) until there were `total` kills; return a line for each."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "programs")
    kinds = {name: work for name, work in kinds_of(folder).items() if name in (names or [name])}
    chance, lines = random.Random(0), common.Record()
    print(f"{'work':14} kills  runs  identical")
    for index, (name, work) in enumerate(kinds.items()):
        whole = folder / f"{name}-whole"
        begin = time.monotonic()
        finish(start(work.commands(whole)))
        length = time.monotonic() - begin
        killed = runs = same = 0
        while killed < total * (index + 1) // len(kinds) - total * index // len(kinds):
            out, ended = folder / f"{name}-{runs}", False
            while not ended and not work.finished(out):
                processes = start(again(work, out))
                ended = kill_after(processes, chance.uniform(0, length), chance)
                killed += not ended
            runs += 1
            same += work.content(out) == work.content(whole)
            shutil.rmtree(out)
        lines[name] = {"kills": killed, "runs": runs, "identical": same}
        print(f"{name:14} {killed:5}  {runs:4}  {same:9}", flush=True)
    return lines


def kinds_of(folder: Path) -> dict[str, Work]:
    """Return every kind of work, by name."""
    file = folder / "sweep.toml"
    file.write_text(SWEEP, encoding="utf-8")
    sweep = ["sweep", str(file), "--quiet", "--checkpoint-every", "20"]
    tune = [
        "tune", *PROBLEM, "--rounds", "20", "--eval-every", "2", "--wrt", "learning-rate",
        "--seeds", "2", "--steps", "6",
    ]  # fmt: skip

    def alone(command: list[str]) -> Callable[[Path], list[list[str]]]:
        return lambda out: [[*command, "--out", str(out)]]

    def pair(out: Path) -> list[list[str]]:
        where = ["--coordinator", f"127.0.0.1:{random.randrange(20_000, 32_000)}"]
        where += ["--processes", "2", "--devices", "1", "--out", str(out)]
        return [[*RUN, *where, "--process", str(index)] for index in range(2)]

    return {
        "run": Work(alone(RUN), of_run),
        "streamed run": Work(alone([*RUN, "--streamed"]), of_run),
        "two processes": Work(pair, of_run),
        "a million": Work(alone(LARGE), of_run),
        "sweep": Work(alone(sweep), of_sweep, lambda out: False, resumes=False),
        "tuning": Work(alone(tune), of_tuning, is_tuned, resumes=False),
    }


def of_run(out: Path) -> list[bytes]:
    """Return the files of a run without times, and its last checkpoint."""
    state = RunDirectory(out).checkpoints().last().file.read_bytes()
    return [state, *((out / name).read_bytes() for name in (METRICS, GUARANTEE, CLIENTS))]


def of_sweep(out: Path) -> list[bytes]:
    """Return the results of a sweep."""
    return [str(pq.read_table(out / "results.parquet").to_pylist()).encode()]


def of_tuning(out: Path) -> list[bytes]:
    """Return the files of a tuning."""
    return [(out / name).read_bytes() for name in ("path.json", "tuned.toml")]


def is_tuned(out: Path) -> bool:
    """Return whether a tuning is finished."""
    path = out / "path.json"
    return path.exists() and "stopped" in json.loads(path.read_text())


def again(work: Work, out: Path) -> list[list[str]]:
    """Return the commands that begin or continue some work."""
    commands = work.commands(out)
    if not (work.resumes and (out / CONFIG).exists()):
        return commands
    kept = ("--coordinator", "--processes", "--process", "--devices", "--checkpoint-every")
    return [
        ["resume", str(out), "--quiet"]
        + [word for i, flag in enumerate(each) if flag in kept for word in each[i : i + 2]]
        for each in commands
    ]


def start(commands: list[list[str]]) -> list[subprocess.Popen[bytes]]:
    """Start a process for each command line."""
    words = [sys.executable, "-m", "fedjaxsim"]
    return [
        subprocess.Popen([*words, *each], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for each in commands
    ]


def finish(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for processes, which must succeed."""
    for each in processes:
        error = each.communicate()[1]
        if each.returncode:
            raise RuntimeError(error.decode())


def kill_after(
    processes: list[subprocess.Popen[bytes]], seconds: float, chance: random.Random
) -> bool:
    """Kill one of the processes unless all end before; return whether they did."""
    victim = chance.choice(processes)
    try:
        victim.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        victim.kill()
        for each in processes:
            each.communicate()
        return False
    finish(processes)
    return True


def small() -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    """Make a simulation whose rounds take a few milliseconds."""
    population = common.random_population(200, 20, 50, 10, test=0.2)
    task = fjs.tasks.softmax(fjs.models.linear((50,), 10), num_classes=10)
    batches = fjs.Minibatches(10, steps=2)
    sim = fjs.Simulation(fjs.pmtl(task), population, fjs.poisson(0.3), batches)
    values = {"learning_rate": 0.05, "lam": 0.1, "clip": 1.0, "noise_multiplier": 1.0}
    return sim, common.read_by(sim, {**values, "sampling_rate": 0.3})


def cost(folder: Path) -> common.Record:
    """Compare runs of 2,000 rounds with and without a checkpoint every 100 rounds."""
    sim, hparams = small()
    rounds, forms = 2000, {}
    for name in ("without", "with"):

        def run(name: str = name) -> None:
            out = Path(tempfile.mkdtemp(dir=folder))
            metrics = MetricsFile(out / METRICS)
            kept = [Checkpoints(out / CHECKPOINTS, [metrics], every=100)] * (name == "with")
            sim.run(sim.init(0, hparams), hparams, rounds, eval_every=100,
                    callbacks=[metrics, *kept])  # fmt: skip

        forms[name] = run
    took = common.alternate(forms, 5)
    speeds = [{name: rounds / each[i] for name, each in took.items()} for i in range(5)]
    found = common.spreads([{**each, "ratio": each["with"] / each["without"]} for each in speeds])
    common.show("rounds/s without and with a checkpoint every 100 rounds", found)
    return found


class Meter(Callback):
    """Note memory, file descriptors, disk and speed, sixty times; end after some seconds."""

    def __init__(self, folder: Path, seconds: float):
        self._folder, self._step, self._end = folder, seconds / 60, time.monotonic() + seconds
        self.rows, self._last = list[common.Record](), (0, time.monotonic(), time.process_time())

    def segment(self, state: object, segment: fjs.Segment) -> bool:
        """Note a row if it is time."""
        (round_, then, used), now = self._last, time.monotonic()
        if now - then >= self._step:
            files = [path.stat().st_size for path in self._folder.rglob("*") if path.is_file()]
            self.rows.append({
                "rounds_per_second": (segment.round - round_) / (now - then),
                "rounds_per_core_second": (segment.round - round_) / (time.process_time() - used),
                "bytes": common.anonymous(),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "checkpoint_bytes": sum(files) - (self._folder / METRICS).stat().st_size,
            })  # fmt: skip
            self._last = segment.round, now, time.process_time()
        return now < self._end


def soak(folder: Path, seconds: float) -> common.Record:
    """Run with a checkpoint every 10 rounds; return the first and the last tenth of the rows."""
    sim, hparams = small()
    metrics, meter = MetricsFile(folder / METRICS), Meter(folder, seconds)
    kept = Checkpoints(folder / CHECKPOINTS, [metrics], every=10)
    sim.run(sim.init(0, hparams), hparams, 10**8, eval_every=10, callbacks=[metrics, kept, meter],
            keep=1)  # fmt: skip
    rows = meter.rows[1:]  # the first one has compiled
    tenth = max(1, len(rows) // 10)
    found = {"first": common.spreads(rows[:tenth]), "last": common.spreads(rows[-tenth:])}
    for name, each in found.items():
        common.show(f"{name} tenth of {seconds / 60:g} minutes", each)
    return found


if __name__ == "__main__":
    main()
