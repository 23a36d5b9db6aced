"""How many clients an accelerator runs at once: by arithmetic, which a CPU can pretend to need."""

import contextlib
import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from support.problems import classification, least_squares, read_by, simulation_of

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine.layout import (
    DEFAULT_MEMORY,
    Plan,
    Workload,
    at_once,
    expected_lengths,
    multiplications,
    plan_of,
    steps_of,
    workload_of,
)
from fedjaxsim.engine.shape_bytes import bytes_of, bytes_of_work, intermediate_bytes, products_in
from fedjaxsim.engine.work import CohortSlots, _chunks
from fedjaxsim.kernels.backend import Backend, current, planning_for, platform
from fedjaxsim.kernels.primitives import equations
from fedjaxsim.models import cnn, gru, mlp
from fedjaxsim.models import linear as linear_model
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks import softmax, softmax_sequence

THOROUGH = pytest.mark.thorough
VALUES = {
    "learning_rate": 0.05,
    "lam": 0.3,
    "mu": 0.1,
    "clip": 0.2,
    "noise_multiplier": 0.5,
    "sampling_rate": 0.5,
}
CPU, CARD = Backend("cpu", None), Backend("gpu", 10**12)
LARGE_MODEL = Workload(1000, 100.0, 1, 1, model_bytes=10**6, multiplications=0)


@pytest.fixture
def pretend():
    """Has programs laid out as for an accelerator with so many bytes, on this CPU."""
    with contextlib.ExitStack() as stack:
        yield lambda memory: stack.enter_context(planning_for(Backend("gpu", memory)))


@pytest.mark.parametrize(
    ("free", "client", "places", "size"),
    [
        (4000, 100, 7, 7),  # a quarter is 1000 bytes: ten clients, who are more than there are
        (4000, 100, 10, 10),
        (4000, 100, 11, 6),  # two chunks, 6 and 5, rather than 10 and 1
        (4000, 100, 25, 9),  # three, 9, 9 and 7
        (4399, 100, 25, 9),  # 1099 bytes hold ten, too
        (4400, 100, 25, 9),  # and 1100 eleven, of which three chunks are needed as well
        (700, 100, 25, 2),  # one would fit, and two is the least
        (0, 100, 25, 2),
        (-(10**9), 100, 25, 2),
        (4000, 0, 25, 25),  # a client that takes nothing
        (4000, 100, 1, 2),
        # The largest batch of 65,535 leaves 16 chunks of a million clients.
        (10**15, 100, 10**6, 62_500),
        # An H200 lets 75 % of 139 GiB be allocated, a T4 75 % of 15: the CNN's 39 MB a client.
        (int(0.75 * 139 * 2**30), 39_000_000, 178, 178),
        (int(0.75 * 15 * 2**30), 39_000_000, 178, 60),  # 77 fit, and three chunks are needed
    ],
)
def test_the_size_of_a_batch_by_hand(free, client, places, size):
    assert at_once(free, client, places) == size


def test_batches_that_settings_fill_are_no_larger_than_asked_for():
    assert at_once(4000, 100, 25, most=4) == 4  # seven chunks of four, the last one of one
    assert at_once(4000, 100, 25, most=8) == 7  # four chunks, 7, 7, 7 and 4


def test_every_intermediate_value_counts_once_and_those_of_a_loop_once():
    def work(x):  # (4,) float32
        y = x * 2.0  # 16 bytes

        def step(carry, _):
            return carry + y, None  # 16 bytes, whatever the number of steps

        total, _ = jax.lax.scan(step, x, length=7)  # 16 bytes come out of it
        return jnp.sum(total)  # 4 bytes

    jaxpr = jax.make_jaxpr(work)(jnp.zeros(4)).jaxpr
    assert intermediate_bytes(jaxpr) == 16 + 16 + 16 + 4
    # Four copies of a state of 12 bytes, two of a message of 8.
    row, message = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32)
    assert bytes_of_work(jaxpr, row, message) == 52 + 4 * 12 + 2 * 8


def test_a_cpu_has_sizes_of_its_own_and_so_has_whoever_asks():
    def chosen(backend, *asked):
        plan = plan_of(LARGE_MODEL, backend, *asked).for_runs(2).in_memory(100, 345, 300)
        return plan.chunk_map, plan.chunk_size

    assert chosen(CPU) == ("scan", 16)
    card = Backend("gpu", 12_345)
    # A quarter of 12,000 bytes holds ten clients.
    assert chosen(card) == chosen(card, None, "vmap") == ("vmap", 10)
    assert chosen(card, 8) == ("vmap", 8)
    assert chosen(card, None, "scan") == ("scan", 16)


class Device:
    platform, process_index = "gpu", 0

    def __init__(self, stats):
        self.memory_stats = lambda: stats


@pytest.mark.parametrize(
    ("stats", "memory"),
    [({"bytes_limit": 500}, 500), ({"bytes_in_use": 5}, DEFAULT_MEMORY), (None, DEFAULT_MEMORY)],
)
def test_a_device_that_does_not_tell_has_a_stated_memory(stats, memory):
    plan = plan_of(LARGE_MODEL, current([Device(stats)])).for_runs(2)
    client = memory // 100  # so a quarter of the memory holds 25
    assert plan.in_memory(100, 0, client).chunk_size == 25


def test_a_program_is_laid_out_and_traced_for_its_own_devices():
    """On a host with a card, a run on the CPU is a CPU's, and the other way round."""
    seen, (population, task) = [], least_squares([4, 5])
    base = fedavg(task)

    def client(*args):
        seen.append(platform())
        return base.client(*args)

    algorithm = base._replace(client=client)
    for card in ("gpu", "cpu"):
        with planning_for(Backend(card, 2**30)):
            sim = Simulation(algorithm, population, poisson(0.5), Minibatches(2, steps=1))
        assert sim.program.plan.backend.platform == card
        hparams = read_by(sim, **VALUES).as_arrays()
        state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
        seen.clear()
        jax.make_jaxpr(sim.program.step)(state, hparams, sim.rows["train"])
        assert {*seen} == {card}
        assert platform() == "cpu"
    assert current(jax.devices()[:1]).platform == "cpu"


def shapes_of(jaxpr):
    found = {variable.aval.shape for equation in jaxpr.eqns for variable in equation.outvars}
    return found.union(
        *(shapes_of(inner) for e in jaxpr.eqns for inner in jaxprs_in_params(e.params))
    )


def linear(places=30, features=4, **settings):
    population, task = classification([6 + k % 5 for k in range(places)], features)
    sampling = poisson(1.0)
    return simulation_of("pmtl", task, population, sampling, Minibatches(3, steps=2), **settings)


def test_a_round_has_batches_of_the_size_that_memory_gives(pretend):
    pretend(2**40)
    sim = linear(features=5)
    hparams = read_by(sim, **VALUES).as_arrays()
    rows, state = (
        sim.rows["train"],
        jax.eval_shape(sim.program.init, jax.random.key(0), hparams),
    )
    client = sim.program.client_bytes(hparams, rows)
    held = bytes_of(rows) + bytes_of((state.personal, state.consumed))
    # An evaluation waits for its longest client.
    assert sim.program.plan.lengths
    assert not sim.program.plan_of_evaluation(state).lengths
    for fitting, size in ((12, 10), (0, 2)):  # of 30 places
        pretend(held + 4 * fitting * client)
        sim = linear(features=5)
        assert sim.plan_for(hparams).chunk_size == size
        batched = shapes_of(jax.make_jaxpr(sim.program.step)(state, hparams, rows).jaxpr)
        # The kernels of a batch of clients, and of no other number of them.
        assert {shape[0] for shape in batched if shape[1:] == (3, 5)} - {30, 1} == {size} - {30}


def test_each_of_several_devices_counts_what_lies_on_it(pretend):
    pretend(2**40)
    devices = jax.devices()[:2]
    sim = linear(features=5, devices=devices)
    hparams = read_by(sim, **VALUES).as_arrays()
    assert sim.plan_for(hparams).chunk_size == 15  # of 30 clients
    rows, state = (
        sim.placed["train"],
        jax.eval_shape(sim.program.init, jax.random.key(0), hparams),
    )
    fields, ranges = bytes_of(rows.fields), bytes_of((rows.start, rows.count))
    held = fields // 2 + ranges + bytes_of(state.personal) // 2
    pretend(held + 4 * 5 * sim.program.client_bytes(hparams, sim.rows["train"]))
    sim = linear(features=5, devices=devices)
    advance = jax.make_jaxpr(lambda state: sim.compiled.rounds(state, hparams, rows, rounds=2))(
        state
    )
    batched = {shape[0] for shape in shapes_of(advance.jaxpr) if shape[1:] == (3, 5)}
    assert batched - {1, 15, 30} == {5}


def test_settings_and_derivatives_beside_clients_leave_batches_of_64(pretend):
    pretend(2**40)
    sim = linear(150)
    hparams = read_by(sim, **VALUES)
    assert sim.plan_for(hparams).chunk_size == 150
    capped = dataclasses.replace(sim.program.plan, capped=True)
    for plan in (sim.program.plan.for_runs(2), capped):
        assert plan.in_memory(150, 0, 1).chunk_size == 50  # three even chunks


def test_an_evaluation_of_all_clients_at_once_copies_no_state(pretend):
    pretend(2**40)
    sorts = []
    for size in (None, 10):
        sim = linear(features=5, chunk_size=size)
        hparams, rows = read_by(sim, **VALUES).as_arrays(), sim.rows["train"]
        state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
        traced = jax.make_jaxpr(sim.program.evaluate)(state, hparams, rows)
        sorts.append(" sort[" in str(traced))
    # Batches of ten are of clients of similar length; all thirty are as they lie in the store.
    assert sorts == [False, True]


@pytest.mark.parametrize(
    ("client", "size"),
    [
        # Half of 10⁹ bytes in a step that costs as much as 10⁸, and 3·10⁸ for a batch: of all four
        # 8·(2·10⁹ + 10⁸) + 3·10⁸ = 17.1·10⁹, of two (8 + 1)·(10⁹ + 10⁸) + 6·10⁸ = 10.5·10⁹.
        (10**9, 2),
        # Of a thousandth, 8·1.02·10⁸ + 3·10⁸ = 1.12·10⁹ and 9·1.01·10⁸ + 6·10⁸ = 1.51·10⁹.
        (10**6, 4),
    ],
)
def test_an_accelerator_divides_clients_of_unequal_length_where_that_saves_bytes(client, size):
    plan = Plan(CARD, 64, "vmap", lengths=(8.0, 8.0, 1.0, 1.0), sorts=True)
    assert plan.in_memory(4, 0, client).chunk_size == size
    # A batch of several settings waits for its longest.
    assert plan.for_runs(2).in_memory(4, 0, client).chunk_size == 4


def test_an_accelerator_leaves_slots_that_are_almost_never_filled_to_a_second_batch():
    plan = Plan(CARD, 64, "vmap", lengths=(1.0,) * 100)

    def size(slots, client):
        return plan.in_memory(slots, 0, client).chunk_size

    # 100 of 206 clients by coins: 130 are three of ten more, of 178 slots. They save 48 halves of
    # 10⁸ bytes, and the loop costs 10⁸.
    assert size(178, 10**8) == 130
    assert size(178, 10**6) == 178
    assert size(100, 10**8) == 100  # nobody is drawn beside the 100


# --- the same numbers, within the memory ----------------------------------------------------------


def images(clients=10, side=16):
    rng = np.random.default_rng(0)
    rows = [3 + k % 4 for k in range(clients)]
    fields = {
        "x": rng.standard_normal((sum(rows), side, side), dtype=np.float32),
        "y": rng.integers(0, 3, sum(rows)).astype(np.int32),
    }
    return Population.from_flat(fields, rows)


def texts(clients=10, length=6):
    rng = np.random.default_rng(0)
    rows = [3 + k % 4 for k in range(clients)]
    tokens = rng.integers(0, 5, (2, sum(rows), length)).astype(np.int32)
    return Population.from_flat({"x": tokens[0], "y": tokens[1]}, rows)


PROBLEMS = {
    "linear": lambda: classification([3 + k % 4 for k in range(10)], 400),
    "mlp": lambda: (images(), softmax(mlp((16, 16), 3, (32,)), 3)),
    "cnn": lambda: (images(), softmax(cnn((16, 16), 3), 3)),
    "gru": lambda: (texts(), softmax_sequence(gru((6,), 5, 5, (16,)), 5)),
}


def of_problem(problem, name, **settings):
    population, task = PROBLEMS[problem]()
    minibatches = Minibatches(3, epochs=1)
    return simulation_of(name, task, population, poisson(1.0), minibatches, **settings)


def four_at_once(sim):
    """Bytes of memory of which a quarter of what is free holds the work of four clients."""
    hparams, rows = read_by(sim, **VALUES).as_arrays(), sim.rows["train"]
    state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
    held = bytes_of((rows, state.personal, state.consumed))
    return held + 4 * 4 * sim.program.client_bytes(hparams, rows)


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        pytest.param("linear", "fedavg", marks=THOROUGH),
        pytest.param("cnn", "pmtl", marks=THOROUGH),
        pytest.param("gru", "pmtl", marks=THOROUGH),
    ],
)
def test_forms_of_an_accelerator_give_what_those_of_a_cpu_give(problem, name, pretend):
    found, sim = [], of_problem(problem, name)
    hparams = read_by(sim, **VALUES)
    for accelerator in (False, True):
        if accelerator:
            pretend(2**40)
            sim = of_problem(problem, name)
            pretend(four_at_once(sim))
            sim = of_problem(problem, name)
            assert (sim.program.plan.chunk_map, sim.plan_for(hparams).chunk_size) == (
                "vmap",
                4,
            )  # 4, 4, and 2
        state, _ = sim.round(sim.init(0, hparams), hparams)
        state, metrics = sim.round(state, hparams)
        found.append((state.shared, state.personal, metrics))
        if problem == "linear":
            found[-1] += (sim.evaluate(state, hparams, "train").values,)
    chex.assert_trees_all_close(*found, rtol=2e-4, atol=2e-6)


@THOROUGH
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("problem", ["mlp", "cnn"])
def test_the_clients_at_work_take_no_more_than_a_quarter_of_what_is_free(problem, pretend):
    pretend(2**40)
    sim = of_problem(problem, "pmtl")
    hparams = read_by(sim, **VALUES).as_arrays()
    rows = sim.rows["train"]
    client = sim.program.client_bytes(hparams, rows)
    state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
    pretend(four_at_once(sim))
    sim = of_problem(problem, "pmtl")
    several = jax.jit(
        lambda state: sim.program.rounds(state, hparams, rows, 2)[0], donate_argnums=0
    )
    plan = several.lower(state).compile().memory_analysis()
    assert plan is not None
    assert plan.temp_size_in_bytes < 4 * client
    assert plan.alias_size_in_bytes >= bytes_of(state.personal)  # which are updated in place


# --- what a CPU chooses ---------------------------------------------------------------------------


def test_lengths_of_a_cohort_are_those_of_draws():
    # Two of three clients take 1 step and one takes 4: of two drawn, the longest takes 4 with
    # probability 1 − (2/3)².
    np.testing.assert_allclose(expected_lengths(np.array([1, 4, 1]), 2)[0], 4 * 5 / 9 + 1 * 4 / 9)
    rng = np.random.default_rng(0)
    steps = np.minimum(np.ceil(rng.random(5000) ** -0.9), 300)
    drawn = -np.sort(-rng.choice(steps, (2000, 100)), axis=1)
    # The mean of the longest varies by 2 % over 2000 draws, means of order statistics by less.
    np.testing.assert_allclose(expected_lengths(steps, 100)[0], drawn[:, 0].mean(), rtol=0.06)
    np.testing.assert_allclose(
        steps_of(expected_lengths(steps, 100), 20),
        steps_of(drawn.mean(axis=0), 20),
        rtol=0.1,
    )


def test_lengths_of_a_million_clients_are_quantiles_of_theirs():
    # numpy's quantiles take the time of clients · cohort: 7 minutes of a million clients.
    steps = np.arange(1.0, 10**6 + 1)
    lengths = expected_lengths(steps, 10**6)
    np.testing.assert_allclose(lengths[1:4], np.quantile(steps, 1 - np.arange(1, 4) / 10**6))
    assert len(lengths) == 10**6


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_program_does_not_grow_with_the_number_of_clients(kind):
    sizes = []
    with planning_for(Backend(kind, 2**40)):
        for places in (130, 1300):
            sim = linear(places)
            hparams, rows = read_by(sim, **VALUES).as_arrays(), sim.rows["train"]
            state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
            closed = jax.make_jaxpr(sim.program.step)(state, hparams, rows)
            constants = sum(np.size(constant) for constant in closed.consts)
            sizes.append((sum(1 for _ in equations(closed.jaxpr)), constants))
    assert sizes[0] == sizes[1]


def test_all_clients_of_a_batch_take_the_steps_of_the_first():
    assert steps_of(np.full(5, 3.0), 2) == 15
    lengths = np.array([9.0, 5, 4, 3, 3, 2, 2, 1])
    assert steps_of(lengths, 3) == 9 * 3 + 3 * 3 + 2 * 2


@pytest.mark.thorough
def test_sorted_by_length_a_round_is_the_same():
    """Sums of messages are exact under noise; a message's rounding depends on its place."""
    counts = [1, 1, 90, 2, 1, 60, 3, 1] * 5
    population, task = classification(counts)
    parts = fedavg(task), population, poisson(0.7), Minibatches(5, epochs=1)
    ends = []
    for changes in ({}, {"sorts": False}):
        sim = Simulation(*parts, chunk_map="vmap", chunk_size=6)
        assert sim.program.plan.sorts
        plan = dataclasses.replace(sim.program.plan, **changes)
        program = dataclasses.replace(sim.program, plan=plan)
        hparams = sim.hyperparameters(learning_rate=0.1, clip=0.5, noise_multiplier=0.3)
        state = program.init(jax.random.key(0), hparams.as_arrays())
        rows = sim.rows["train"]
        ends.append(program.rounds(state, hparams.as_arrays(), rows, 3)[0].shared)
    # In each of three rounds both runs round a weight, each by half a unit in its last place.
    atol = 3 * np.spacing(np.abs(ends[0].params["kernel"]).max())
    chex.assert_trees_all_close(*ends, rtol=0, atol=atol)


def test_multiplications_of_a_step_by_hand():
    def network(x):  # 7 rows: 7·5·3 and, three times, 7·3·3; an image of 6×6 by 4 filters of 3×3
        hidden = x @ jnp.ones((5, 3))
        hidden, _ = jax.lax.scan(lambda h, _: (h @ jnp.ones((3, 3)), None), hidden, length=3)
        image = jnp.sum(hidden) * jnp.ones((1, 1, 6, 6))
        return jax.lax.conv(image, jnp.ones((4, 1, 3, 3)), (1, 1), "VALID")

    jaxpr = jax.make_jaxpr(network)(jnp.ones((7, 5))).jaxpr
    assert products_in(jaxpr) == 7 * 5 * 3 + 3 * 7 * 3 * 3 + 4 * 4 * 4 * 9
    population, task = classification([30] * 3, 8)
    assert multiplications(task, population, 10) == 10 * 8 * 3


@pytest.mark.parametrize(
    ("facts", "backend", "given", "map_", "size"),
    [
        ({}, CPU, (), "vmap", 4),  # 1 MiB holds no four arrays of 1 MB
        ({"model_bytes": 2**12}, CPU, (), "vmap", 32),  # half of a cohort of 100
        ({"model_bytes": 2**12, "cohort": 1000.0}, CPU, (), "vmap", 64),
        ({"model_bytes": 2**14, "cohort": 1000.0}, CPU, (), "vmap", 16),  # of 64 kB each
        ({"multiplications": 2**22 + 1}, CPU, (), "scan", 16),
        ({"model_bytes": 2**12}, CPU, (None, None), "vmap", 32),
        ({"model_bytes": 2**12}, CPU, (7,), "vmap", 7),
        ({"model_bytes": 2**12 + 1}, CPU, (7,), "scan", 7),
        ({}, CPU, (None, "vmap"), "vmap", 64),
        ({"multiplications": 2**22 + 1}, CARD, (), "vmap", 64),  # until its memory is asked
        ({}, CARD, (7,), "vmap", 7),
        ({}, CARD, (None, "scan"), "scan", 16),
    ],
)
def test_a_plan_follows_from_facts(facts, backend, given, map_, size):
    plan = plan_of(LARGE_MODEL._replace(**facts), backend, *given)
    assert (plan.chunk_map, plan.chunk_size) == (map_, size)


@pytest.mark.parametrize(
    ("plan", "map_", "size"),
    [
        (Plan(CPU, 32, "vmap", model_bytes=2**9).for_runs(8), "vmap", 64),
        (Plan(CPU, 32, "vmap", model_bytes=2**9).for_runs(9), "scan", 16),  # above 4 kB together
        (Plan(CPU, 32, "vmap", model_bytes=2**9).for_runs(1), "vmap", 32),
        (Plan(CPU, 16, "scan").for_runs(2).in_cache(2**30), "vmap", 64),  # no states in a loop
        (Plan(CPU, 9, "scan", (9, "scan")).for_runs(2).in_cache(2**18), "scan", 4),  # of 1 MiB
        (Plan(CPU, 9, "scan", (9, "scan")).for_runs(2).in_cache(2**30), "scan", 2),
        (Plan(CPU, 9, "scan", (9, "scan")).in_cache(2**30), "scan", 9),
        (Plan(CPU, 16, "scan", useful=8).for_shared_model(), "vmap", 8),
        (Plan(CPU, 16, "scan").for_shared_model(), "vmap", 64),
        (Plan(CPU, 16, "scan", (None, "scan")).for_shared_model(), "scan", 16),
        (Plan(CARD, 64, "vmap").for_shared_model(), "vmap", 64),
        (Plan(CPU, 64, "vmap").in_memory(10, 0, 1), "vmap", 64),  # a CPU's is not asked
    ],
)
def test_a_plan_is_refined_by_what_a_trace_tells(plan, map_, size):
    assert (plan.chunk_map, plan.chunk_size) == (map_, size)


@pytest.mark.parametrize(
    ("counts", "rate", "model", "map_", "size"),
    [
        ([20] * 400, 1.0, "softmax", "vmap", 64),
        ([20] * 400, 0.25, "softmax", "vmap", 32),  # half of a cohort of 100
        ([20] * 100, 0.1, "softmax", "vmap", 4),
        ([20] * 100, 1.0, "mlp", "vmap", 8),  # 1 MiB holds 40 arrays of 26 kB
        ([20] * 4, 1.0, "cnn", "scan", 16),  # the products of one client fill a core
    ],
)
def test_a_cpu_chooses_by_cohort_model_and_rows(counts, rate, model, map_, size):
    shape = (28, 28) if model == "cnn" else (8,)
    rng = np.random.default_rng(0)
    fields = {
        "x": rng.standard_normal((sum(counts), *shape), dtype=np.float32),
        "y": np.zeros(sum(counts), np.int32),
    }
    models = {
        "softmax": lambda: linear_model(shape, 3),
        "mlp": lambda: mlp(shape, 3, (540,)),
        "cnn": lambda: cnn(shape, 3),
    }
    parts = Population.from_flat(fields, counts), poisson(rate), Minibatches(10, epochs=1)
    workload = workload_of(softmax(models[model](), 3), *parts)
    plan = plan_of(workload, CPU)
    assert (plan.chunk_map, plan.chunk_size) == (map_, size)
    assert plan_of(workload, CPU, chunk_size=5).chunk_size == 5


@pytest.mark.parametrize(("chunks", "traced"), [({}, 1), ({"chunk_map": "scan"}, 0)])
def test_a_loss_is_traced_for_the_plan_unless_a_user_gives_chunks(chunks, traced):
    losses, task = [], softmax(linear_model((2,), 2), 2)

    def loss(params, batch):
        losses.append(batch)
        return task.loss(params, batch)

    fields = {"x": np.zeros((4, 2)), "y": np.zeros(4, np.int32)}
    parts = Population.from_flat(fields, [2, 2]), poisson(1.0), Minibatches(2, epochs=1)
    Simulation(fedavg(task._replace(loss=loss, linear=None)), *parts, **chunks)
    assert len(losses) == traced


def test_the_layout_follows_from_the_public_bound_and_not_from_a_clients_rows():
    def chosen(longest, max_rows):
        counts = [5] * 399 + [longest]
        fields = {"x": np.zeros((sum(counts), 8)), "y": np.zeros(sum(counts), np.int32)}
        population = Population.from_flat(fields, counts, max_rows=max_rows)
        parts = population, poisson(1.0), Minibatches(10, epochs=1)
        return plan_of(workload_of(softmax(linear_model((8,), 3), 3), *parts), CPU)

    assert chosen(5, 300) == chosen(300, 300)
    assert not chosen(5, None).sorts
    assert chosen(300, None) == chosen(300, 300)
    with pytest.raises(ValueError, match="client '399' has 301 rows"):
        chosen(301, 300)


def test_an_empty_slot_holds_a_client_of_the_cohort():
    empty = CohortSlots(jnp.array([1, 9, 9]), jnp.array([1, 9, 9]), jnp.array([True, False, False]))
    chunks = _chunks(empty, [jnp.zeros(3)], 2, jnp.int32(1))
    np.testing.assert_array_equal(chunks.ids, [[1, 1], [1, 1]])
    np.testing.assert_array_equal(chunks.mask, [[True, False], [False, False]])
    assert np.all(np.asarray(chunks.slots)[~np.asarray(chunks.mask)] >= 3)  # written nowhere


def test_places_stay_empty_rather_than_batches_small():
    batch, one_by_one = Plan(CPU, 64, "vmap"), Plan(CPU, 16, "scan")
    sizes = {5: 5, 15: 15, 100: 50, 139: 47, 640: 64}
    assert {places: batch.even_size(places) for places in sizes} == sizes
    few = 31_623  # 3 · 83 · 127
    assert (batch.even_size(few), one_by_one.even_size(few)) == (64, 3)


@pytest.mark.thorough
@pytest.mark.usefixtures("fully_optimized")
def test_rounds_of_everyone_copy_no_states():
    # A piece that several uses read, one of which writes it back, would take two copies of all.
    population, task = classification([4 + k % 5 for k in range(150)], 400)
    parts = task, population, full_participation(), Minibatches(3, steps=2)
    sim = simulation_of("pmtl", *parts, chunk_map="scan")
    assert sim.program.plan.scans
    hparams = sim.check(sim.hyperparameters(learning_rate=0.01, clip=0.2))
    state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
    several = functools.partial(sim.program.rounds, rounds=2)
    compiled = jax.jit(several, donate_argnums=0).lower(state, hparams, sim.rows["train"])
    text = compiled.compile().as_text()
    assert text
    states = r"f32\[150,3,400\]"
    assert re.search(states + r"\S* dynamic-update-slice\(", text)
    assert not re.search(states + r"\S* (copy|transpose)\(", text)


@pytest.mark.thorough
def test_rounds_on_narrow_rows_compile_at_another_level():
    rng = np.random.default_rng(0)
    fields = {"x": rng.normal(size=(60, 40)).astype(np.float32), "y": rng.integers(0, 3, 60)}
    clients = Population.from_flat(fields, [10, 20, 30])
    task = softmax(linear_model((40,), 3), num_classes=3)
    sim = Simulation(fedavg(task), clients, poisson(0.5), Minibatches(4, steps=2))
    hparams = read_by(sim, **VALUES)
    assert sim.program.plan.narrow_rows
    plan = dataclasses.replace(sim.program.plan, narrow_rows=False)
    states = [
        program.compiled().rounds(sim.init(0, hparams), hparams, sim.rows["train"], rounds=3)[0]
        for program in (sim.program, dataclasses.replace(sim.program, plan=plan))
    ]
    first, second = (state.shared for state in states)
    chex.assert_trees_all_close(first, second, rtol=1e-5, atol=1e-7)


def test_a_batch_of_all_clients_is_in_a_branch_on_a_cpu_alone():
    """Outside of one, XLA computes a step again for each use: PMTL's rounds took four times."""
    population, task = least_squares([4] * 8)
    branches = {}
    for card in ("cpu", "gpu"):
        with planning_for(Backend(card, 2**30)):
            sim = Simulation(
                pmtl(task), population, full_participation(), Minibatches(2, steps=1),
                chunk_map="vmap", chunk_size=4,
            )  # fmt: skip
        hparams = read_by(sim, **VALUES).as_arrays()
        state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
        work = jax.make_jaxpr(sim.program.step)(state, hparams, sim.rows["train"])
        # What a branch returns of the four clients: their models.
        branches[card] = sum(
            equation.primitive.name == "cond"
            and any(v.aval.shape == (4, 1, 3) for v in equation.outvars)
            for equation in equations(work.jaxpr)
        )
    assert branches == {"cpu": 1, "gpu": 0}
