"""The same runs in fedjaxsim, over one device per core; `compare.py` starts this file.

`Simulation.run` evaluates after its last round. That is measured apart and subtracted: the timed
part is training alone, as for the peers.
"""

import statistics
import sys
from pathlib import Path

import child
import jax

import fedjaxsim as fjs
from fedjaxsim.data.npz import load_npz
from fedjaxsim.engine.devices import use_all_cores
from fedjaxsim.models import cnn, linear, softmax

EVALUATIONS = 3


def femnist(what: str, path: Path) -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    """FedAvg or PMTL with the CNN, or PMTL with softmax regression."""
    population = load_npz(path)
    m, inputs = population.num_clients, population.fields["x"].shape[1:]
    rate = child.COHORT / m
    network = (linear if what == "pmtl-linear" else cnn)(inputs, child.CLASSES)
    task = softmax(network, child.CLASSES)
    algorithm = fjs.fedavg(task) if what == "fedavg" else fjs.pmtl(task)
    simulation = fjs.Simulation(
        algorithm,
        task,
        population,
        fjs.poisson(m, max_rate=rate),
        fjs.Minibatches(child.BATCH, epochs=1),
        devices=jax.devices(),
    )
    hparams = fjs.Hyperparameters(
        learning_rate=child.LEARNING_RATE,
        lam=child.LAM,
        clip_norm=child.CLIP,
        noise_multiplier=child.NOISE_MULTIPLIER,
        sampling_rate=rate,
    )
    return simulation, hparams


def ppsgd() -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    """PP-SGD on its synthetic problem."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks import ppsgd_grid

    simulation, _ = ppsgd_grid.make_simulation(
        chunk_map="vmap", chunk_size=250, devices=jax.devices()
    )
    return simulation, ppsgd_grid.hyperparameters(ppsgd_grid.SINGLE)


def main() -> None:
    args = child.parse()
    if args.warm != args.rounds:  # another number of rounds is another program
        raise ValueError(f"warm and rounds must agree here, got {args.warm} and {args.rounds}")
    use_all_cores()
    simulation, hparams = ppsgd() if args.what == "ppsgd" else femnist(args.what, args.data)
    state = simulation.init(args.seed, hparams)
    segments = []

    def run():
        nonlocal state
        state, history = simulation.run(state, hparams, args.rounds)
        segments.extend(history)

    first, second = child.seconds(run), child.seconds(run)
    evaluations = [
        child.seconds(lambda: simulation.evaluate(state, hparams)) for _ in range(EVALUATIONS)
    ]
    evaluation = segments[-1].evaluation
    name = "excess_risk" if args.what == "ppsgd" else "accuracy"
    learned = {name: float(evaluation.weighted_mean(name))}
    versions = {"fedjaxsim": fjs.__version__, "jax": jax.__version__}
    spent = statistics.median(evaluations)
    numbers = child.report(args, second - spent, first, learned, versions)
    child.emit(numbers | {"evaluation_seconds": spent, "devices": jax.device_count()})


if __name__ == "__main__":
    main()
