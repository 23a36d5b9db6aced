"""The same runs in fedjaxsim; `compare.py` starts this file."""

import os

import child
import jax

import fedjaxsim as fjs
from fedjaxsim.bench.measure import Rounds
from fedjaxsim.data.npz import load_npz

SEGMENTS = 5


def task(workload: str, shape: tuple[int, ...]) -> fjs.Task:
    """Return the task of a workload, whose inputs have this shape."""
    about = child.WORKLOADS[workload]
    classes, width = about.classes, (about.width,)
    if workload == "gru":
        model = fjs.models.gru(shape, classes, classes, width)
        return fjs.tasks.softmax_sequence(model, classes)
    if workload == "cnn":
        return fjs.tasks.softmax(fjs.models.cnn((28, 28), classes), classes)
    if workload == "mlp":
        return fjs.tasks.softmax(fjs.models.mlp(shape, classes, width), classes)
    return fjs.tasks.softmax(fjs.models.linear(shape, classes), classes)


def main() -> None:
    """Train with FedAvg or Ditto, clip and noise, test at the end, and report.

    The clock ticks at the end of a segment, a program of several rounds.
    """
    args = child.parse()
    several = args.setting == "a device per core"
    jax.config.update("jax_num_cpu_devices", (os.cpu_count() or 1) if several else 1)
    about, population = child.WORKLOADS[args.workload], load_npz(args.data)
    segment = max(1, args.rounds // SEGMENTS)
    clock = child.Clock(segment, SEGMENTS * segment)
    systems = {"fedavg": fjs.fedavg, "ditto": fjs.ditto}
    simulation = fjs.Simulation(
        systems[args.system](task(args.workload, population.fields["x"].shape[1:])),
        population,
        fjs.poisson(about.cohort / population.num_clients),
        fjs.Minibatches(child.BATCH, epochs=1),
        devices=jax.devices() if several else None,
    )
    values = {"lam": child.LAM} if args.system == "ditto" else {}
    hparams = simulation.hyperparameters(
        learning_rate=about.learning_rate, clip=child.CLIP,
        noise_multiplier=child.NOISE_MULTIPLIER, **values,
    )  # fmt: skip
    run = Rounds(simulation, hparams)
    state = run.start(args.seed)
    for _ in range(1 + SEGMENTS):
        state = run.advance(state, segment)
        clock.tick(segment)
    accuracy = float(run.evaluate(state).weighted_mean("accuracy"))
    versions = {"fedjaxsim": fjs.__version__, "jax": jax.__version__}
    child.emit(clock.report(args, accuracy, versions))


if __name__ == "__main__":
    main()
