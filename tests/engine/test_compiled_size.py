"""What is compiled stays small, whatever is simulated.

Compilers take time in proportion to a program's operations, or worse: shared expressions may be
fused into each of their uses. So nothing may be written out as often as there are clients, places
of a cohort, chunks, local steps or rounds of a shuffle. Operations are counted in what JAX traces,
in the bodies of loops and branches too, before any compiler sees it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from support.problems import LAWFUL, classification, least_squares, read_by, simulation_of

from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.layout import ChunkMap
from fedjaxsim.privacy.samplers import full_participation, poisson

pytestmark = pytest.mark.usefixtures("unrolled")
HOW = {
    "epochs": lambda n: Minibatches(2, epochs=n),
    "steps": lambda n: Minibatches(2, steps=n),
    "passes": lambda n: Minibatches(2, steps=n, passes=n),
}
ROUNDS = [
    *(("pmtl", how) for how in HOW),
    *(pytest.param(name, "steps", marks=pytest.mark.thorough) for name in LAWFUL if name != "pmtl"),
]
MOST = 4000
"""Operations of a round, of which today's have 1,700 to 2,700.

Most are those of threefry: a key or a random number takes some 110, and a round derives a dozen and
a half. The bound leaves room for ten more of them, and none for anything written out per client. It
is for going over the minibatches once; Ditto does so twice.
"""


def operations(jaxpr) -> int:
    inner = (operations(code) for eqn in jaxpr.eqns for code in jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(inner)


def largest(jaxpr) -> int:
    """The number of elements of the largest array."""
    inner = (largest(code) for eqn in jaxpr.eqns for code in jaxprs_in_params(eqn.params))
    here = (math.prod(out.aval.shape) for eqn in jaxpr.eqns for out in eqn.outvars)
    return max([0, *here, *inner])


@functools.cache
def operations_of(
    name,
    how,
    steps,
    clients=6,
    sampling=None,
    chunk_map: ChunkMap = "scan",
    chunk_size=2,
    rounds=2,
):
    population, task = (least_squares if name == "ppsgd" else classification)([5] * clients)
    sim = simulation_of(
        name,
        task,
        population,
        sampling or full_participation(),
        HOW[how](steps),
        chunk_map=chunk_map,
        chunk_size=chunk_size,
    )
    hparams = sim.check(read_by(sim, learning_rate=0.1, lam=0.0, clip=1.0, noise_multiplier=1.0))
    state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
    segment = functools.partial(sim.program.rounds, rounds=rounds)
    return operations(jax.make_jaxpr(segment)(state, hparams, sim.rows["train"]).jaxpr)


def test_operations_inside_loops_are_counted():
    def written_out(x):
        for _ in range(5):
            x = jnp.sin(x)
        return x

    def loop(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=5)[0]

    assert operations(jax.make_jaxpr(written_out)(1.0).jaxpr) == 5
    assert operations(jax.make_jaxpr(loop)(1.0).jaxpr) == 2  # the loop, and the sine in it


@pytest.mark.parametrize(("name", "how"), ROUNDS)
def test_a_round_is_small(name, how):
    assert 100 < operations_of(name, how, 3) < MOST * SYSTEMS[name].local_passes


@pytest.mark.parametrize("how", HOW)
def test_local_work_adds_no_operations(how):
    assert operations_of("pmtl", how, 3) == operations_of("pmtl", how, 30)


@pytest.mark.parametrize(("how", "chunk_map"), [("epochs", "scan"), ("steps", "vmap")])
def test_clients_chunks_and_rounds_add_no_operations(how, chunk_map):
    few = operations_of("pmtl", how, 3, chunk_map=chunk_map)
    many = operations_of("pmtl", how, 3, 60, chunk_map=chunk_map, chunk_size=10, rounds=50)
    assert few == many < MOST


def test_cohorts_add_no_operations():
    rates = (0.05, 0.1)  # cohorts that may lose members have an operation for it
    few, many = (operations_of("fedavg", "steps", 1, 60, poisson(rate)) for rate in rates)
    assert few == many < MOST


@pytest.mark.parametrize("chunk_map", ["scan", "vmap"])
def test_mp_mtl_forms_no_matrix_for_every_task(chunk_map):
    # W Wᵀ is a product of matrices (d, c) of a chunk's models, never a sum of outer products.
    m, d = 600, 30
    population, task = least_squares([1] * m, features=d)
    sim = simulation_of(
        "mpmtl",
        task,
        population,
        full_participation(),
        Minibatches(1, steps=1),
        chunk_map=chunk_map,
    )
    hparams = sim.check(read_by(sim, learning_rate=0.1, lam=0.0, clip=1.0, noise_multiplier=1.0))
    state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
    traced = jax.make_jaxpr(sim.program.step)(state, hparams, sim.rows["train"])
    assert m * (d + 1) <= largest(traced.jaxpr) < 2 * m * (d + 1)
