"""Where the time of FedAvg with the papers' CNN goes, with clipping and noise, on all cores.

    python benchmarks/cnn_profile.py [--processes 5] [--out FILE]

Four loads, each of which has one cost more than the one before:

    kernel   gradients and SGD steps on full batches of 10, on every device by itself
    clients  100 clients with three full batches each, all of whom take part: a client starts from
             the billboard and ends in clip and sum, a round in noise and a server step
    cohorts  the same in Poisson cohorts of 100 out of 206: devices wait for the one that drew more
    FEMNIST  206 writers of 5 to 69 images: the last batch of each is partial

Each is timed right beside the ceiling, the rate of a product of two 2048 × 2048 matrices on each
device. The fraction of it that is reached counts the products of examples that exist, as
`fedjaxsim bench` does. Medians over repetitions, and medians and ranges over
processes.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import experiment_of, of_script, use_all_cores
from jax.sharding import AxisType, Mesh, PartitionSpec

from fedjaxsim import Batch
from fedjaxsim.bench.ceilings import Ceilings, seconds
from fedjaxsim.bench.measure import Rounds, machine
from fedjaxsim.bench.results import spread
from fedjaxsim.bench.work import flops_of_gradient, work_of
from fedjaxsim.runs.build import Experiment

WORKLOAD = "femnist-cnn-fedavg"
FULL = {"rows": (33,), "test_fraction": 0.1}
"""Clients with 30 rows for training: three full batches."""
ROUNDS, STEPS = 4, 100
RESULTS = Path(__file__).parent / "results" / "cnn_profile.json"


class Timed(NamedTuple):
    """A call, and the floating-point operations of its products."""

    run: Callable[[], Any]
    flops: float


def kernel() -> Timed:
    """Steps of SGD on one batch, on every device by itself."""
    experiment = experiment_of(WORKLOAD)
    simulation, rate = experiment.simulation, float(experiment.hparams.learning_rate)
    task, size = simulation.task, simulation.minibatches.size
    rows = {name: jnp.asarray(v[:size]) for name, v in simulation.population.fields.items()}
    batch = Batch(rows, jnp.ones(size))

    def steps(params):
        def step(_, params):
            gradient = jax.grad(task.loss)(params, batch)
            return jax.tree.map(lambda p, g: p - rate * g, params, gradient)

        return jax.lax.fori_loop(0, STEPS, step, params)

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("devices",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("devices")

    def of_device(params):
        after = steps(jax.tree.map(lambda leaf: leaf[0], params))
        return jax.tree.map(lambda leaf: leaf[None], after)

    on_each = jax.jit(
        jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    params = jax.vmap(task.init)(jax.random.split(jax.random.key(0), len(devices)))
    work = STEPS * flops_of_gradient(simulation) * len(devices)
    return Timed(lambda: jax.block_until_ready(on_each(params)), work)


def rounds_of(experiment: Experiment) -> Timed:
    """Some rounds of a run, again and again."""
    run = Rounds(experiment.simulation, experiment.hparams)
    state = run.start()
    flops = ROUNDS * work_of(experiment, state).flops

    def advance():
        nonlocal state
        state = run.advance(state, ROUNDS)

    return Timed(advance, flops)


LOADS: dict[str, Callable[[], Timed]] = {
    "kernel": kernel,
    "clients": lambda: rounds_of(experiment_of(WORKLOAD, **FULL, clients=100, sampling="full")),
    "cohorts": lambda: rounds_of(experiment_of(WORKLOAD, **FULL)),
    "FEMNIST": lambda: rounds_of(experiment_of(WORKLOAD)),
}


def child(repeats: int) -> dict[str, Any]:
    """Fractions of the ceiling by load, medians of alternating repetitions."""
    use_all_cores()
    timed = {name: make() for name, make in LOADS.items()}
    for each in timed.values():
        each.run()
    ceilings = Ceilings(jax.devices())
    fractions: dict[str, list[float]] = {name: [] for name in timed}
    rates = []
    for _ in range(repeats):
        for name, each in timed.items():
            took = seconds(each.run)
            rates.append(ceilings.flops())
            fractions[name].append(each.flops / took / rates[-1])
    medians = {name: float(np.median(values)) for name, values in fractions.items()}
    return {"machine": machine(), "gemm_gflops": float(np.median(rates)) / 1e9, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.repeats)))
        return
    found = [of_script(__file__, "--repeats", args.repeats) for _ in range(args.processes)]
    spreads = {
        name: spread([each[name] for each in found])._asdict() for name in ("gemm_gflops", *LOADS)
    }
    for name, numbers in spreads.items():
        print(f"{name:12}", *(f"{key} {value:.3g}" for key, value in numbers.items()))
    record = {"machine": found[0]["machine"], "processes": args.processes, "of_ceiling": spreads}
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
