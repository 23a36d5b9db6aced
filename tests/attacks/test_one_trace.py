"""Attacks by functions that do one thing while they are checked and another while they run."""

import dataclasses
import itertools
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import read_by

import fedjaxsim as fjs
from fedjaxsim import checks
from fedjaxsim.engine.shard import CLIENTS
from fedjaxsim.engine.traced_once import TracedOnce
from fedjaxsim.kernels.primitives import ImpureError

M, D = 6, 3
RNG = np.random.default_rng(0)
POPULATION: Any = fjs.Population.from_flat(
    {"x": RNG.normal(size=(4 * M, D)), "y": RNG.normal(size=4 * M)}, [4] * M
)
TASK = fjs.tasks.squared(fjs.models.linear((D,), 1))
TOTALS = POPULATION.fields["x"][:, 0].reshape(M, 4).sum(axis=1)


def simulation(seen=None, server=None, size=2, **settings):
    """Clients keep what `seen` makes of their total; the server keeps the last release."""

    def client(shared, personal, data, hparams, context):
        start = jnp.zeros(())
        total = data.full_pass(lambda t, batch: t + batch.sum(batch.fields["x"][:, 0]), start)
        kept = personal if seen is None else seen(total)
        return kept, jnp.zeros(size), {}

    algorithm = fjs.Algorithm(
        init=lambda key, hparams: (jnp.zeros(size), jnp.zeros(())),
        client=client,
        server=server or (lambda shared, release, hparams, round_: release),
        predict=lambda shared, personal, hparams, client_id: TASK.init(jax.random.key(0)),
        task=TASK,
    )
    sampling, batches = fjs.full_participation(), fjs.Minibatches(2, steps=1)
    return fjs.Simulation(algorithm, POPULATION, sampling, batches, **settings)


def begun(sim):
    hparams = read_by(sim, clip=1.0, noise_multiplier=10.0)
    return sim.init(0, hparams), hparams


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_collective_that_hides_from_the_check_finds_no_axis(devices):
    # By the name that is printed, on one device or on two, the sum is the client's own.
    def everybody(total):
        try:
            return jax.lax.psum(total, str(CLIENTS))
        except NameError:
            return total

    sim = simulation(everybody, devices=jax.devices()[:devices])
    state, hparams = begun(sim)
    state, _ = sim.round(state, hparams)
    np.testing.assert_allclose(state.personal, TOTALS, rtol=1e-5, atol=1e-6)


def test_a_collective_by_the_axis_itself_is_refused():
    # Traced where the axis is, for inputs of new shapes: what is traced is checked.
    def everybody(total):
        try:
            return jax.lax.psum(total, CLIENTS)
        except NameError:
            return total

    sim = simulation(everybody, devices=jax.devices()[:2])
    state, hparams = begun(sim)
    with pytest.raises(ValueError, match="psum"):
        jax.eval_shape(sim.transformed.step, state, hparams.as_arrays(), sim.placed["train"])


def test_a_flag_that_is_set_after_the_check_changes_nothing(capfd):
    flag = []

    def tell(total):
        if flag:
            jax.debug.print("a client holds {}", total)
        return total

    sim = simulation(tell)
    state, hparams = begun(sim)
    flag.append(True)
    state, _ = sim.round(state, hparams)
    jax.effects_barrier()
    np.testing.assert_allclose(state.personal, TOTALS, rtol=1e-5, atol=1e-6)
    assert "holds" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "inside",
    [pytest.param(False, marks=pytest.mark.thorough), True],
    ids=["a constant", "a constant of a jit"],
)
def test_an_array_that_is_filled_after_the_check_is_the_copy_that_was_checked(inside):
    x = POPULATION.fields["x"]
    teacher = np.zeros(x.size, np.float32)

    def read(release):
        return release + jnp.asarray(teacher)

    def server(shared, release, hparams, round_):
        return jax.jit(read)(release) if inside else read(release)

    sim = simulation(server=server, size=x.size)
    state, hparams = begun(sim)
    hparams = hparams.replace(noise_multiplier=0.0)
    teacher[...] = x.ravel()
    state, _ = sim.round(state, hparams)
    assert not np.any(state.shared)


@pytest.mark.thorough
def test_an_array_inside_a_linear_solve_is_a_copy_too():
    # Its four functions are one parameter of the equation.
    scale = np.full(2, 2.0, np.float32)

    def server(shared, release, hparams, round_):
        of = jnp.ones_like(release)
        return jax.lax.custom_linear_solve(
            lambda v: v * scale, of, lambda matvec, b: b / jnp.asarray(scale)
        )

    sim = simulation(server=server)
    state, hparams = begun(sim)
    scale[...] = 4.0
    state, _ = sim.round(state, hparams)
    np.testing.assert_array_equal(state.shared, [0.5, 0.5])


LATER = np.zeros((4 * M, D), np.float32)


@jax.custom_batching.custom_vmap
def mixed(total):
    return total


@mixed.def_vmap
def _(size, batched, total):
    return jnp.full_like(total, jnp.sum(total)), True


def printed(total):
    jax.debug.print("holds {}", total)
    return total


def of_rows(total):
    return total + jnp.sum(jnp.asarray(LATER))


@pytest.mark.parametrize("forward", [True, False], ids=["custom_jvp", "custom_vjp"])
@pytest.mark.parametrize(
    ("leak", "message"),
    [(printed, "calls debug_print"), (mixed, "custom_vmap"), (of_rows, "rows of the")],
)
def test_the_rule_of_a_derivative_is_checked_when_it_is_traced(leak, message, forward):
    # The engine differentiates a run, and its states are what the rule computes.
    def seen(total):
        return total

    if forward:
        seen = jax.custom_jvp(seen)
        seen.defjvp(lambda primals, tangents: (leak(*primals), *tangents))
    else:
        seen = jax.custom_vjp(seen)
        seen.defvjp(lambda total: (leak(total), None), lambda _, cotangent: (cotangent,))
    sim = simulation(seen)
    state, hparams = begun(sim)
    rows, arrays = sim.rows["train"], hparams.as_arrays()

    def personal(x):
        read = dataclasses.replace(rows, fields=rows.fields | {"x": x})
        return sim.program.rounds(state, arrays, read, 1)[0].personal

    x = rows.fields["x"]
    LATER[...] = POPULATION.fields["x"]
    differentiated = jax.make_jaxpr(
        lambda x: jax.jvp(personal, (x,), (x,))[0] if forward else jax.vjp(personal, x)[0]
    )
    try:
        with pytest.raises(ImpureError, match=message):
            differentiated(x)
    finally:
        LATER[...] = 0


def test_what_a_rule_of_a_derivative_alone_would_read_is_refused():
    @jax.custom_jvp
    def own(total, fields):
        return total

    own.defjvp(lambda primals, tangents: (jnp.sum(primals[1]), tangents[0]))

    def client(shared, personal, data, hparams, context):
        return own(jnp.zeros(()), data._read.fields["x"]), jnp.zeros(2), {}

    sim = simulation()
    sim = dataclasses.replace(sim, algorithm=sim.algorithm._replace(client=client))
    with pytest.raises(ImpureError, match="uses the arrays behind a client's view"):
        begun(sim)


@pytest.mark.thorough
def test_no_value_hides_behind_a_tracer():
    def behind(total):
        values = [getattr(total, name, None) for name in ("val", "primal", "tangent")]
        return total + sum(value for value in values if isinstance(value, jax.Array))

    sim = simulation(behind, chunk_map="vmap")
    state, hparams = begun(sim)
    state, _ = sim.round(state, hparams)
    np.testing.assert_allclose(state.personal, TOTALS, rtol=1e-5, atol=1e-6)


COUNTER = itertools.count()


@pytest.mark.parametrize(
    "number",
    [
        lambda: np.random.normal(size=2),  # noqa: NPY002
        lambda: np.random.normal(),  # noqa: NPY002
        lambda: time.perf_counter() % 1,  # float32 tells less of long ones than a trace takes
        lambda: next(COUNTER),
        lambda: jnp.zeros(2 + next(COUNTER)).sum(),
        lambda: np.arange(2) + next(COUNTER),
    ],
)
def test_a_number_of_the_host_that_changes_is_refused_with_its_line(number):
    with pytest.raises(ValueError, match=rf"{__file__}.*jax\.random from context\.key"):
        begun(simulation(lambda total: total + jnp.sum(jnp.asarray(number(), jnp.float32))))


def test_a_number_of_the_host_that_is_returned_as_it_is_names_its_function():
    def client(shared, personal, data, hparams, context):
        return personal, jnp.asarray(np.random.normal(size=2), jnp.float32), {}  # noqa: NPY002

    sim = simulation()
    sim = dataclasses.replace(sim, algorithm=sim.algorithm._replace(client=client))
    with pytest.raises(ValueError, match=rf"client \({__file__}:\d+\) gives other numbers"):
        begun(sim)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("author", "traces"), [(vars(checks), 1), ({"__name__": "fedjaxsim.some"}, 2)]
)
def test_functions_of_others_alone_are_traced_twice(author, traces):
    def counted(x):
        seen.append(x)
        return x

    seen = []
    made = types.FunctionType(counted.__code__, author, closure=counted.__closure__)
    jax.make_jaxpr(TracedOnce(None).of(made))(jnp.zeros(2))
    assert len(seen) == traces


def test_a_number_of_the_host_that_stays_is_a_constant():
    table = np.arange(3.0)
    sim = simulation(lambda total: total + table.sum() + len(table))
    state, hparams = begun(sim)
    state, _ = sim.round(state, hparams)
    np.testing.assert_allclose(state.personal, TOTALS + 6, rtol=1e-5, atol=1e-6)
