"""Linear models with shared weights: updates as products against the plain form."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import read_by

from fedjaxsim.algorithm import Context
from fedjaxsim.algorithms import local_steps, optimizers
from fedjaxsim.algorithms.fedavg import fedavg, fedprox
from fedjaxsim.data.minibatches import BatchReadOptions, Minibatches, loss_of
from fedjaxsim.data.population import Population
from fedjaxsim.engine.layout import Plan
from fedjaxsim.engine.rows import Rows
from fedjaxsim.gradients.modes import Forward, Reverse
from fedjaxsim.gradients.whole_run import hypergradient
from fedjaxsim.hyperparameters import compose, fill
from fedjaxsim.kernels.backend import Backend
from fedjaxsim.kernels.linear_steps import is_cheaper, linear_update
from fedjaxsim.kernels.products import Product, Sealed
from fedjaxsim.models import linear, mlp
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.simulation_batch import SimulationBatch
from fedjaxsim.tasks import logistic, softmax, squared

THOROUGH = pytest.mark.thorough
D, C, COUNTS = 7, 4, [5, 9, 3, 12, 6, 8]


def plain(task):
    return task._replace(linear=None)


def population(labels, counts=COUNTS, features=D, dtype: type = np.float64):
    """Clients whose rows differ in size by client; labels by `labels(rng, n)`."""
    rng = np.random.default_rng(0)
    return Population.from_clients(
        [
            {"x": (k + 1) * rng.normal(size=(n, features)).astype(dtype), "y": labels(rng, n)}
            for k, n in enumerate(counts)
        ]
    )


def spoil(clients, row):
    """Writes what no population accepts into one that has been checked."""
    clients.fields["x"] = clients.fields["x"].copy()
    clients.fields["x"][row] = np.nan


def classes(rng, n):
    return rng.integers(0, C, n)


def task_of(kind, bias=True):
    if kind == "softmax":
        return softmax(linear((D,), C, bias), C), population(classes)
    if kind == "logistic":
        return logistic(linear((D,), 1, bias)), population(lambda rng, n: rng.integers(0, 2, n))
    return squared(linear((D,), 1, bias)), population(lambda rng, n: rng.normal(size=n))


@pytest.fixture
def always(monkeypatch):
    """Products also where they would not pay, as in small problems; and compiled quickly."""
    monkeypatch.setattr(local_steps, "is_cheaper", lambda params, steps, size: True)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_one_step_by_hand():
    # ½(0 − y)² at w = 0: R = −y/2 over two rows, so −ηR = (1, 3) for y = (2, 6) and η = 1, and the
    # update is (1, 3)·X = (1·1 + 3·0, 1·2 + 3·1), the bias 1 + 3. The losses are 2 and 18.
    fields = {"x": jnp.array([[1.0, 2.0], [0.0, 1.0]]), "y": jnp.array([2.0, 6.0])}
    task = squared(linear((2,), 1))
    rows = Rows(fields, jnp.array([0]), jnp.array([2]), generate=lambda key, row, size: fields)

    assert task.linear is not None
    linear_task = task.linear
    start = jax.jit(task.init)(jax.random.key(0))

    @functools.partial(jax.jit, static_argnums=0)
    def updated(steps, mu):
        minibatches = Minibatches(2, steps=steps)
        data = rows.of(jnp.int32(0), jax.random.key(0), minibatches, BatchReadOptions())
        update = linear_update(start, data.fold, steps, 2, linear_task, jnp.float32(1.0), mu=mu)
        assert isinstance(update["kernel"], Sealed)
        return update["kernel"].dense(), update["bias"], loss_of(data)["loss"]

    kernel, bias, loss = updated(1, 0.0)
    np.testing.assert_array_equal(kernel, [[1, 5]])
    np.testing.assert_array_equal(bias, [4])
    assert float(loss) == 10
    # The second step sees v = (1, 5), 4: errors 15 − 2 and 9 − 6, so −ηR = −(6.5, 1.5).
    kernel, bias, loss = updated(2, 0.0)
    np.testing.assert_array_equal(kernel, [[1 - 6.5, 5 - 13 - 1.5]])
    np.testing.assert_array_equal(bias, [4 - 6.5 - 1.5])
    assert float(loss) == (10 + (13**2 + 3**2) / 4) / 2
    # With μ = 1/2 the first update is halved before the second step.
    np.testing.assert_array_equal(updated(2, 0.5)[0], [[0.5 - 6.5, 2.5 - 13 - 1.5]])


@pytest.mark.parametrize(
    ("kind", "bias", "algorithm", "minibatches", "clip_norm"),
    [
        pytest.param("softmax", True, fedavg, Minibatches(2, steps=1), 0.4, marks=THOROUGH),
        pytest.param("softmax", False, fedprox, Minibatches(2, steps=3), 0.6, marks=THOROUGH),
        pytest.param("logistic", True, fedavg, Minibatches(2, steps=2), 0.3, marks=THOROUGH),
        ("squared", True, fedprox, Minibatches(2, steps=3, passes=2), 0.6),
    ],
)
def test_a_run_is_the_same_with_products(always, kind, bias, algorithm, minibatches, clip_norm):
    # Some clients are clipped, one is broken, cohorts are drawn, and noise is added.
    with jax.enable_x64(True):
        task, clients = task_of(kind, bias)
        spoil(clients, 6)
        given = {"learning_rate": 0.05, "mu": 0.7, "noise_multiplier": 0.3, "sampling_rate": 0.8}
        results = []
        for form in (task, plain(task)):
            sim = Simulation(
                algorithm(form),
                clients,
                poisson(1.0),
                minibatches,
                chunk_size=4,
                chunk_map="vmap",
            )
            hparams = read_by(sim, **given, clip=clip_norm)
            state, metrics = sim.init(4, hparams), []
            for _ in range(4):
                state, values = sim.round(state, hparams)
                metrics.append(values)
            history = {name: np.array([values[name] for values in metrics]) for name in metrics[0]}
            results.append((state.shared, history))
        (ours, metrics), (expected, expected_metrics) = results
        assert 0 < metrics["clipped"].sum() < metrics["participants"].sum() - 4
        assert 0 < metrics["nonfinite"].sum() < 4
        chex.assert_trees_all_close(ours, expected, rtol=1e-12, atol=1e-14)
        for name in metrics:
            np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-12)


def test_products_are_sent_where_they_pay():
    task, clients = task_of("softmax")
    one_step = Minibatches(2, steps=1)
    fields = {name: jnp.asarray(values) for name, values in clients.fields.items()}

    def sends_products(algorithm, minibatches=one_step):
        key, sent = jax.random.key(0), []
        hparams = fill(compose([algorithm.hyperparameters]), {}).as_arrays()

        def message():
            shared, personal = algorithm.init(key, hparams)
            rows = Rows.place(clients, "train", fields)
            data = rows.of(jnp.int32(0), key, minibatches, BatchReadOptions())
            context = Context(jnp.int32(0), key, jnp.int32(0), len(COUNTS), jnp.ones(()))
            sent.extend(
                jax.tree.leaves(algorithm.client(shared, personal, data, hparams, context)[1])
            )

        jax.eval_shape(message)
        return any(isinstance(leaf, Sealed) for leaf in sent)

    for algorithm in (fedavg, fedprox):
        assert sends_products(algorithm(task))
        assert not sends_products(algorithm(plain(task)))
        assert not sends_products(algorithm(task, local_optimizer=optimizers.local(optax.adam)))
        assert not sends_products(algorithm(task), Minibatches(2, epochs=1))
        assert not sends_products(algorithm(task), Minibatches(2, steps=2))
        network = softmax(mlp((D,), C, hidden=(3,)), C)
        assert not sends_products(algorithm(network))


def test_products_pay_where_rows_are_few():
    # r²·d·(1 for one step, 2 for more) against r·d·c multiplications.
    params = {"kernel": jnp.zeros((10, 784))}
    assert is_cheaper(params, steps=1, size=10)
    assert not is_cheaper(params, steps=1, size=11)
    assert not is_cheaper(params, steps=2, size=5)
    assert is_cheaper({"kernel": jnp.zeros((62, 784))}, steps=3, size=10)
    assert not is_cheaper({"kernel": jnp.zeros((10, 4))}, steps=1, size=5)


@pytest.mark.thorough
def test_a_grid_of_runs_is_that_of_the_plain_form(always):
    with jax.enable_x64(True):
        task, clients = task_of("softmax")
        grid = [
            {"learning_rate": eta, "mu": mu, "clip": c, "noise_multiplier": 0.3}
            for eta, mu, c in [(0.05, 0.0, 0.5), (0.1, 0.3, 1e3), (0.02, 0.9, 0.1)]
        ]
        clipped, states = [], []
        for form in (task, plain(task)):
            sim = Simulation(fedprox(form), clients, full_participation(), Minibatches(2, steps=2))
            settings = [sim.hyperparameters(**values) for values in grid]
            many = SimulationBatch(sim, settings, devices=jax.devices()[:1])
            state, [segment] = many.run(many.init(0), rounds=3)
            clipped.append(segment.metrics["clipped"])
            states.append(jax.tree.leaves(state.shared))
        np.testing.assert_array_equal(*clipped)
        for a, b in zip(*states, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.thorough
def test_hypergradients_are_those_of_the_plain_form(always):
    # One client is broken: it adds nothing, and its derivatives are zero in either mode.
    names = ("learning_rate", "mu", "clip", "noise_multiplier")
    values = {"learning_rate": 0.05, "mu": 0.4, "clip": 0.6, "noise_multiplier": 0.2}
    with jax.enable_x64(True):
        task, clients = task_of("softmax")
        spoil(clients, 6)

        def gradient(form, mode):
            sim = Simulation(
                fedprox(form),
                clients,
                full_participation(),
                Minibatches(2, steps=2),
                chunk_size=3,
                chunk_map="vmap",
            )

            def objective(state, hparams):
                return jnp.sum(jnp.square(state.shared.params["kernel"]))

            _, found = hypergradient(sim, objective, 2, names, mode=mode)(
                0, sim.hyperparameters(**values)
            )
            return [float(found[name]) for name in names]

        expected = gradient(plain(task), Forward())
        assert np.all(np.abs(expected) > 1e-4)
        for mode in (Forward(), Reverse()):
            np.testing.assert_allclose(gradient(task, mode), expected, rtol=1e-10)


@pytest.mark.thorough
def test_a_round_holds_no_gradient_of_a_client():
    m, d, c = 1000, 300, 12
    clients = population(lambda rng, n: rng.integers(0, c, n), [3] * m, d, np.float32)
    task = softmax(linear((d,), c), c)
    compiled = {}
    for name, form in (("products", task), ("plain", plain(task))):
        sim = Simulation(
            fedavg(form),
            clients,
            full_participation(),
            Minibatches(3, steps=2),
            chunk_size=50,
            chunk_map="vmap",
        )
        hparams = sim.hyperparameters(learning_rate=0.1, clip=1.0, noise_multiplier=1.0)
        state = sim.init(0, hparams)
        one_round: Any = sim.compiled.step
        compiled[name] = one_round.lower(state, hparams.as_arrays(), sim.rows["train"]).compile()

    def of_clients(program):  # arrays with axes 50, d and c, in any order
        shapes = {
            tuple(map(int, shape.split(",")))
            for shape in re.findall(r"f32\[([\d,]+)\]", program.as_text())
        }
        return [
            shape for shape in shapes if functools.reduce(lambda a, b: a * b, shape) >= 50 * d * c
        ]

    data = m * 3 * d  # the rows themselves
    large = [shape for shape in of_clients(compiled["products"]) if np.prod(shape) != data]
    assert not large
    assert any(sorted(shape) == sorted((50, d, c)) for shape in of_clients(compiled["plain"]))
    temporary = compiled["products"].memory_analysis().temp_size_in_bytes
    assert temporary < 4 * m * d * c / 10


def test_clients_that_send_products_run_as_a_batch_unless_told_otherwise():
    message = {"kernel": Product(jnp.zeros((10, 10)), jnp.zeros((10, 784)))}
    arrays = {"kernel": np.zeros((10, 784), np.float32)}
    default = Plan(Backend("cpu", None), 16, "scan")
    # A message is 10·(784 + 10) numbers of 4 bytes: 33 of them in 2²⁰ bytes.
    chosen = default.for_message(message)
    assert (chosen.chunk_size, chosen.chunk_map) == (33, "vmap")
    assert default.for_message(arrays) == default
    own = Plan(Backend("cpu", None), 8, "scan", given=(8, None))
    assert own.for_message(message) == own


@pytest.mark.thorough
def test_clients_who_share_a_linear_model_are_evaluated_in_batches():
    clients = population(lambda rng, n: rng.integers(0, C, n), [5, 1, 9, 30] * 20, 300, np.float32)
    task = softmax(linear((300,), C), C)  # of 4.8 kB, above which clients run one after another
    found, texts = [], []
    for chunk_map in (None, "scan"):
        sim = Simulation(
            fedavg(task), clients, full_participation(), Minibatches(3, 1), chunk_map=chunk_map
        )
        hparams = sim.hyperparameters(learning_rate=0.1)
        state = sim.init(0, hparams)
        found.append(sim.evaluate(state, hparams, "train"))
        inputs = state, hparams.as_arrays(), sim.rows["train"]
        texts.append(str(jax.make_jaxpr(sim.program.evaluate)(*inputs)))
    for name, values in found[0].values.items():
        np.testing.assert_allclose(values, found[1].values[name], rtol=1e-5)
    # A pass reads 16 rows of each of several clients at once.
    several = re.compile(r"f32\[\d+,16,300\]")
    assert several.search(texts[0])
    assert not several.search(texts[1])
