"""A part of the table of images that two cores finish: FedAvg to Local, without noise and at ε = 8.

    python experiments/cifar/small.py runs/data/femnist-10.npz experiments/results/cifar-small.csv

writes the results of each system when they are there, and goes on after the last one if it is
called again. Rows are the handwritten digits of ../systems/data.py, of all writers together, in
8 × 8 pixels; ResNet-8 has 8, 16 and 32 channels. All seeds have one split, and first models,
minibatches and noise of their own. "by hand" are loops over clients without this package, from the
same first models, with other minibatches.
"""

import csv
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjaxsim as fjs

sys.path.insert(0, str(Path(__file__).parent))
from cifar import CLASSES, resnet8

CLIENTS, ALPHA, ROUNDS, EPSILON = 100, 0.1, 15, 8.0
BATCH, RATE, CLIP = 10, 0.1, 0.5
SEEDS = (0, 1, 2)
SYSTEMS = {
    "FedAvg": fjs.fedavg, "FedPer": fjs.fedper, "Local": fjs.local, "Ditto": fjs.ditto,
    "APFL": fjs.apfl, "FedRep": fjs.fedrep, "FedALA": fjs.fedala, "Per-FedAvg": fjs.perfedavg,
    "FedProx": fjs.fedprox,
}  # fmt: skip
BY_HAND = {"FedAvg": False, "FedPer": True}
"""Whether each client keeps its output layer."""
HEAD = "Dense_0"


def population(file: Path) -> fjs.Population:
    """Read images of 28 × 28 pixels, with a border of 2, as means of 4 × 4, and divide them."""
    with np.load(file) as rows:
        images, labels = rows["x"].reshape(-1, 28, 28), rows["y"]
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).reshape(-1, 8, 4, 8, 4).mean((2, 4))
    fields = {"x": images[..., None], "y": labels}
    clients = fjs.data.dirichlet(fields, CLIENTS, alpha=ALPHA, min_rows=4)
    return fjs.data.split(clients, test=0.25)


def simulation(name: str, clients: fjs.Population, model: fjs.Model) -> fjs.Simulation:
    """Make the simulation of a system, by the protocol of the large table."""
    mechanism = fjs.no_release() if name == "Local" else fjs.gaussian()
    algorithm = SYSTEMS[name](fjs.tasks.softmax(model, CLASSES))
    sampling, batches = fjs.full_participation(), fjs.Minibatches(BATCH, epochs=1)
    return fjs.Simulation(algorithm, clients, sampling, batches, mechanism)


def without_noise(name: str, sim: fjs.Simulation) -> fjs.Hyperparameters:
    """Return the hyperparameters of a run whose messages are sent as they are."""
    free = {} if name == "Local" else {"clip": np.inf, "noise_multiplier": 0.0}
    return sim.hyperparameters(learning_rate=RATE, **free)


def results(
    name: str, clients: fjs.Population, model: fjs.Model
) -> Iterator[tuple[float, int, float, float]]:
    """Yield ε, seed, accuracy on all test rows and CPU seconds of each run of a system."""
    sim = simulation(name, clients, model)
    settings = [(np.inf, without_noise(name, sim))]
    if name != "Local":
        clipped = sim.hyperparameters(learning_rate=RATE, clip=CLIP)
        settings.append((EPSILON, sim.calibrate(clipped, epsilon=EPSILON, rounds=ROUNDS)))
    for (epsilon, hparams), seed in itertools.product(settings, SEEDS):
        before = time.process_time()
        state = sim.init(seed, hparams)
        for _ in range(ROUNDS):
            state, _ = sim.round(state, hparams)
        accuracy = sim.evaluate(state, hparams).weighted_mean("accuracy")
        yield epsilon, seed, accuracy, time.process_time() - before


def by_hand(name: str, clients: fjs.Population, model: fjs.Model, seed: int) -> float:
    """Train FedAvg or FedPer by loops over clients; return the accuracy on all test rows."""
    own_heads, sim = BY_HAND[name], simulation(name, clients, model)
    hparams = without_noise(name, sim)
    first = sim.models(sim.init(seed, hparams), hparams)

    @jax.jit
    def step(w, x, y, weight):
        def loss(w):
            losses = optax.softmax_cross_entropy_with_integer_labels(model.apply(w, x), y)
            return losses @ weight / weight.sum()

        return jax.tree.map(lambda a, g: a - RATE * g, w, jax.grad(loss)(w))

    @jax.jit
    def right(w, x, y):
        return jnp.argmax(model.apply(w, x), axis=1) == y

    def padded(rows, values):
        return np.concatenate([values[rows], np.zeros((BATCH - len(rows), *values.shape[1:]))])

    rng, w = np.random.default_rng(seed), jax.tree.map(lambda leaf: leaf[0], first)
    train, test = (split_rows(clients, split) for split in ("train", "test"))
    heads = [jax.tree.map(lambda leaf, k=k: leaf[k], first[HEAD]) for k in range(CLIENTS)]
    for _ in range(ROUNDS):
        sent = []
        for k, (x, y) in enumerate(train):
            v = w | {HEAD: heads[k]} if own_heads else w
            order = rng.permutation(len(y))
            for start in range(0, len(y), BATCH):
                rows = order[start : start + BATCH]
                weight = padded(rows, np.ones(len(y)))
                v = step(v, padded(rows, x), padded(rows, y).astype(np.int32), weight)
            heads[k] = v[HEAD]
            sent.append(v)
        w = jax.tree.map(lambda *leaves: sum(leaves) / CLIENTS, *sent)
    count = correct = 0
    for k, (x, y) in enumerate(test):
        for start in range(0, len(y), BATCH):
            rows = np.arange(start, min(start + BATCH, len(y)))
            v = w | {HEAD: heads[k]} if own_heads else w
            hits = right(v, padded(rows, x), padded(rows, y))
            correct, count = correct + int(hits[: len(rows)].sum()), count + len(rows)
    return correct / count


def split_rows(clients: fjs.Population, split: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the images and labels of each client in a split."""
    rows = (clients.rows(client, split) for client in range(CLIENTS))
    return [(fields["x"], fields["y"]) for fields in rows]


def main(rows: Path, file: Path) -> None:
    """Write the results that the file lacks."""
    done: list[dict[str, str]] = []
    if file.exists():
        with file.open(newline="") as stream:
            done = [*csv.DictReader(stream)]
    else:
        file.write_text("system,epsilon,seed,test_accuracy,cpu_seconds\n")
    clients, model = population(rows), resnet8((8, 8, 1), CLASSES, width=8, native=True)

    def add(name: str, epsilon: float, seed: int, accuracy: float, seconds: float) -> None:
        with file.open("a", newline="") as stream:
            row = [name, epsilon, seed, round(accuracy, 4), round(seconds, 1)]
            csv.writer(stream, lineterminator="\n").writerow(row)

    runs = {(row["system"], int(row["seed"])) for row in done}
    for name in SYSTEMS:
        if (name, SEEDS[-1]) not in runs:
            for result in [*results(name, clients, model)]:  # all of a system, or nothing
                add(name, *result)
    for name, seed in itertools.product(BY_HAND, SEEDS):
        if (f"{name} by hand", seed) not in runs:
            before = time.process_time()
            accuracy = by_hand(name, clients, model, seed)
            add(f"{name} by hand", np.inf, seed, accuracy, time.process_time() - before)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: small.py ROWS FILE")
    main(*map(Path, sys.argv[1:]))
