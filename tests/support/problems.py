"""Small problems that several tests use."""

import contextlib
import importlib.util
import itertools
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.algorithm import Algorithm, Context
from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.data.minibatches import Batch, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import split
from fedjaxsim.engine.layout import ChunkMap
from fedjaxsim.factories import import_factory, make, settings_of
from fedjaxsim.keys import Stream, stream
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.choices import MECHANISMS
from fedjaxsim.privacy.samplers import fixed_size
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import Task, softmax, squared

LAWFUL = {
    name: system for name, system in SYSTEMS.items() if not system.variant_of and not system.softmax
}
"""The systems that laws of all systems are tested on, most of them by linear regression."""
COMPILED_FOR_TESTS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
"""Variables of the environment by which processes that tests start compile quickly."""
HANGS = 600
"""Seconds after which a test that waits for something says that it never happens."""


def environment_of_users():
    """The environment of a process that compiles as for users."""
    return {k: v for k, v in os.environ.items() if k not in COMPILED_FOR_TESTS}


def script(path):
    """A file that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def speakers(places):
    """Two speakers of Shakespeare in the form of LEAF: 8 characters and the next, at each place."""
    lines = {
        "LEAR": "Blow, winds, and crack your cheeks! rage! blow!",
        "FOOL": "O nuncle, court holy-water in a dry house is better",
    }
    data = {
        name: {"x": [text[k : k + 8] for k in range(places)],
               "y": [text[k + 8] for k in range(places)]}
        for name, text in lines.items()
    }  # fmt: skip
    return {"users": list(lines), "num_samples": [places] * len(lines), "user_data": data}


def least_squares(counts, features=3, test=0.0, seed=0) -> tuple[Population, Task]:
    """Linear regression in float64 with a different true model for every client."""
    rng = np.random.default_rng(seed)
    clients = []
    for n in counts:
        x = rng.normal(size=(n, features))
        noise = 0.1 * rng.normal(size=n)
        clients.append({"x": x, "y": x @ rng.normal(size=features) + noise})
    population = Population.from_clients(clients)
    if test:
        population = split(population, test=test, seed=seed)
    return population, squared(linear((features,), 1))


def classification(counts, features=4, classes=3, seed=0) -> tuple[Population, Task]:
    """Noisy linear classification, 80/20 split."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(features, classes))
    clients = []
    for n in counts:
        x = rng.normal(size=(n, features)).astype(np.float32)
        y = np.argmax(x @ truth + 0.1 * rng.normal(size=(n, classes)), axis=1)
        clients.append({"x": x, "y": y})
    population = split(Population.from_clients(clients), test=0.2, seed=seed)
    return population, softmax(linear((features,), classes), classes)


def noise_key(state, round_):
    """Return the key of a round's noise."""
    return stream(state.key, Stream.ROUND_NOISE, round_)


def every_system(*quick, sending=False):
    """Names of all systems as parameters of a test; all but the quick ones, if any, are thorough.

    Args:
      *quick: those that `make test` runs, too; all if none is given.
      sending: only those whose clients send something.
    """
    slow = [pytest.mark.thorough]
    return [
        pytest.param(name, marks=slow if quick and name not in quick else [])
        for name, system in LAWFUL.items()
        if system.sends or not sending
    ]


def map_of(name) -> ChunkMap:
    """How a law of all systems maps the clients: by `vmap` in every second system."""
    return "vmap" if list(SYSTEMS).index(name) % 2 else "scan"


def algorithm_of(name, task, num_clients) -> Algorithm:
    """A system on a task; a linear model's bias is what a client keeps, where it keeps a part."""
    has_head = "head" in settings_of(import_factory(SYSTEMS[name].factory))
    parts = has_head and task.output_layer is None
    return SYSTEMS[name].make(task, num_clients, **({"head": "bias"} if parts else {}))


def simulation_of(name, task, population, sampling, minibatches, **settings) -> Simulation:
    """A system with its mechanism, and with one minibatch where it takes only one."""
    system = SYSTEMS[name]
    if system.one_minibatch:
        minibatches = Minibatches(minibatches.size, steps=1, passes=minibatches.passes)
    mechanism = make(MECHANISMS[system.mechanism])
    algorithm = algorithm_of(name, task, population.num_clients)
    return Simulation(algorithm, population, sampling, minibatches, mechanism, **settings)


def read_by(simulation, **values):
    """The hyperparameters of a simulation from values for many: those that it reads."""
    known = simulation.records
    return simulation.hyperparameters(**{name: v for name, v in values.items() if name in known})


def rows_of_all(data):
    """All clients' rows, dug out of a view: refused where functions are checked."""
    return data._read.fields


def untrained(task) -> Algorithm:
    """FedAvg whose clients send ones: for what a run costs, whatever it learns."""

    def client(shared, personal, data, hparams, context):
        return personal, jax.tree.map(jax.numpy.ones_like, shared.params), {}

    return fedavg(task)._replace(client=client)


@jax.jit
def copied(state):
    """Return a copy of a state, as a simulation that goes on with a state takes its arrays."""
    return jax.tree.map(jnp.copy, state)


def after(simulation, hparams, rounds, seed=0):
    """The state after some rounds, one by one: less to compile, as nothing is evaluated."""
    state = simulation.init(seed, hparams)
    for _ in range(rounds):
        state, _ = simulation.round(state, hparams)
    return state


def states_of(algorithm, population, rounds, **values):
    """The states of a run without noise, and its simulation: 3 steps on all of a client's rows.

    One client of m is drawn in a round, so p = 1/m and the release is its message.
    """
    size = int(population.counts.max())
    sampling, minibatches = fixed_size(cohort=1), Minibatches(size, epochs=3)
    sim = Simulation(algorithm, population, sampling, minibatches)
    hparams = read_by(sim, noise_multiplier=0.0, **({"clip": np.inf} | values))
    states = [sim.init(0, hparams)]
    for _ in range(rounds):
        states.append(sim.round(states[-1], hparams)[0])
    return states, sim


class FixedData:
    """A client's view of the same minibatch twice."""

    def __init__(self, rows):
        fields = {name: jax.numpy.asarray(values) for name, values in rows.items()}
        self.batch = Batch(fields, jax.numpy.ones(len(rows["y"])))

    def fold(self, step, carry, epochs=None):
        assert epochs is None
        return step(step(carry, self.batch), self.batch)

    def num_steps(self):
        return jax.numpy.int32(2)


def first_context() -> Context:
    """The context of client 0 in round 0."""
    zero = jax.numpy.int32(0)
    return Context(zero, jax.random.key(0), zero, 1, jax.numpy.ones(()))


def drawn(states, population):
    """The client drawn in each round, whose personal state is the one that changed."""
    for before, after in itertools.pairwise(states):
        olds, news = (
            np.concatenate(
                [np.reshape(leaf, (population.num_clients, -1)) for leaf in jax.tree.leaves(tree)],
                axis=1,
            )
            for tree in (before.personal, after.personal)
        )
        [client] = np.flatnonzero(np.any(olds != news, axis=1))
        yield client, before, after


def designs(population, split=None):
    """Per client (X with a column of ones, y): the model's bias is the last coefficient."""
    for k in range(population.num_clients):
        rows = population.rows(k, split)
        yield np.column_stack([rows["x"], np.ones(len(rows["y"]))]), rows["y"]


def coefficients(params):
    """(…, d + 1) of linear parameters with leading axes."""
    kernel, bias = np.asarray(params["kernel"]), np.asarray(params["bias"])
    return np.concatenate([kernel[..., 0, :], bias], axis=-1)


def gradient_descent(x, y, w, rate, steps, center=None, weight=0.0):
    """Steps on ‖Xw − y‖²/(2n) + (weight/2) ‖w − center‖², in numpy."""
    for _ in range(steps):
        pull = 0 if center is None else weight * (w - center)
        w = w - rate * (x.T @ (x @ w - y) / len(y) + pull)
    return w


def numbers(tree):
    """All floating numbers of a pytree, flat."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jax.numpy.issubdtype(leaf.dtype, float)]
    return np.concatenate([np.zeros(0), *(np.ravel(leaf) for leaf in leaves)])


def same(one, other):
    """Whether two pytrees agree in structure and in all bits, those of keys, too."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(bits(a) == bits(b) for a, b in pairs)


def bits(leaf):
    """Type, shape and bytes of an array."""
    key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    raw = np.asarray(jax.random.key_data(leaf) if key else leaf)
    return str(leaf.dtype), raw.shape, raw.tobytes()


@contextlib.contextmanager
def compilations():
    """A list that grows by one entry for every program that XLA compiles meanwhile.

    Threads that an earlier test left at work, as an interrupted sweep does, do not count.
    """
    seen, others = [], {*threading.enumerate()} - {threading.current_thread()}

    def listen(event, duration_secs, **kwargs):
        del duration_secs, kwargs
        is_compiled = event == "/jax/core/compile/backend_compile_duration"
        if is_compiled and threading.current_thread() not in others:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
