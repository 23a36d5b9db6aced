"""The systems at work: each function builds one workload, at any size."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim import models, tasks
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.ppsgd import ppsgd
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.bench import problems
from fedjaxsim.bench.work import (
    FLOAT,
    Work,
    cnn_flops,
    dense_flops,
    gru_flops,
    round_bytes,
    transformer_flops,
)
from fedjaxsim.bench.workload import Load, data_bytes, simulate
from fedjaxsim.data.load import load
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.data.text import CHARACTERS
from fedjaxsim.factories import make
from fedjaxsim.hyperparameters import Hyperparameters, compose, fill
from fedjaxsim.models.model import Model
from fedjaxsim.privacy.choices import MECHANISMS
from fedjaxsim.privacy.sampling import full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.sweep import ManyRuns
from fedjaxsim.tasks.known_risk import known_regression
from fedjaxsim.tasks.task import Task

BATCH = 10
FEMNIST_COHORT = 100
PIXELS = 28 * 28
PRIVATE = {"learning_rate": 0.05, "clip_norm": 1.0, "noise_multiplier": 1.0}
"""Hyperparameters with clipping and noise."""
_PLAIN = {"learning_rate": 0.05}


def femnist_cnn(
    data: str | None,
    algorithm: str,
    clients: int = 206,
    rounds: int = 2,
    compute: str = "float32",
    chunk_size: int | None = None,
    **arguments: Any,
) -> Load:
    """The papers' CNN: Poisson cohorts of 100/206 of the writers, one epoch, clip and noise.

    Args:
      data: FEMNIST, e.g. "leaf:PATH"; None for random images of the same shapes.
      algorithm: which one.
      clients: of random data.
      rounds: in one compiled segment.
      compute: as of `fedjaxsim run`.
      chunk_size: of `Simulation`.
      **arguments: of the algorithm, besides its defaults.
    """
    if data is None:
        train, test = problems.femnist_counts(clients)
        classes = problems.FEMNIST_CLASSES
        population = problems.classification(train, test, problems.IMAGE, classes)
    else:
        population = load(data, test=0.2)
        classes = max(2, int(population.fields["y"].max()) + 1)
    p, m = FEMNIST_COHORT / problems.FEMNIST_WRITERS, population.num_clients
    examples = p * float(population.splits["train"].count.sum())
    network = models.cnn(population.fields["x"].shape[1:], classes)
    network = models.in_bfloat16(network) if compute == "bfloat16" else network
    task = tasks.softmax(network, classes)
    work = work_of(algorithm, task, m, p * m, examples, cnn_flops(28, classes), PIXELS)
    simulation = Simulation(
        SYSTEMS[algorithm].make(task, m, **arguments),
        population,
        poisson(p),
        Minibatches(BATCH, epochs=1),
        chunk_size=chunk_size,
        devices=jax.devices(),
    )
    loaded = simulate(simulation, simulation.hyperparameters(**PRIVATE), work, rounds)
    if data is None:
        return loaded
    # The name of the data, without where they lie on this machine.
    kind, _, path = data.partition(":")
    return dataclasses.replace(loaded, data=f"{kind}:{Path(path).name}")


def dense(
    algorithm: str,
    widths: tuple[int, ...],
    *,
    clients: int,
    rows: tuple[int, int] = (10, 0),
    expected: int | None = None,
    batch: int = BATCH,
    steps: int = 1,
    rounds: int,
    divided: bool = True,
    chunk_size: int | None = None,
) -> Load:
    """Softmax regression or an MLP on random rows, with clip and noise where clients send.

    Args:
      algorithm: which one.
      widths: features, those of hidden layers, and classes.
      clients: m.
      rows: for training and for testing, of every client; evaluations are timed if there are any.
      expected: size of Poisson cohorts; None where everyone takes part.
      batch: rows in a minibatch.
      steps: minibatches of a client in a round.
      rounds: in one compiled segment.
      divided: whether the clients are divided over all devices, or run on the first.
      chunk_size: of `Simulation`.
    """
    system, (features, *hidden, classes) = SYSTEMS[algorithm], widths
    model = (
        models.mlp((features,), classes, hidden) if hidden else models.linear((features,), classes)
    )
    task = tasks.softmax(model, classes)
    updates = clients if expected is None else expected
    p = updates / clients
    simulation = Simulation(
        system.make(task, clients),
        problems.equal_clients(clients, *rows, (features,), classes),
        full_participation() if expected is None else poisson(p),
        Minibatches(batch, steps=steps),
        make(MECHANISMS[system.mechanism]),
        chunk_size=chunk_size,
        devices=jax.devices() if divided else None,
    )
    hparams = simulation.hyperparameters(**(PRIVATE if system.sends else _PLAIN))
    examples = updates * (rows[0] if system.whole_pass else steps * batch)
    work = work_of(algorithm, task, clients, updates, examples, dense_flops(widths), features)
    return simulate(simulation, hparams, work, rounds)


def text(
    model: str,
    algorithm: str,
    hidden: tuple[int, ...],
    *,
    clients: int,
    expected: int,
    rows: tuple[int, int],
    length: int,
    steps: int,
    rounds: int,
    compute: str = "float32",
    chunk_size: int | None = None,
) -> Load:
    """The next character at every place of random texts, with clip and noise.

    Args:
      model: "gru" or "transformer".
      algorithm: which one.
      hidden: of the model.
      clients: m.
      expected: size of Poisson cohorts.
      rows: for training and for testing, of every client.
      length: L, characters in a row.
      steps: minibatches of a client in a round.
      rounds: in one compiled segment.
      compute: as of `fedjaxsim run`.
      chunk_size: of `Simulation`.
    """
    characters = len(CHARACTERS)
    flops = {"gru": gru_flops, "transformer": transformer_flops}[model]
    made = getattr(models, model)((length,), characters, characters, hidden)
    made = models.in_bfloat16(made) if compute == "bfloat16" else made
    task = tasks.softmax_sequence(made, characters)
    p = expected / clients
    simulation = Simulation(
        SYSTEMS[algorithm].make(task, clients),
        problems.texts(clients, *rows, length, characters),
        poisson(p),
        Minibatches(BATCH, steps=steps),
        chunk_size=chunk_size,
        devices=jax.devices(),
    )
    per_example = flops(length, hidden, characters)
    # An example is read as a byte a token, and labels of four.
    features = length * 5 // FLOAT
    examples = expected * steps * BATCH
    work = work_of(algorithm, task, clients, expected, examples, per_example, features)
    return simulate(simulation, simulation.hyperparameters(**PRIVATE), work, rounds)


def work_of(
    algorithm: str,
    task: Task,
    num_clients: int,
    updates: float,
    examples: float,
    flops_per_example: float,
    features: int,
) -> Work:
    """The work of a round of one of `SYSTEMS`.

    Args:
      algorithm: which one.
      task: what it learns.
      num_clients: m.
      updates: clients that take part.
      examples: that they compute on, all together.
      flops_per_example: see `work.py`.
      features: numbers in an example.
    """
    system = SYSTEMS[algorithm]
    algorithm_ = system.make(task, num_clients)
    hparams = fill(compose([algorithm_.hyperparameters]), {})
    states = jax.eval_shape(algorithm_.init, jax.random.key(0), hparams)
    shared, personal = (sum(leaf.size for leaf in jax.tree.leaves(state)) for state in states)
    moved = round_bytes(updates, personal, examples, features, shared)
    return Work(system.local_passes * examples * flops_per_example, moved, updates)


# --- PP-SGD ---------------------------------------------------------------------------------------

PPSGD_CLIENTS, PPSGD_FEATURES = 1000, 100
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.2, 1.5, 1.8)
LEVELS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"))
NOISES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def grid_settings(simulation: Simulation) -> list[Hyperparameters]:
    """Return the 990 settings of appendix A with C = 10 (Bietti et al. 2022)."""
    return [
        simulation.hyperparameters(
            learning_rate=rate, personalization=level, clip_norm=10.0, noise_multiplier=z
        )
        for rate, level, z in itertools.product(RATES, LEVELS, NOISES)
    ]


def _ppsgd_work(clients: int, runs: int) -> Work:
    """Two products with a batch of b·d numbers and the read and write of θ_i, in every run.

    Of data only the θ_i* are read; making batches from them is not counted.
    """
    updates, d = clients * runs, PPSGD_FEATURES
    moved = round_bytes(updates, personal=d, examples=clients, features=d, shared=d * runs)
    return Work(updates * 4 * BATCH * PPSGD_FEATURES, moved, updates)


def _ppsgd(clients: int, devices: Sequence[Any] | None) -> Simulation:
    task = known_regression(PPSGD_FEATURES)
    population = regression_stream(clients, PPSGD_FEATURES)
    minibatches = Minibatches(BATCH, steps=1)
    return Simulation(ppsgd(task), population, full_participation(), minibatches, devices=devices)


def ppsgd_synthetic(clients: int = PPSGD_CLIENTS, rounds: int = 100) -> Load:
    """PP-SGD on its synthetic problem: fresh batches of 10, d = 100, everyone.

    Args:
      clients: m.
      rounds: in one compiled segment.
    """
    simulation = _ppsgd(clients, jax.devices())
    hparams = simulation.hyperparameters(learning_rate=0.1, clip_norm=10.0, noise_multiplier=1.0)
    return simulate(simulation, hparams, _ppsgd_work(clients, 1), rounds)


def ppsgd_grid(
    settings: list[Hyperparameters] | None = None, clients: int = PPSGD_CLIENTS, rounds: int = 2
) -> Load:
    """The same with many settings as one program; a round is one of all runs.

    Args:
      settings: by default the 990 of `grid_settings`.
      clients: m.
      rounds: in one compiled segment.
    """
    simulation, devices = _ppsgd(clients, None), tuple(jax.devices())
    settings = grid_settings(simulation) if settings is None else settings
    many = ManyRuns(simulation, settings, devices)
    rows = simulation.rows["train"]
    return Load(
        init=lambda: many.init(0),
        advance=lambda state, rounds: many._rounds(state, many._hparams, rows, rounds=rounds),
        evaluate=many.evaluate,
        rounds=rounds,
        work=_ppsgd_work(clients, len(settings)),
        data_bytes=data_bytes(simulation.population),
        devices=devices[: len(settings)],
    )


# --- what the loop itself costs -------------------------------------------------------------------

EMPTY_LEAVES = 20
"""Of the state of `empty_round`."""


def empty_round(rounds: int = 2000) -> Load:
    """A round in which nobody is drawn, with a state of 20 leaves.

    Args:
      rounds: in one compiled segment.
    """
    # Round, key and the ledger's eight, and these: the billboard's and the clients'.
    names = [f"layer{index}" for index in range((EMPTY_LEAVES - 10) // 2)]
    layers = Model(
        lambda key: {name: jnp.zeros((10, 2)) for name in names},
        lambda params, x: x @ sum(params.values()),
    )
    task = tasks.softmax(layers, 2)
    # No client is likely to be drawn in 10⁸ rounds.
    p = 2.0**-32
    simulation = Simulation(
        pmtl(task),
        problems.equal_clients(10, 10, 0, (10,), 2),
        poisson(p, capacity=10),
        Minibatches(BATCH, steps=1),
    )
    return simulate(simulation, simulation.hyperparameters(**PRIVATE), Work(0.0, 0.0, 0.0), rounds)
