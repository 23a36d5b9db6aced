"""Factorizations end: in a client's function, in a server's step, in a batch of settings."""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compiling
from support.several import start

import fedjaxsim as fjs
from fedjaxsim.engine.factorizations import factorize_one_by_one
from fedjaxsim.kernels.backend import Backend, planning_for
from fedjaxsim.simulation_batch import SimulationBatch

LIMIT = 900
"""Seconds of a child that may hang."""
SIZE, CLIENTS, ROUNDS = 64, 36, 10


def solve(a):
    return jnp.linalg.solve(a, a.T)


def eigh(a):
    values, vectors = jnp.linalg.eigh(a)
    return vectors * values


def svd(a):
    left, values, _ = jnp.linalg.svd(a)
    return left * values


FACTORIZATIONS = {
    "eigh": eigh, "qr": lambda a: jnp.linalg.qr(a)[0], "svd": svd, "solve": solve,
    "cholesky": jnp.linalg.cholesky,
}  # fmt: skip


def positive(key):
    a = jax.random.normal(key, (SIZE, SIZE))
    return a @ a.T / SIZE + jnp.eye(SIZE)


def total(a):
    """A number that needs each factorization."""
    return sum(jnp.sum(factorize(a)) for factorize in FACTORIZATIONS.values())


def compute():
    """The program of a child: rounds with all factorizations, on two devices."""
    compiling.quicken()
    jax.config.update("jax_num_cpu_devices", 2)
    base = fjs.fedavg
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2 * CLIENTS, 3), dtype=np.float32)
    data = {"x": x, "y": x[:, 0]}
    population = fjs.data.Population.from_flat(data, np.full(CLIENTS, 2))
    algorithm = base(fjs.tasks.squared(fjs.models.linear((3,), 1)))

    def small(key):
        return 1e-6 * total(positive(key))

    def client(shared, personal, data, hparams, context):
        personal, message, metrics = algorithm.client(shared, personal, data, hparams, context)
        added = jax.tree.map(lambda leaf: leaf + small(context.key), message)
        return personal, added, metrics

    def server(shared, release, hparams, round_):
        key = jax.random.fold_in(jax.random.key(1), round_)
        a = positive(key) * hparams.learning_rate
        step = 1e-6 * total(a)
        shared = algorithm.server(shared, release, hparams, round_)
        return jax.tree.map(lambda leaf: leaf + step if leaf.dtype == jnp.float32 else leaf, shared)

    own = algorithm._replace(client=client, server=server)
    simulation = fjs.Simulation(
        own, population, fjs.full_participation(), fjs.Minibatches(2, steps=1),
        chunk_size=CLIENTS // 2, chunk_map="vmap", devices=jax.devices(),
    )  # fmt: skip
    settings = [
        simulation.hyperparameters(learning_rate=rate, clip=1.0, noise_multiplier=1.0)
        for rate in (0.01, 0.02, 0.03, 0.04)
    ]
    simulation.run(simulation.init(0, settings[0]), settings[0], ROUNDS)
    print("clients end", flush=True)
    alone = fjs.Simulation(
        own, population, fjs.full_participation(), fjs.Minibatches(2, steps=1),
        chunk_size=CLIENTS // 2, chunk_map="vmap",
    )  # fmt: skip
    many = SimulationBatch(alone, settings, jax.devices())
    states, _ = many.run(many.init(0), ROUNDS)
    jax.block_until_ready(states)
    print("settings end", flush=True)


@pytest.fixture
def in_program():
    """As while a program is traced."""
    factorize_one_by_one()
    with planning_for(Backend("cpu", None)):
        yield


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="calls of LAPACK end there")
def test_only_programs_map_factorizations_one_by_one():
    """A user's own `jax.vmap` of the same function keeps JAX's rule, before and after."""
    factorize_one_by_one()
    many = jnp.broadcast_to(jnp.eye(3), (4, 3, 3))

    def loops():
        return "scan" in str(jax.make_jaxpr(jax.vmap(jnp.linalg.cholesky))(many))

    def in_a_program():
        with planning_for(Backend("cpu", None)):
            return loops()

    assert [loops(), in_a_program(), loops(), in_a_program()] == [False, True, False, True]
    with planning_for(Backend("gpu", None)):
        assert not loops()


@pytest.mark.thorough
def test_factorizations_of_clients_servers_and_settings_end_on_two_devices():
    running = start(__file__)
    try:
        printed, errors = running.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        running.kill()
        running.communicate()
        raise
    assert running.returncode == 0, errors
    assert printed.split("\n")[:2] == ["clients end", "settings end"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "cholesky" else [pytest.mark.thorough])
        for name in FACTORIZATIONS
    ],
)
def test_a_mapped_factorization_is_that_of_each_matrix(name, in_program):
    function, many = (
        FACTORIZATIONS[name],
        jax.vmap(positive)(jax.random.split(jax.random.key(0), 3)),
    )
    each = jnp.stack([function(a[:4, :4]) for a in many])
    mapped = jax.jit(jax.vmap(function, in_axes=2))(jnp.moveaxis(many[:, :4, :4], 0, 2))
    np.testing.assert_allclose(np.abs(mapped), np.abs(each), rtol=2e-5, atol=2e-6)
    wanted = jax.jit(jax.grad(lambda a: jnp.sum(jnp.abs(function(a)))))
    slope = jax.grad(lambda many: jnp.sum(jnp.abs(jax.vmap(function)(many))))
    found = jax.jit(slope)(many[:, :4, :4])
    np.testing.assert_allclose(found[1], wanted(many[1, :4, :4]), rtol=1e-3, atol=1e-4)


def test_one_operand_may_be_the_same_for_all(in_program):
    a, right = positive(jax.random.key(0))[:3, :3], jnp.arange(12.0).reshape(4, 3)
    found = jax.vmap(jnp.linalg.solve, (None, 0))(a, right)
    np.testing.assert_allclose(found @ a.T, right, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    compute()
