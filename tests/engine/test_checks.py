"""Functions that do not suit one another are refused before any compute, in one line."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from problems import classification, least_squares, read_by

from fedjaxsim import models
from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.ppsgd import ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.privacy.mechanisms import Mechanism, gaussian, no_release
from fedjaxsim.privacy.samplers import Sampler, Sampling, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import Task, softmax

VALUES = {"clip_norm": 0.3, "noise_multiplier": 0.8, "sampling_rate": 0.4, "lam": 0.0}
CLIENTS, TASK = classification([10] * 4)


def build(
    algorithm: Any,
    population: Any = CLIENTS,
    mechanism=None,
    minibatches=None,
    **settings: Any,
):
    minibatches = minibatches or Minibatches(4, epochs=1)
    return Simulation(algorithm, population, poisson(1.0), minibatches, mechanism, **settings)


def refusal(make):
    """What is said, in one line, when a simulation is made or before it starts."""

    def start():
        simulation = make()
        simulation.setup.check_start(0, read_by(simulation, **VALUES))

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
    ("change", "expected"),
    [
        (
            lambda personal, message, metrics: (personal, message),
            "client must return 3 values, (personal, message, metrics), got 2 values",
        ),
        (
            lambda personal, message, metrics: message,
            "client must return 3 values, (personal, message, metrics), got a dict",
        ),
        (
            lambda personal, message, metrics: (
                personal | {"bias": personal["bias"][None]},
                message,
                {},
            ),
            "client must return a personal state of the shapes it was given: "
            "float32[3] at ['bias'], got float32[1, 3]",
        ),
        (
            lambda personal, message, metrics: (personal["bias"], message, {}),
            "client must return a personal state of the structure it was given, "
            "PyTreeDef({'bias': *, 'kernel': *}), got PyTreeDef(*)",
        ),
        (
            lambda personal, message, metrics: (personal, message, metrics["loss"]),
            "client must return metrics as a dict of scalars by name, {} for none, "
            "got an array float32[]",
        ),
        (
            lambda personal, message, metrics: (personal, message, {"norms": jnp.ones(3)}),
            "client must return scalar metrics, got 'norms' of shape (3,)",
        ),
        (
            lambda personal, message, metrics: (personal, message, {"name": "loss"}),
            "client must return scalar metrics, got a str for 'name'",
        ),
        (
            lambda personal, message, metrics: (personal, None, {}),
            "client must return the message () where nothing is sent, got None",
        ),
        (
            lambda personal, message, metrics: (personal, message | {"bias": 1.0}, {}),
            "client must return a message of arrays, got a float at ['bias']",
        ),
    ],
)
def test_what_a_client_returns(change, expected):
    assert refusal(lambda: build(other_client(change))) == expected


def test_what_init_returns():
    def of(init):
        return refusal(lambda: build(fedavg(TASK)._replace(init=init)))

    wanted = "init must return 2 values, (shared, personal), got "
    first = fedavg(TASK).init
    assert of(lambda key, hparams: TASK.init(key)) == wanted + "a dict"
    # SharedModel is a tuple of two, but not this pair.
    assert of(lambda key, hparams: first(key, hparams)[0]) == wanted + "a SharedModel"
    assert of(lambda key, hparams: (*first(key, hparams), ())) == wanted + "3 values"
    assert of(lambda key, hparams: (TASK.init(key), 0.0)) == (
        "init must return personal states of arrays, got a float"
    )


def test_what_the_server_returns():
    def of(server):
        algorithm = Algorithm(
            init=lambda key, hparams: (TASK.init(key), ()),
            client=lambda shared, personal, data, hparams, context: ((), shared, {}),
            server=server,
            predict=lambda shared, personal, hparams, client_id: shared,
            task=TASK,
        )
        return refusal(lambda: build(algorithm))

    def wider(shared, release, hparams, round_):
        return shared | {"bias": shared["bias"][None] + release["bias"]}

    wrong = (
        "server must return a server state of the shapes it was given: float32[3] at ['bias'], got "
    )
    assert of(wider) == wrong + "float32[1, 3]"
    whole = of(lambda shared, release, *_: shared | {"bias": shared["bias"].astype(int)})
    assert whole == wrong + "int32[3]"
    assert of(lambda shared, release, *_: shared["bias"]) == (
        "server must return a server state of the structure it was given, "
        "PyTreeDef({'bias': *, 'kernel': *}), got PyTreeDef(*)"
    )
    assert of(lambda shared, release, *_: shared["bias"] + release["weights"]) == (
        "server fails on the release, float32[3] at ['bias'], float32[3, 4] at ['kernel']: "
        "'weights'"
    )


def test_what_predict_returns():
    algorithm = pmtl(TASK)._replace(predict=lambda shared, personal, hparams, client_id: shared)
    message = refusal(lambda: build(algorithm))
    assert message.startswith(
        "predict must return params that the task takes, such as float32[3] at ['bias'], "
        "float32[3, 4] at ['kernel'], got float32[3] at .params['bias'], "
    )


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        ("init", "key, hparams"),
        ("client", "shared, personal, data, hparams, context"),
        ("server", "shared, release, hparams, round"),
        ("predict", "shared, personal, hparams, client_id"),
        ("check", "hparams"),
    ],
)
def test_the_arguments_of_an_algorithm(function, wanted):
    algorithm = pmtl(TASK)._replace(**{function: lambda one, two, three: one})
    expected = f"the algorithm's {function} must take ({wanted}), but takes (one, two, three)"
    assert refusal(lambda: build(algorithm)) == expected


def test_the_arguments_of_the_other_parts():
    task = TASK._replace(metrics=lambda params: {})
    assert refusal(lambda: build(pmtl(task))) == (
        "the task's metrics must take (params, batch), but takes (params)"
    )
    mechanism = gaussian()._replace(release=lambda accumulator: accumulator)
    assert refusal(lambda: build(pmtl(TASK), mechanism=mechanism)) == (
        "the mechanism's release must take (accumulator, denominator, key, state, hparams, round), "
        "but takes (accumulator)"
    )

    def of_sampling(sampling):
        return refusal(lambda: Simulation(pmtl(TASK), CLIENTS, sampling, Minibatches(4, steps=1)))

    def of_sampler(**changes):
        return of_sampling(Sampling(lambda m: poisson(1.0).for_clients(m)._replace(**changes)))

    assert of_sampling(Sampling(0.5)) == (  # pyright: ignore[reportArgumentType]
        "the sampling's for_clients must be a function of (num_clients), got a float"
    )
    assert of_sampler(rate=0.5) == "the sampler's rate must be a function of (hparams), got a float"
    assert of_sampler(draw=lambda key: key) == (
        "the sampler's draw must take (key, round, hparams), but takes (key)"
    )
    start = WarmStart(lambda hparams, own: own)
    assert refusal(lambda: build(pmtl(TASK)._replace(warm_start=start))) == (
        "the warm_start's start must take (hparams, published, own), but takes (hparams, own)"
    )


def test_the_arguments_that_are_checked_are_those_of_the_protocols():
    from fedjaxsim.engine.checks import _ARGUMENTS

    for name, kind in [
        ("algorithm", Algorithm),
        ("warm_start", WarmStart),
        ("task", Task),
        ("mechanism", Mechanism),
        ("sampling", Sampling),
        ("sampler", Sampler),
    ]:
        functions = {
            field
            for field, hint in kind.__annotations__.items()
            if "Callable" in str(hint) or getattr(hint, "_is_protocol", False)
        }
        assert set(_ARGUMENTS[name]) == functions


def test_parts_of_another_kind():
    assert refusal(lambda: build(pmtl)) == (  # the factory
        "algorithm must be of type Algorithm, such as pmtl(task), got the function pmtl"
    )
    assert refusal(lambda: build(TASK)).startswith("algorithm must be")
    assert refusal(lambda: build(pmtl(TASK)._replace(task=models.linear((4,), 3)))) == (  # pyright: ignore[reportArgumentType]
        "task must be of type Task, such as softmax(model, num_classes), got a Model"
    )
    factory: Any = poisson
    assert refusal(lambda: Simulation(pmtl(TASK), CLIENTS, factory)) == (
        "sampling must be of type Sampling, such as poisson(0.2), got the function poisson"
    )
    nothing: Any = Sampling(lambda num_clients: None)  # pyright: ignore[reportArgumentType]
    assert refusal(lambda: Simulation(pmtl(TASK), CLIENTS, nothing)).startswith(
        "sampler must be of type Sampler"
    )
    assert refusal(lambda: build(pmtl(TASK), population=CLIENTS.fields)) == (
        "population must be of type Population, such as Population.from_clients(clients), "
        "got a dict"
    )


def test_a_task_that_does_not_suit_the_data_or_the_algorithm():
    narrow = softmax(models.linear((5,), 3), 3)
    message = refusal(lambda: build(fedavg(narrow)))
    assert message.startswith(
        "the task's loss fails on rows of the population, float32[40, 4] at ['x'], "
        "int32[40] at ['y']: "
    )
    losses = TASK._replace(
        loss=lambda params, batch: TASK.metrics(params, batch)["loss"], linear=None
    )
    assert refusal(lambda: build(pmtl(losses))) == (
        "the task's loss must be one number for a batch, got shape (4,)"
    )
    means = TASK._replace(
        metrics=lambda params, batch: {"loss": TASK.loss(params, batch)}, linear=None
    )
    assert refusal(lambda: build(pmtl(means))) == (
        "the task's metrics must be per-example values, of shape (3,) for 3 rows, "
        "got 'loss' of shape ()"
    )
    regression, _ = least_squares([5] * 4)
    assert refusal(lambda: build(pmtl(TASK), regression)) == (
        "softmax needs integer labels (n,), got float64 (20,); use squared for others"
    )
    unsplit = TASK._replace(output_layer="Dense_7")
    assert refusal(lambda: build(ppsgd(unsplit), minibatches=Minibatches(4, steps=1))) == (
        "'Dense_7' selects none of the parameters, which are ['bias', 'kernel']; "
        "a name must be a path, or the beginning of paths up to a '/'"
    )


def test_mechanisms_must_suit_what_is_sent():
    assert "sends nothing, so its mechanism must be no_release()" in refusal(
        lambda: build(local(TASK), mechanism=gaussian())
    )
    assert "which no_release() would lose" in refusal(
        lambda: build(pmtl(TASK), mechanism=no_release())
    )


def test_what_a_function_raises_itself_is_left_alone():
    def client(shared, personal, data, hparams, context):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        refusal(lambda: build(pmtl(TASK)._replace(client=client)))


def test_functions_are_traced_once_whatever_the_seed():
    algorithm = pmtl(TASK)
    once = algorithm._replace(client=chex.assert_max_traces(algorithm.client, n=1))
    simulation = build(once)
    for seed in (0, 1):
        hparams = read_by(simulation, **VALUES, learning_rate=0.1 * seed + 0.1)
        simulation.setup.check_start(seed, hparams)
    with pytest.raises(AssertionError, match="traced"):
        build(once).setup.check_start(0, hparams)


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
        sim = build(algorithm, population=population, chunk_map="vmap")
        hparams = read_by(sim, **VALUES)
        jax.eval_shape(sim.round, sim.init(0, hparams), hparams.as_arrays())
    assert sizes == {(16,)}
