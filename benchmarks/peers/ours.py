"""The same runs in fedjaxsim, over one device per core; `compare.py` starts this file."""

import os
import time

import child
import jax

import fedjaxsim as fjs
from fedjaxsim.bench.measure import Rounds
from fedjaxsim.data.npz import load_npz

HYPERPARAMETERS = {
    "learning_rate": child.LEARNING_RATE,
    "lam": child.LAM,
    "clip": child.CLIP,
    "noise_multiplier": child.NOISE_MULTIPLIER,
}


def main() -> None:
    """Train with FedAvg or PMTL, test at the end, and report."""
    args = child.parse()
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    population = load_npz(args.data)
    network = fjs.models.cnn(population.fields["x"].shape[1:], child.CLASSES)
    task = fjs.tasks.softmax(network, child.CLASSES)
    simulation = fjs.Simulation(
        fjs.fedavg(task) if args.what == "fedavg" else fjs.pmtl(task, message="update"),
        population,
        fjs.poisson(child.COHORT / population.num_clients),
        fjs.Minibatches(child.BATCH, epochs=1),
        devices=jax.devices(),
    )
    read = {name: value for name, value in HYPERPARAMETERS.items() if name in simulation.records}
    run = Rounds(simulation, simulation.hyperparameters(**read))
    state, times = run.start(args.seed), [time.perf_counter()]
    for _ in range(args.warm + args.rounds):
        state = run.advance(state, 1)
        times.append(time.perf_counter())
    accuracy = float(run.evaluate(state).weighted_mean("accuracy"))
    versions = {"fedjaxsim": fjs.__version__, "jax": jax.__version__}
    child.emit(child.report(args, times, accuracy, versions))


if __name__ == "__main__":
    main()
