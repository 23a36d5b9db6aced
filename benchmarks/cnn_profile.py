"""Where the time of FedAvg with the papers' CNN goes, with clipping and noise, on all cores.

    python benchmarks/cnn_profile.py [--processes 5] [--out FILE]

Four loads, each of which has one cost more than the one before:

    kernel   gradients and SGD steps on full batches of 10, on every device by itself
    clients  100 clients with three full batches each, all of whom take part: a client starts from
             the billboard and ends in clip and sum, a round in noise and a server step
    cohorts  the same in Poisson cohorts of 100 out of 206: devices wait for the one that drew more
    FEMNIST  206 writers of 5 to 69 images: the last batch of each is partial

Each is timed right beside the ceiling, the rate of a product of two 2048 × 2048 matrices on each
device. The fraction of it that is reached counts the products of examples that exist, in the direct
form of convolutions, as in `fedjaxsim bench`. Medians over repetitions, and medians and ranges over
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
from jax.sharding import AxisType, Mesh, PartitionSpec

from fedjaxsim import models, tasks
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.bench import problems
from fedjaxsim.bench.ceilings import Ceilings
from fedjaxsim.bench.children import of_script
from fedjaxsim.bench.machine import machine
from fedjaxsim.bench.measure import seconds
from fedjaxsim.bench.results import spread
from fedjaxsim.bench.systems import BATCH, FEMNIST_COHORT, PRIVATE, femnist_cnn, work_of
from fedjaxsim.bench.work import cnn_flops
from fedjaxsim.bench.workload import Load, simulate
from fedjaxsim.data.minibatches import Batch, Minibatches
from fedjaxsim.engine.devices import use_all_cores
from fedjaxsim.privacy.sampling import full_participation, poisson
from fedjaxsim.simulation import Simulation

CLASSES, BATCHES, STEPS = problems.FEMNIST_CLASSES, 3, 100
FLOPS = cnn_flops(problems.IMAGE[0], CLASSES)
RESULTS = Path(__file__).parent / "results" / "cnn_profile.json"


class Timed(NamedTuple):
    """What is timed: a call, and the floating-point operations that it must do."""

    run: Callable[[], Any]
    flops: float


def kernel() -> Timed:
    """Steps of SGD on one batch, on every device by itself."""
    task = tasks.softmax(models.cnn(problems.IMAGE, CLASSES), CLASSES)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((BATCH, *problems.IMAGE), dtype=np.float32))
    y = jnp.asarray(rng.integers(0, CLASSES, BATCH, dtype=np.int32))
    batch = Batch({"x": x, "y": y}, jnp.ones(BATCH))
    rate = PRIVATE["learning_rate"]

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
    work = STEPS * BATCH * FLOPS * len(devices)
    return Timed(lambda: jax.block_until_ready(on_each(params)), work)


def even(clients: int) -> Load:
    """FedAvg where every client has three full batches; 100 of them take part."""
    rows = np.full(clients, BATCHES * BATCH)
    population = problems.classification(rows, np.zeros_like(rows), problems.IMAGE, CLASSES)
    task = tasks.softmax(models.cnn(problems.IMAGE, CLASSES), CLASSES)
    p = FEMNIST_COHORT / clients
    examples = FEMNIST_COHORT * BATCHES * BATCH
    simulation = Simulation(
        fedavg(task),
        population,
        full_participation() if p == 1 else poisson(p),
        Minibatches(BATCH, epochs=1),
        devices=jax.devices(),
    )
    work = work_of("fedavg", task, clients, FEMNIST_COHORT, examples, FLOPS, rows[0])
    return simulate(simulation, simulation.hyperparameters(**PRIVATE), work, rounds=4)


def of_load(load: Load) -> Timed:
    """The segments of a load, one after another."""
    state: Any = load.init()

    def advance():
        nonlocal state
        state = jax.block_until_ready(load.advance(state, load.rounds)[0])

    return Timed(advance, load.work.flops * load.rounds)


LOADS: dict[str, Callable[[], Timed]] = {
    "kernel": kernel,
    "clients": lambda: of_load(even(FEMNIST_COHORT)),
    "cohorts": lambda: of_load(even(problems.FEMNIST_WRITERS)),
    "FEMNIST": lambda: of_load(femnist_cnn(None, "fedavg", rounds=4)),
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
