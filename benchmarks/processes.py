"""Whether two processes that compute runs together ever wait for each other for ever, or differ.

    python benchmarks/processes.py --starts 20 --runs 10 --out benchmarks/results/processes.json

Starts two processes over loopback, which compute runs one after another, with evaluations and
checkpoints, and end; and that again and again. A pair that has not ended after `LIMIT` seconds
counts as hanging. Results are added to those in the file.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event

LIMIT = 240
ROUNDS, EVERY, DEVICES = 20, 2, 2


def child(index: int, port: int, runs: int, folder: str) -> None:
    """One of two processes: computes runs with other seeds, and compares what came of them."""
    from fedjaxsim.commands.compiled import keep_compiled_programs
    from fedjaxsim.engine import devices, processes

    devices.use_devices(DEVICES)
    processes.join(f"127.0.0.1:{port}", 2, index)
    keep_compiled_programs()

    import jax

    from fedjaxsim.callbacks import Cadence
    from fedjaxsim.runs.build import prepare
    from fedjaxsim.runs.directory import RunDirectory
    from fedjaxsim.runs.execute import execute
    from fedjaxsim.runs.fingerprints import digest
    from fedjaxsim.runs.settings import run_config

    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - progress
    simulation = None
    for run in range(runs):
        config = run_config(
            data="synthetic", clients=12, loss="squared", sampling_rate=0.4, learning_rate=0.01,
            local_steps=1, noise_multiplier=1.0, rounds=ROUNDS, eval_every=EVERY,
        )  # fmt: skip
        experiment = prepare(config, simulation)
        simulation = experiment.simulation
        directory = RunDirectory.create(Path(folder) / str(run))
        processes.agree({})  # the directory is there
        cadence = Cadence(rounds=2 * EVERY)
        done = execute(experiment, directory, Event(), quiet=True, cadence=cadence)
        shared = processes.to_host(jax.tree.leaves((done.state.shared, done.state.personal)))
        assert done.summary["rounds"] == ROUNDS
        assert len(set(processes.from_all(digest(shared)))) == 1


def pair(runs: int) -> tuple[str, float]:
    """How two processes ended, "done", "failed" or "hung", and after how many seconds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = [str(port), str(runs), folder]
        both = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", str(index), *words],
                stdout=subprocess.DEVNULL,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            for index in range(2)
        ]
        try:
            for each in both:
                each.wait(timeout=max(1.0, LIMIT - (time.perf_counter() - begin)))
        except subprocess.TimeoutExpired:
            for each in both:
                each.kill()
            return "hung", time.perf_counter() - begin
    ended = "failed" if any(each.returncode for each in both) else "done"
    return ended, time.perf_counter() - begin


def main() -> None:
    """Adds pairs to a file of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/processes.json"))
    parser.add_argument("--child", nargs=4, metavar=("INDEX", "PORT", "RUNS", "FOLDER"))
    given = parser.parse_args()
    if given.child is not None:
        index, port, runs, folder = given.child
        child(int(index), int(port), int(runs), folder)
    else:
        repeat(given.starts, given.runs, given.out)


def repeat(starts: int, runs: int, out: Path) -> None:
    """Adds so many pairs to a file of results."""
    import jax

    same = {"jax": jax.__version__, "cores": os.cpu_count(), "processes": 2,
            "devices_of_each": DEVICES, "rounds_of_a_run": ROUNDS,
            "evaluations_of_a_run": ROUNDS // EVERY}  # fmt: skip
    pairs = json.loads(out.read_text(encoding="utf-8"))["pairs"] if out.exists() else []
    for _ in range(starts):
        ended, seconds = pair(runs)
        pairs.append({"runs": runs, "ended": ended, "seconds": round(seconds, 1)})
        whole = [each["runs"] for each in pairs if each["ended"] == "done"]
        counts = {"starts": len(pairs), "ended": len(whole), "runs": sum(whole)}
        text = json.dumps({**same, **counts, "pairs": pairs}, indent=1)
        out.write_text(f"{text}\n", encoding="utf-8")
        print(ended, f"{seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
