"""Weak scaling: the CNN on one device pinned to one core, and twice the clients on two of each.

    python benchmarks/weak_scaling.py --out benchmarks/results/weak_scaling.json

FedAvg of the papers' CNN with clip and noise, Poisson cohorts, clients with as many rows as
FEMNIST's writers have: 103 clients, of whom 50 are expected in a round, on one device; 206 and 100
on two. Perfect is twice the work in the same time. Beside it a matrix product on each device. The
two alternate, each in a process of its own that reports the median of its segments.
"""

import os
import statistics
from pathlib import Path

import jax
import tyro
from common import alternate, experiment_of, in_process, show, spreads

from fedjaxsim.bench.ceilings import Ceilings
from fedjaxsim.bench.measure import Rounds, machine
from fedjaxsim.bench.work import work_of
from fedjaxsim.report.files import write_json

WRITERS = 103
SEGMENTS, ROUNDS = 5, 4


def one_process(devices: int) -> dict[str, float]:
    """Return FLOP/s of the rounds, as they are counted, and of products, and seconds a round."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:devices])
    jax.config.update("jax_num_cpu_devices", devices)
    experiment = experiment_of("femnist-cnn-fedavg", clients=devices * WRITERS)
    run = Rounds(experiment.simulation, experiment.hparams)
    state = run.start()
    flops = work_of(experiment, state).flops

    def advance() -> None:
        nonlocal state
        state = run.advance(state, ROUNDS)

    seconds = statistics.median(alternate({"": advance}, SEGMENTS)[""]) / ROUNDS
    products = Ceilings(jax.devices()).flops()
    return {"rounds": flops / seconds, "products": products, "seconds": seconds}


def main(processes: int = 5, out: Path | None = None) -> None:
    """Measure weak scaling from one core to two.

    Args:
      processes: pairs of processes.
      out: a JSON file for the results.
    """
    pairs = []
    for _ in range(processes):
        pairs.append({str(devices): in_process(one_process, devices) for devices in (1, 2)})
        print(pairs[-1], flush=True)
    ratios = [{name: pair["2"][name] / pair["1"][name] for name in pair["1"]} for pair in pairs]
    show("two devices over one", spreads(ratios))
    if out is not None:
        write_json(out, {"machine": in_process(machine), "pairs": pairs})


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
