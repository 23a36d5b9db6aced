"""Functions whose results do not suit one another are refused before any compute, in one line."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from support.problems import classification, least_squares, read_by

from fedjaxsim import models
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.ppsgd import ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.privacy.mechanisms import gaussian, no_release
from fedjaxsim.privacy.samplers import poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import softmax

VALUES = {"clip": 0.3, "noise_multiplier": 0.8, "sampling_rate": 0.4, "lam": 0.0}
CLIENTS, TASK = classification([10] * 4)


def build(
    algorithm: Any,
    population: Any = CLIENTS,
    mechanism=gaussian(),
    minibatches=None,
    **settings: Any,
):
    minibatches = minibatches or Minibatches(4, epochs=1)
    return Simulation(algorithm, population, poisson(1.0), minibatches, mechanism, **settings)


def refusal(make):
    """The one line in which a simulation is refused, when it is made or before it starts."""

    def start():
        simulation = make()
        simulation.check_start(0, read_by(simulation, **VALUES))

    with pytest.raises(ValueError) as refused:  # noqa: PT011
        start()
    message = str(refused.value)
    assert "\n" not in message
    return message


def other_client(change):
    """PMTL with a client that returns what `change` makes of (personal, message, metrics)."""
    good = pmtl(TASK)
    return good._replace(client=lambda *arguments: change(*good.client(*arguments)))


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda personal, message, metrics: (personal, message), "2 values"),
        (lambda personal, message, metrics: message, "a dict"),
        (
            lambda personal, message, metrics: (
                personal | {"bias": personal["bias"][None]},
                message,
                {},
            ),
            "float32[3] at ['bias'], got float32[1, 3]",
        ),
        (lambda personal, message, metrics: (personal["bias"], message, {}), "PyTreeDef(*)"),
        (
            lambda personal, message, metrics: (personal, message, jnp.ones(())),
            "an array float32[]",
        ),
        (
            lambda personal, message, metrics: (personal, message, {"norms": jnp.ones(3)}),
            "an array float32[3] for 'norms'",
        ),
        (
            lambda personal, message, metrics: (personal, message, {"name": "loss"}),
            "a str for 'name'",
        ),
        (lambda personal, message, metrics: (personal, None, {}), "None"),
        (
            lambda personal, message, metrics: (personal, message | {"bias": 1.0}, {}),
            "a float at ['bias']",
        ),
    ],
)
def test_what_a_client_returns(change, got):
    message = refusal(lambda: build(other_client(change)))
    assert message.startswith("client must return")
    assert message.endswith(got)


def test_what_init_returns():
    first = fedavg(TASK).init
    for init, got in (
        (lambda key, hparams: TASK.init(key), "a dict"),
        # SharedModel is a tuple of two, but not this pair.
        (lambda key, hparams: first(key, hparams)[0], "a SharedModel"),
        (lambda key, hparams: (*first(key, hparams), ()), "3 values"),
        (lambda key, hparams: (TASK.init(key), 0.0), "a float"),
    ):
        message = refusal(lambda: build(fedavg(TASK)._replace(init=init)))  # noqa: B023
        assert message.startswith("init must return")
        assert message.endswith(got)


def test_what_the_server_returns():
    def of(server):
        algorithm = Algorithm(
            init=lambda key, hparams: (TASK.init(key), ()),
            client=lambda shared, personal, data, hparams, context: ((), shared, {}),
            server=server,
            predict=lambda shared, personal, hparams, client_id: shared,
            task=TASK,
        )
        message = refusal(lambda: build(algorithm))
        assert message.startswith("server ")
        return message

    def wider(shared, release, hparams, round_):
        return shared | {"bias": shared["bias"][None] + release["bias"]}

    assert "float32[3] at ['bias'], got float32[1, 3]" in of(wider)
    whole = of(lambda shared, release, *_: shared | {"bias": shared["bias"].astype(int)})
    assert whole.endswith("int32[3]")
    assert of(lambda shared, release, *_: shared["bias"]).endswith("PyTreeDef(*)")


def test_what_predict_returns():
    algorithm = pmtl(TASK)._replace(predict=lambda shared, personal, hparams, client_id: shared)
    message = refusal(lambda: build(algorithm))
    assert message.startswith("predict must return params")
    assert "got float32[3] at .params['bias'], " in message


def test_a_task_that_does_not_suit_the_data_or_the_algorithm():
    narrow = softmax(models.linear((5,), 3), 3)
    assert "examples of 5 numbers, got x of (4, 4)" in refusal(lambda: build(fedavg(narrow)))
    losses = TASK._replace(
        loss=lambda params, batch: TASK.metrics(params, batch)["loss"], linear=None
    )
    assert "loss must be one number, got shape (4,)" in refusal(lambda: build(pmtl(losses)))
    means = TASK._replace(
        metrics=lambda params, batch: {"loss": TASK.loss(params, batch)}, linear=None
    )
    assert "got 'loss' of shape ()" in refusal(lambda: build(pmtl(means)))
    regression, _ = least_squares([5] * 4)
    assert "got float64 (20,)" in refusal(lambda: build(pmtl(TASK), regression))
    unsplit = TASK._replace(output_layer="Dense_7")
    one = Minibatches(4, steps=1)
    assert "'Dense_7'" in refusal(lambda: build(ppsgd(unsplit), minibatches=one))


def test_mechanisms_must_suit_what_is_sent():
    assert "no_release()" in refusal(lambda: build(local(TASK), mechanism=gaussian()))
    assert "no_release()" in refusal(lambda: build(pmtl(TASK), mechanism=no_release()))


def test_what_a_function_raises_itself_is_left_alone():
    def client(shared, personal, data, hparams, context):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        refusal(lambda: build(pmtl(TASK)._replace(client=client)))


def test_a_client_is_traced_twice_to_compare_and_never_again():
    algorithm = pmtl(TASK)
    once = algorithm._replace(client=chex.assert_max_traces(algorithm.client, n=2))
    simulation = build(once)
    for seed in (0, 1):
        hparams = read_by(simulation, **VALUES, learning_rate=0.1 * seed + 0.1)
        simulation.check_start(seed, hparams)
        jax.eval_shape(simulation.round, simulation.init(seed, hparams), hparams.as_arrays())
    with pytest.raises(AssertionError, match="traced"):
        build(once).check_start(0, hparams)


def test_a_client_that_reads_everybodys_rows_is_refused():
    def client(shared, personal, data, hparams, context):
        mean = data.fields["x"].mean()  # looks like one's own
        return mean, jnp.sign(mean) * jnp.ones(3), {}

    algorithm = Algorithm(
        init=lambda key, hparams: (jnp.zeros(3), jnp.zeros(())),
        client=client,
        server=lambda shared, release, hparams, round_: shared + release,
        predict=lambda shared, personal, hparams, client_id: TASK.init(jax.random.key(0)),
        task=TASK,
    )
    with pytest.raises(AttributeError, match="fold"):
        refusal(lambda: build(algorithm))


def test_how_many_rows_others_have_does_not_show_in_a_full_pass():
    # Batches of a size that depends on the longest client would round a client's sums otherwise.
    sizes = set()

    def client(shared, personal, data, hparams, context):
        def step(total, batch):
            sizes.add(batch.weight.shape)
            return total + batch.sum(batch.fields["x"][:, 0])

        total = data.full_pass(step, jnp.zeros(()))
        return personal, jax.tree.map(lambda w: w + total, TASK.init(context.key)), {}

    few, _ = classification([5, 6, 7, 8])
    for population in (few, CLIENTS, classification([40] * 4)[0]):
        algorithm = pmtl(TASK)._replace(client=client)
        population = dataclasses.replace(population, max_rows=40)  # which is public
        sim = build(algorithm, population=population, chunk_map="vmap")
        hparams = read_by(sim, **VALUES)
        jax.eval_shape(sim.round, sim.init(0, hparams), hparams.as_arrays())
    assert sizes == {(16,)}
