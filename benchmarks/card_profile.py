"""Five minutes with a card: the kernels that take the time of each round.

    python benchmarks/card_profile.py                # on a card
    python benchmarks/card_profile.py --rehearse     # tiny sizes on a CPU
    python benchmarks/card_profile.py --markdown     # the tables of runs/card/profile.json

Each workload has a process, which compiles beside the others; then `jax.profiler` traces the rounds
of one call, one process at a time. The tables have the longest operations of a round: how often
they start, and the time that they take, from the trace; `ncu --kernel-name NAME` tells more of one.
What a round takes beyond its kernels is launches and waits. The file is written after each.
"""

import gzip
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
import tyro
from accelerator import WHAT, settings_of
from card import Child, answer, wait_for_go
from common import Record, update

from fedjaxsim.bench.measure import Rounds, machine
from fedjaxsim.cli.printing import print_rows
from fedjaxsim.report.files import read_json
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config

ROUNDS = 8
LONGEST = 12
"""Operations of a table."""


def kernels_of(events: Sequence[Record]) -> dict[str, tuple[int, float]]:
    """Return the number and the microseconds of each device operation of a trace, by its name.

    Operations of a GPU are on its streams; those of a CPU name their instruction.
    """
    on_card = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:GPU" in event["args"]["name"]
    }
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and "Stream" in event["args"]["name"]
    }
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in events:
        if event.get("ph") != "X":
            continue
        on_stream = event["pid"] in on_card and (event["pid"], event["tid"]) in streams
        if on_stream or (not on_card and "hlo_op" in event.get("args", {})):
            number, took = found[event["name"]]
            found[event["name"]] = number + 1, took + event["dur"]
    return dict(found)


def profile(name: str, rehearse: bool) -> None:
    """Make the rounds of a workload, wait for a word, and trace them."""
    experiment = prepare(run_config(**settings_of(name, rehearse)), check_memory=False)
    run = Rounds(experiment.simulation, experiment.hparams)
    state = run.advance(run.start(), ROUNDS)
    wait_for_go(name)
    state = run.advance(state, ROUNDS)
    begin = time.perf_counter()
    state = run.advance(state, ROUNDS)
    wall = 1e6 * (time.perf_counter() - begin) / ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=False):
            run.advance(state, ROUNDS)
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = sorted(kernels_of(events).items(), key=lambda item: -item[1][1])
    answer({
        "microseconds": wall,
        "in kernels": sum(took for _, (_, took) in kernels) / ROUNDS,
        "kernels": sum(number for _, (number, _) in kernels) / ROUNDS,
        "longest": [[n, number / ROUNDS, took / ROUNDS] for n, (number, took) in kernels[:LONGEST]],
        "machine": machine(),
    })  # fmt: skip


def print_tables(path: Path) -> None:
    """Print the longest operations of each workload."""
    for name, found in read_json(path).items():
        if "failed" in found:
            print(f"{name}: {found['failed']}")
            continue
        print(
            f"{name}: {found['microseconds']:.0f} µs a round, {found['in kernels']:.0f} of them in "
            f"{found['kernels']:.0f} kernels"
        )
        rows = [[n, f"{times:g}", f"{took:.1f}"] for n, times, took in found["longest"]]
        print_rows(["operation", "a round", "µs"], rows)


def main(
    workloads: tuple[str, ...] = tuple(WHAT),
    minutes: float = 5.0,
    rehearse: bool = False,
    markdown: bool = False,
    child: str = "",
    out: Path = Path("runs/card"),
) -> None:
    """Profile the rounds of workloads on a card.

    Args:
      workloads: some names of `accelerator.WHAT`.
      minutes: for everything.
      rehearse: tiny sizes, on a CPU.
      markdown: print the tables alone.
      child: the request of a process, for this script alone.
      out: the folder of profile.json.
    """
    if child:
        request = json.loads(child)
        if request["rehearse"]:
            jax.config.update("jax_platforms", "cpu")
        profile(request["workload"], request["rehearse"])
        return
    # Several processes share the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    path, end = out / "profile.json", time.monotonic() + 60 * minutes
    requests = [] if markdown else [{"workload": n, "rehearse": rehearse} for n in workloads]
    started = [Child(["--child", json.dumps(request)], __file__) for request in requests]
    try:
        # Two thirds of the time to compile; a process that compiles would disturb the clock.
        compiled = end - 20 * minutes
        ready = [each.line(compiled - time.monotonic()) for each in started]
        for request, each, found in zip(requests, started, ready, strict=True):
            if "failed" not in found:
                each.go()
                found = each.line(end - time.monotonic())
            each.end()
            update(path, {request["workload"]: found})
    finally:
        for each in started:
            each.end()
    print_tables(path)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
