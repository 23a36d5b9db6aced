"""What kinds of numbers a message may hold, and how a mechanism treats them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import LAWFUL, after, algorithm_of, classification, read_by

import fedjaxsim as fjs
from fedjaxsim.algorithms import optimizers
from fedjaxsim.data.minibatches import RowReader
from fedjaxsim.engine.evaluation import measure_with
from fedjaxsim.factories import make
from fedjaxsim.models import linear
from fedjaxsim.privacy.choices import MECHANISMS
from fedjaxsim.tasks import softmax

M = 6


def sending(message, problem, mechanism=fjs.gaussian()):
    """Everyone sends `message(client id)` in every round; the billboard is the last release."""
    population, task = problem

    def init(key, hparams):
        del key, hparams
        return jax.tree.map(jnp.zeros_like, message(jnp.int32(0))), ()

    def client(shared, personal, data, hparams, context):
        return personal, message(context.client_id), {}

    algorithm = fjs.Algorithm(
        init,
        client,
        lambda shared, release, hparams, round_: release,
        lambda shared, personal, hparams, client_id: task.init(jax.random.key(0)),
        task,
    )
    return fjs.Simulation(
        algorithm, population, fjs.full_participation(), fjs.Minibatches(2, steps=1), mechanism
    )


@pytest.fixture(scope="module")
def problem():
    return classification([4] * M)


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        (jnp.zeros(3, jnp.int32), r"int32\[3\] at \['other'\]"),
        (jnp.zeros((), bool), r"bool\[\] at \['other'\]"),
        (jnp.zeros(2, jnp.complex64), r"complex64\[2\] at \['other'\]"),
        (jnp.zeros(2, jnp.uint8), r"uint8\[2\] at \['other'\]"),
    ],
)
def test_leaves_that_are_no_real_floating_numbers_are_refused_at_init(problem, leaf, name):
    sim = sending(lambda k: {"update": jnp.zeros(3), "other": leaf}, problem)
    with pytest.raises(ValueError, match=name):
        sim.init(0, sim.hyperparameters(clip=1.0, noise_multiplier=1.0))


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.thorough)]
)
def test_narrow_messages_are_clipped_and_noised_in_float32(problem, dtype):
    # 0.3 is not a number of 16 bits, and 1000 of its neighbour have a norm of 9.5.
    sim = sending(lambda k: jnp.full(1000, 0.3, dtype), problem)
    hparams = sim.hyperparameters(clip=1.0)
    shapes = jax.eval_shape(sim.program.init, jax.random.key(0), hparams.as_arrays())
    assert shapes.shared.dtype == dtype
    seen = {}

    def release(accumulator, denominator, key, state, hparams, round_):
        out = fjs.gaussian().release(accumulator, denominator, key, state, hparams, round_)
        seen.update(total=accumulator.total.dtype, value=out.value.dtype)
        return out

    def total(state):
        return jnp.linalg.norm(state.astype(jnp.float32))

    watched = sending(
        lambda k: jnp.full(1000, 0.3, dtype), problem, fjs.gaussian()._replace(release=release)
    )
    state = after(watched, hparams, 1)
    assert seen == {"total": jnp.float32, "value": jnp.float32}
    # Without noise the mean of six equal messages of norm 1 has norm 1, up to the rounding of the
    # billboard to 16 bits.
    assert abs(float(total(state.shared)) - 1) < float(jnp.finfo(dtype).eps)


@pytest.mark.usefixtures("exact_noise")
def test_noise_on_a_narrow_billboard_has_the_values_of_float32(problem):
    # Float16 noise had 1,024 values. The billboard rounds, but the release does not.
    def release(accumulator, denominator, key, state, hparams, round_):
        out = fjs.gaussian().release(accumulator, denominator, key, state, hparams, round_)
        return out._replace(state=out.value)

    mechanism = fjs.gaussian()._replace(init=lambda _: jnp.zeros(4000), release=release)
    sim = sending(lambda k: jnp.zeros(4000, jnp.float16), problem, mechanism)
    hparams = sim.hyperparameters(clip=1.0, noise_multiplier=1.0)
    state = after(sim, hparams, 1)
    values = np.asarray(state.mechanism)
    assert len(np.unique(values)) > 3990
    assert abs(values.std() * M - 1) < 0.06  # five standard errors


def narrow_task(dtype):
    base = linear((4,), 3)
    model = fjs.Model(
        init=lambda key: jax.tree.map(lambda leaf: leaf.astype(dtype), base.init(key)),
        apply=lambda params, x: base.apply(params, x.astype(dtype)).astype(jnp.float32),
    )
    return softmax(model, 3)


def narrow_simulation(problem, factory, mechanism="gaussian"):
    population, _ = problem
    sim = fjs.Simulation(
        factory(narrow_task(jnp.bfloat16)), population, fjs.full_participation(),
        fjs.Minibatches(2, steps=1), make(MECHANISMS[mechanism]),
    )  # fmt: skip
    return sim, read_by(sim, lam=0.1, mu=0.1, clip=1.0, noise_multiplier=0.5, learning_rate=0.1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "pmtl" else pytest.mark.thorough)
        for name, system in LAWFUL.items()
        if system.mechanism in ("gaussian", "every-row") and not system.linear
    ],
)
def test_a_round_keeps_the_types_of_bfloat16_models(problem, name):
    factory = functools.partial(algorithm_of, name, num_clients=M)
    sim, hparams = narrow_simulation(problem, factory, LAWFUL[name].mechanism)
    key, arrays = sim.check_start(0, hparams)
    state = jax.eval_shape(sim.program.init, key, arrays)
    after, _ = jax.eval_shape(sim.program.step, state, arrays, sim.rows["train"])
    types = [jax.tree.map(lambda leaf: leaf.dtype, each.shared) for each in (state, after)]
    assert types[0] == types[1]
    assert jnp.bfloat16 in jax.tree.leaves(types[0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "factory",
    [fjs.pmtl, lambda task: fjs.fedavg(task, server_optimizer=optimizers.server(optax.adam))],
)
def test_bfloat16_models_work_under_noise(problem, factory):
    sim, hparams = narrow_simulation(problem, factory)
    state = sim.init(0, hparams)
    for _ in range(2):
        state, metrics = sim.round(state, hparams)
        assert int(metrics["nonfinite"]) == 0
    leaves = jax.tree.leaves(state.shared)
    assert all(np.all(np.isfinite(np.asarray(leaf, float))) for leaf in leaves)
    assert sim.guarantee(state, 1e-3).find("zero_out").epsilon is not None


def test_sums_of_metrics_in_bfloat16_do_not_stick(problem):
    # In bfloat16 4,096 + 16 is 4,096.
    _, task = problem
    count = 5000

    def ones(params, batch):
        return {"ones": jnp.ones(batch.weight.shape, jnp.bfloat16)}

    read = RowReader({"x": jnp.zeros((count, 4))}, jnp.int32(0), jnp.int32(count))
    batches, key = fjs.Minibatches(2, steps=1), jax.random.key(0)
    data = fjs.ClientData(read, jnp.int32(count), key, batches)
    measured = measure_with(task._replace(metrics=ones))(task.init(key), data)
    assert float(measured.sums["ones"]) == count

    def client(shared, personal, data, hparams, context):
        return personal, jnp.zeros(3), {"one": jnp.ones((), jnp.bfloat16), "count": jnp.int32(1)}

    sim = sending(lambda k: jnp.zeros(3), problem)
    sim = dataclasses.replace(sim, algorithm=sim.algorithm._replace(client=client))
    hparams, key = sim.hyperparameters(clip=1.0).as_arrays(), jax.random.key(0)
    state = jax.eval_shape(sim.program.init, key, hparams)
    drawn = jax.eval_shape(sim.program.draw, state, hparams)
    worked = jax.eval_shape(sim.program.work, state, hparams, sim.rows["train"], drawn)
    assert worked.metrics["one"].dtype == jnp.float32
    assert worked.metrics["count"].dtype == jnp.int32
