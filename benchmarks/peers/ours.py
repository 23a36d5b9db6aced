"""The same runs in fedjaxsim, over one device per core; `compare.py` starts this file.

`Simulation.run` evaluates after its last round. That is measured apart and subtracted: the timed
part is training alone, as for the peers.
"""

import os
import statistics
import sys
from pathlib import Path

import child
import flax.linen as nn
import jax
import jax.numpy as jnp

import fedjaxsim as fjs
from fedjaxsim.data.npz import load_npz
from fedjaxsim.models import cnn, from_flax, linear
from fedjaxsim.tasks import softmax, softmax_sequence

EVALUATIONS = 3


HYPERPARAMETERS = {
    "learning_rate": child.LEARNING_RATE,
    "lam": child.LAM,
    "clip_norm": child.CLIP,
    "noise_multiplier": child.NOISE_MULTIPLIER,
}
"""All runs but PP-SGD's use those of these that their algorithm reads."""


def with_cohorts(
    size: int, algorithm: fjs.Algorithm, population: fjs.Population
) -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    """An epoch of every client in Poisson cohorts of an expected size, over all devices."""
    rate = size / population.num_clients
    simulation = fjs.Simulation(
        algorithm,
        population,
        fjs.poisson(rate),
        fjs.Minibatches(child.BATCH, epochs=1),
        devices=jax.devices(),
    )
    known = simulation.records
    values = {name: value for name, value in HYPERPARAMETERS.items() if name in known}
    return simulation, simulation.hyperparameters(**values)


def femnist(what: str, path: Path) -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    """FedAvg or PMTL with the CNN, or PMTL with softmax regression."""
    population = load_npz(path)
    network = (linear if what == "pmtl-linear" else cnn)(
        population.fields["x"].shape[1:], child.CLASSES
    )
    task = softmax(network, child.CLASSES)
    algorithm = fjs.fedavg(task) if what == "fedavg" else fjs.pmtl(task)
    return with_cohorts(child.COHORT, algorithm, population)


class _Lstm(nn.Module):
    """FedJAX's model of Shakespeare: layers of `flax.linen`, each followed by a tanh."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(child.CHARACTERS, child.EMBEDDING)(tokens.astype(jnp.int32))
        for _ in range(child.LAYERS):
            outputs = nn.RNN(nn.OptimizedLSTMCell(child.UNITS))(x)
            assert isinstance(outputs, jax.Array)
            x = jnp.tanh(outputs)
        return nn.Dense(child.CHARACTERS)(x)


def text(path: Path) -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    """FedAvg with FedJAX's model of characters."""
    population = load_npz(path)
    network = from_flax(_Lstm(), population.fields["x"].shape[1:], dtype=jnp.int32)
    task = softmax_sequence(network, child.CHARACTERS)
    return with_cohorts(child.TEXT_COHORT, fjs.fedavg(task), population)


def ppsgd() -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    """PP-SGD on its synthetic problem."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import ppsgd_grid

    simulation, _ = ppsgd_grid.make_simulation(
        chunk_map="vmap", chunk_size=250, devices=jax.devices()
    )
    return simulation, ppsgd_grid.hyperparameters(simulation, ppsgd_grid.SINGLE)


def main() -> None:
    args = child.parse()
    if args.warm != args.rounds:  # another number of rounds is another program
        raise ValueError(f"warm and rounds must agree here, got {args.warm} and {args.rounds}")
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    if args.what == "ppsgd":
        simulation, hparams = ppsgd()
    elif args.what == "lstm":
        simulation, hparams = text(args.data)
    else:
        simulation, hparams = femnist(args.what, args.data)
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
    name = {"ppsgd": "excess_risk", "lstm": "loss"}.get(args.what, "accuracy")
    learned = {name: float(evaluation.weighted_mean(name))}
    versions = {"fedjaxsim": fjs.__version__, "jax": jax.__version__}
    spent = statistics.median(evaluations)
    numbers = child.report(args, second - spent, first, learned, versions)
    params = jax.eval_shape(simulation.task.init, jax.random.key(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    beside = {"evaluation_seconds": spent, "devices": jax.device_count(), "parameters": size}
    child.emit(numbers | beside)


if __name__ == "__main__":
    main()
