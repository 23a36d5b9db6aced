"""Weak scaling: the CNN on one device pinned to one core, and twice the clients on two of each.

FedAvg of the papers' CNN with clip and noise, Poisson cohorts, clients with as many rows as
FEMNIST's writers have: 103 clients, of whom 50 are expected in a round, on one device; 206 and 100
on two. Perfect is twice the work in the same time. Beside it a matrix product of each device's own,
measured likewise: what two cores of this machine give.

    python benchmarks/weak_scaling.py [--processes 5] [--out benchmarks/results/weak_scaling.json]

The two alternate, each in a process of its own that reports the median of its segments. The parent
prints medians and ranges over the processes, and of the ratio between neighbours.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import jax
from common import experiment_of, of_script

from fedjaxsim.bench.ceilings import Ceilings
from fedjaxsim.bench.measure import Rounds, machine
from fedjaxsim.bench.work import work_of

WRITERS = 103
SEGMENTS, ROUNDS = 5, 4


def one_process(devices: int) -> dict[str, float]:
    """FLOP/s of the rounds, as they are counted, and of products, on so many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:devices])
    jax.config.update("jax_num_cpu_devices", devices)
    experiment = experiment_of("femnist-cnn-fedavg", clients=devices * WRITERS)
    run = Rounds(experiment.simulation, experiment.hparams)
    state, took = run.start(), []
    flops = work_of(experiment, state).flops
    for _ in range(1 + SEGMENTS):  # the first, which compiles, is left out
        begin = time.perf_counter()
        state = run.advance(state, ROUNDS)
        took.append((time.perf_counter() - begin) / ROUNDS)
    seconds = statistics.median(took[1:])
    products = Ceilings(jax.devices()).flops()
    return {"rounds": flops / seconds, "products": products, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(one_process(args.child)))
        return
    pairs = []
    for _ in range(args.processes):
        pairs.append({str(devices): of_script(__file__, devices) for devices in (1, 2)})
        print(json.dumps(pairs[-1]), flush=True)
    for what in ("rounds", "products"):
        one, two = ([1e-9 * pair[devices][what] for pair in pairs] for devices in ("1", "2"))
        ratios = [after / before for before, after in zip(one, two, strict=True)]
        print(
            f"{what:9s} {statistics.median(one):6.1f} GFLOP/s on one, {statistics.median(two):6.1f}"
            f" on two: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )
    if args.out is not None:
        found = {"machine": machine(), "pairs": pairs}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
