"""Attacks by a user's functions on other clients: refused before any compute, with the line."""

import copy
import dataclasses
import pickle
import re
from collections import defaultdict
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.experimental import io_callback, pallas
from jax.extend.core import Primitive
from support.problems import classification, read_by, rows_of_all

import fedjaxsim as fjs
from fedjaxsim.data.minibatches import RowReader
from fedjaxsim.engine.shard import CLIENTS as AXIS
from fedjaxsim.privacy.assumptions import MOST_ROWS
from fedjaxsim.tasks.streaming_metrics import StreamingMetric
from fedjaxsim.tasks.task import check_rows
from fedjaxsim.testing import check_billboard

VALUES = {"clip": 1.0, "noise_multiplier": 4.0, "learning_rate": 0.1, "lam": 0.1}
POPULATION, TASK = classification([6, 7, 8, 9], features=8)
BOX: dict[int, float] = {}
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def simulation(change=lambda data, x: 0.0, task=TASK, **functions):
    """PMTL on a tiny problem, whose message has `change(data, context)` added to the bias."""
    good = fjs.pmtl(task)

    def client(shared, personal, data, hparams, context):
        kept, message, metrics = good.client(shared, personal, data, hparams, context)
        return kept, message | {"bias": message["bias"] + change(data, context)}, metrics

    algorithm = good._replace(client=client)._replace(**functions)
    sampling, batches = fjs.full_participation(), fjs.Minibatches(4, steps=1)
    return fjs.Simulation(algorithm, POPULATION, sampling, batches, chunk_map="vmap")


def given(sim):
    return read_by(sim, **VALUES)


def refusal(sim):
    """The one line in which functions are refused."""
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        sim.check_start(0, given(sim))
    message = str(refused.value)
    assert "\n" not in message
    return message


def mean(data):
    """A number made of a client's own rows."""
    return data.full_pass(lambda total, batch: total + batch.sum(batch.fields["x"][:, 0]), 0.0)


# --- callbacks, batching, collectives, references -------------------------------------------------


@jax.custom_batching.custom_vmap
def over_chunk(x):
    return x


@over_chunk.def_vmap
def _(size, batched, x):
    return jax.tree.map(lambda leaf: leaf.max(0), x), jax.tree.map(lambda _: False, x)


def kept_on_the_host(x, late):
    def put(value, late):
        if late > 2:
            BOX[0] = float(value)
        return np.float32(0)

    return io_callback(put, NUMBER, x, late)


@jax.custom_jvp
def with_rule(x):
    return x


@with_rule.defjvp
def _(primals, tangents):
    jax.debug.callback(BOX.update, primals[0])
    return primals[0], tangents[0]


mine_p = Primitive("mine")  # its rule for batches could be anything
mine_p.def_abstract_eval(lambda x: x)


def in_a_branch(x, round_):
    return jax.lax.cond(round_ > 2, lambda x: kept_on_the_host(x, 3), lambda x: x, x)


def a_kernel(x):
    """Scratch memory of a kernel outlasts a client."""
    copy = pallas.pallas_call(lambda x, o: o.__setitem__(..., x[...]), NUMBER, interpret=True)
    return copy(x)


def rows_as_a_key(x):
    """Mapped over clients, the first one's key draws for all."""
    return jnp.full(4, x).astype(jnp.uint32)


def other_random_numbers(x):
    return jax.random.normal(jax.random.wrap_key_data(rows_as_a_key(x), impl="rbg"))


def bits_of_a_device(x):
    return jax.lax.rng_bit_generator(rows_as_a_key(x), ())[1].astype(float)


WAYS = {
    "custom_vmap_call": lambda data, c: over_chunk(mean(data)),
    "io_callback": lambda data, c: kept_on_the_host(mean(data), c.round),
    "io_callback ": lambda data, c: in_a_branch(mean(data), c.round),
    "pure_callback": lambda data, c: jax.pure_callback(lambda x: x, NUMBER, mean(data)),
    "debug_callback": lambda data, c: jax.jit(jax.grad(with_rule))(mean(data)),
    "debug_print": lambda data, c: jax.debug.print("{}", mean(data)) or 0.0,
    "mine": lambda data, c: mine_p.bind(mean(data)),
    "pallas_call": lambda data, c: a_kernel(mean(data)),
    "random_wrap": lambda data, c: other_random_numbers(mean(data)),
    "rng_bit_generator": lambda data, c: bits_of_a_device(mean(data)),
    "io_callback  ": lambda data, c: data.fold(lambda x, _: kept_on_the_host(x, 3), 0.0),
}


@pytest.mark.parametrize("primitive", WAYS)
def test_a_client_may_not_call(primitive):
    message = refusal(simulation(WAYS[primitive]))
    assert f" calls {primitive.strip()}: " in message
    assert re.search(r"test_own_code\.py:\d+\) calls", message)
    assert len(message.replace(__file__, "")) <= 200


def host(x):
    jax.debug.callback(lambda x: None, x)
    return x


def everywhere(tree):
    return jax.tree.map(host, tree)


GOOD = fjs.pmtl(TASK)
FUNCTIONS = {
    "init": lambda *args: everywhere(GOOD.init(*args)),
    "predict": lambda *args: everywhere(GOOD.predict(*args)),
    "server": lambda *args: everywhere(GOOD.server(*args)),
}
TASKS = {
    "loss": TASK._replace(loss=lambda *args: host(TASK.loss(*args)), linear=None),
    "metrics": TASK._replace(metrics=lambda *args: everywhere(TASK.metrics(*args))),
    "targets": TASK._replace(targets=lambda fields: host(fields["y"])),
    "streaming": TASK._replace(
        streaming_metrics={
            "mine": StreamingMetric(
                lambda _: jnp.zeros(()),
                lambda total, params, batch: host(total),
                lambda total: total,
            )
        }
    ),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *TASKS])
def test_no_function_of_an_algorithm_or_a_task_may(name):
    functions = {name: FUNCTIONS[name]} if name in FUNCTIONS else {}
    sim = simulation(task=TASKS.get(name, TASK), **functions)
    assert " calls debug_callback: " in refusal(sim)


def test_an_array_that_outlasts_a_client_is_refused():
    shared = jax.new_ref(jnp.zeros(()))

    def change(data, context):
        shared[...] += mean(data)
        return shared[...]

    assert "share" in refusal(simulation(change))


def test_a_collective_finds_no_axis():
    sim = simulation(lambda data, context: jax.lax.psum(mean(data), AXIS))
    with pytest.raises(NameError, match=AXIS):
        sim.check_start(0, given(sim))
    own_axis = jax.vmap(lambda x: jax.lax.psum(x, "mine"), axis_name="mine")
    sim = simulation(lambda data, context: own_axis(jnp.ones(3) * mean(data))[0])
    sim.check_start(0, given(sim))


def test_a_state_from_elsewhere_does_not_spare_the_check():
    good = simulation()
    state, bad = good.init(0, given(good)), simulation(WAYS["io_callback"])
    with pytest.raises(ValueError, match="io_callback"):
        bad.round(state, given(bad))
    with pytest.raises(ValueError, match="io_callback"):
        bad.run(state, given(bad), 1)


def test_a_state_made_by_the_program_alone_has_no_guarantee_unchecked():
    sim = simulation(WAYS["io_callback"])
    arrays = given(sim).as_arrays()
    state = jax.jit(sim.program.init)(jax.random.key(0, impl="threefry2x32"), arrays)
    with pytest.raises(ValueError, match="io_callback"):
        sim.guarantee(state)


def test_a_mechanism_and_a_sampler_of_ones_own_may_not_call_back():
    mechanism, sampling = fjs.gaussian(), fjs.poisson(0.5)

    def add(accumulator, messages, *others):
        host(messages.dense()["bias"])
        return mechanism.add(accumulator, messages, *others)

    def draw(key, *others):
        host(jax.random.uniform(key))
        return sampling.for_clients(4).draw(key, *others)

    sampler = sampling.for_clients(4)._replace(draw=draw)
    for parts in (
        {"mechanism": mechanism._replace(add=add)},
        {"sampling": sampling._replace(for_clients=lambda _: sampler)},
    ):
        message = refusal(dataclasses.replace(simulation(), **parts))
        assert " calls debug_callback: " in message


class Seen:
    """A pytree of one array whose structure's functions see and change concrete arrays."""

    values: ClassVar[list[float]] = [0.0]

    def __init__(self, array):
        self.array = array


def unflatten(_, children):
    if isinstance(children[0], jax.Array) and not isinstance(children[0], Tracer):
        Seen.values.append(float(np.asarray(children[0]).sum()))
    return Seen(*children)


def flatten(seen):
    concrete = isinstance(seen.array, jax.Array) and not isinstance(seen.array, Tracer)
    return (seen.array + Seen.values[-1] if concrete else seen.array,), None


jax.tree_util.register_pytree_node(Seen, flatten, unflatten)


@dataclasses.dataclass
class Made:
    """A registered dataclass, whose code sees all clients' arrays where it is put together."""

    array: Any

    def __post_init__(self):
        Seen.values.append(1.0)


jax.tree_util.register_dataclass(Made)


@pytest.mark.parametrize(("kind", "code"), [(Seen, "unflatten"), (Made, "Made.__post_init__")])
def test_a_state_that_runs_code_where_it_is_taken_apart_is_refused(kind, code):
    """Client 0's number became everybody's, and the server's, at ε = 0.894."""
    sim = simulation(init=lambda key, hparams: (jnp.zeros(2), kind(jnp.zeros(()))))
    assert f"register_dataclass: {code} (" in refusal(sim)


# --- the view -------------------------------------------------------------------------------------


def test_a_view_cannot_be_copied_into_another_clients():
    fields = {"x": jnp.arange(10.0)}
    count = jnp.int32(3)
    data: Any = fjs.ClientData(
        RowReader(fields, jnp.int32(2), count),
        count,
        jax.random.key(0),
        fjs.Minibatches(2, steps=1),
    )

    def seen(view):
        carry = jnp.zeros(10)
        return view.full_pass(
            lambda hit, batch: hit.at[batch.fields["x"].astype(int)].add(batch.weight), carry
        )

    with pytest.raises(TypeError):
        dataclasses.replace(data, count=10)
    with pytest.raises(TypeError):
        vars(data)
    for name in ("_fields", "_start", "fields", "_replace", "__wrapped__"):
        with pytest.raises(AttributeError, match=r"data\.fold"):
            getattr(data, name)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(data)
    with pytest.raises(AttributeError, match="cannot be changed"):
        copy.copy(data)
    own = [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(seen(data), own)
    object.__setattr__(data, "count", jnp.int32(8))
    np.testing.assert_array_equal(seen(data) > 0, own)
    np.testing.assert_array_equal(
        data._read(jnp.arange(-3, 9))["x"].clip(2, 4), data._read(jnp.arange(-3, 9))["x"]
    )


def other_start(data):
    """The rows that begin where a loop of the client's own says."""
    read = data._read

    def further(start):
        return start + data.count

    def body(_, carry):
        start, total = carry
        rows = read._replace(start=start)(jnp.arange(2))
        return further(start), total + rows["x"].sum()

    return jax.lax.fori_loop(0, 3, body, (read.start, 0.0))[1]


@pytest.mark.parametrize(
    "leak",
    [
        lambda data: rows_of_all(data)["x"].mean(),
        lambda data: rows_of_all(data)["x"][data._read.start + data.count, 0],
        lambda data: data._read._replace(length=data.count + 5)(data.count + 1)["x"].sum(),
        lambda data: data._read._replace(start=data._read.start + 1)(data.count)["x"].sum(),
        lambda data: data._read._replace(start=jnp.int32(0))(jnp.arange(3))["x"].sum(),
        lambda data: jax.lax.cond(
            data.count > 3, lambda x: x.mean(), lambda x: 0.0, rows_of_all(data)["x"]
        ),
        lambda data: jax.jit(lambda x: x[0, 0])(rows_of_all(data)["x"]),
        lambda data: jax.lax.scan(lambda t, x: (t + x[0], None), 0.0, rows_of_all(data)["x"])[0],
        lambda data: jax.lax.scan(lambda x, _: (x, x[0, 0]), rows_of_all(data)["x"], None, 1)[1][0],
        lambda data: jax.lax.while_loop(
            lambda carry: carry[1] == 0, lambda carry: (carry[0], 1.0 + carry[0][0, 0]),
            (rows_of_all(data)["x"], 0.0),
        )[1],
        lambda data: jax.vmap(lambda start: data._read._replace(start=start)(0)["x"][0])(
            jnp.arange(5)
        ).sum(),
        other_start,
    ],
)  # fmt: skip
def test_the_arrays_behind_a_view_serve_its_reads_alone(leak):
    message = refusal(simulation(lambda data, context: leak(data)))
    assert "uses the arrays behind a client's view" in message
    assert __file__ in message


def stealthy(data, context):
    return rows_of_all(data)["x"].mean()


@pytest.mark.thorough
def test_messages_that_depend_on_other_clients_are_found_for_the_last_client_too():
    sim = dataclasses.replace(simulation(stealthy), unchecked=True)
    with pytest.raises(AssertionError, match=r"round 1: `message` at \['bias'\] of client 0"):
        check_billboard(sim, given(sim), clients=[3], rounds=2)
    with pytest.raises(AssertionError, match=r"data of client 0 "):
        check_billboard(sim, given(sim), rounds=2)


# --- rows in closures -----------------------------------------------------------------------------

X = POPULATION.fields["x"]
MANY = np.random.default_rng(5).permutation(len(X))


WITH_ROWS = {
    "all": X,
    "the last": X[-5:],
    "behind zeros": np.concatenate([np.zeros((200_000, 8)), np.tile(X, (2000, 1))]),
    "shuffled": X[MANY].T,
    "one row": X[3].astype(np.float64),
    "columns": X[:, 1:].ravel(),
    "stacked": np.stack([X, X + 1])[::-1],
}


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(array, id=name, marks=[pytest.mark.thorough] if place % 3 else [])
        for place, (name, array) in enumerate(WITH_ROWS.items())
    ],
)
def test_an_array_with_rows_is_refused_wherever_it_is_used(array):
    assert f"{[*array.shape]} with rows of the clients' 'x'" in refusal(
        simulation(
            lambda data, context: jax.jit(lambda s: s * jnp.asarray(array).mean())(mean(data))
        )
    )
    sim = simulation(server=lambda shared, *_: jax.tree.map(lambda w: w + array.mean(), shared))
    sim.check_start(0, given(sim))  # a number computed of rows cannot be told


def test_other_arrays_are_not_taken_for_rows():
    rng = np.random.default_rng(99)
    innocent = [rng.normal(size=(50, 8)), np.eye(8), np.arange(40), np.ones((9, 4)), X + 1e-3]
    total = sum(array.sum() for array in innocent)
    sim = simulation(
        lambda data, context: mean(data) * sum(jnp.asarray(array).sum() for array in innocent)
    )
    assert np.isfinite(total)
    sim.check_start(0, given(sim))


# --- checks, targets and stages -------------------------------------------------------------------


def test_a_check_sees_no_values():
    seen = defaultdict(list)
    task = TASK._replace(check=lambda fields: [seen[n].append(v) for n, v in fields.items()])
    check_rows(task, POPULATION.fields)
    assert all(type(value) is jax.ShapeDtypeStruct for (value,) in seen.values())

    class Spy(list):
        def __contains__(self, label):
            seen["label"].append(label)
            return True

    check_rows(TASK._replace(labels=(Spy([0, 1, 2]),)), POPULATION.fields)
    assert "label" not in seen
    with pytest.raises(TypeError, match="float"):
        simulation(task=TASK._replace(check=lambda fields: BOX.update({0: float(fields["x"])})))


@pytest.mark.parametrize("keeps", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_warm_start_sees_one_client(keeps):
    first = fjs.Simulation(
        fjs.local(TASK), POPULATION, fjs.full_participation(), fjs.Minibatches(4, steps=1),
        fjs.no_release(),
    )  # fmt: skip
    state = first.init(0, given(first))
    state = dataclasses.replace(
        state,
        personal=jax.tree.map(
            lambda w: w + jnp.arange(4.0).reshape(-1, *[1] * (w.ndim - 1)), state.personal
        ),
    )

    def start(key, hparams, published, own):
        if keeps:  # where the server's state is made, there is no client
            return published, own
        return over_chunk(own), own

    sim = simulation()
    warm = fjs.WarmStart(start)
    shared = sim.init(0, given(sim)).shared
    assert shared.params.keys() == {"kernel", "bias"}
    second = dataclasses.replace(
        sim,
        algorithm=sim.algorithm._replace(
            warm_start=warm,
            init=lambda key, hparams: (TASK.init(key), TASK.init(key)),
            client=lambda shared, personal, data, hparams, context: (personal, shared, {}),
            server=lambda shared, release, hparams, round_: shared,
            predict=lambda shared, personal, hparams, client_id: personal,
        ),
    )
    hparams = given(second)
    if keeps:
        begun = second.start_from(state, hparams, first, given(first))
        np.testing.assert_array_equal(begun.personal["bias"], state.personal["bias"])
        return
    with pytest.raises(ValueError, match="custom_vmap_call"):
        second.start_from(state, hparams, first, given(first))


def test_a_guarantee_says_what_is_assumed_of_own_code():
    own = simulation(lambda data, context: mean(data))
    assert any(__name__ in sentence and "keep nothing" in sentence for sentence in own.public)
    plain = dataclasses.replace(own, algorithm=GOOD)
    assert plain.public == (MOST_ROWS,)

    def silent(*args):
        """Return the sum without noise, at the charge of noise."""
        release = plain.mechanism.release(*args)
        return release._replace(value=args[0].total)

    unnoised = fjs.privacy.pure()._replace(release=fjs.no_release().release)
    with pytest.raises(ValueError, match="parts that do not belong together"):
        dataclasses.replace(plain, mechanism=unnoised)

    whole = fjs.full_participation()
    sampler = whole.for_clients(POPULATION.num_clients)
    draws = sampler._replace(draw=lambda *args: sampler.draw(*args))
    for what, changed in (
        ("mechanism", {"mechanism": plain.mechanism._replace(release=silent)}),
        ("sampler", {"sampling": whole._replace(for_clients=lambda m: draws)}),
    ):
        _, sentence = dataclasses.replace(plain, **changed).public
        assert sentence.startswith(f"The {what} of {__name__}")
