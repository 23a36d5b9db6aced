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

from fedjaxsim.bench.ceilings import Ceilings
from fedjaxsim.bench.children import of_script
from fedjaxsim.bench.machine import machine
from fedjaxsim.bench.systems import femnist_cnn
from fedjaxsim.engine.devices import use_devices

WRITERS = 103
SEGMENTS, ROUNDS = 5, 4


def one_process(devices: int) -> dict[str, float]:
    """FLOP/s of the rounds, as they are counted, and of products, on so many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:devices])
    use_devices(devices)
    load = femnist_cnn(None, "fedavg", devices * WRITERS, rounds=ROUNDS)
    state, took = load.init(), []
    for _ in range(1 + SEGMENTS):  # the first, which compiles, is left out
        begin = time.perf_counter()
        state = jax.block_until_ready(load.advance(state, ROUNDS)[0])
        took.append((time.perf_counter() - begin) / ROUNDS)
    seconds = statistics.median(took[1:])
    products = Ceilings(load.devices).flops()
    return {"rounds": load.work.flops / seconds, "products": products, "seconds": seconds}


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
