"""Parts of another kind, and functions with other arguments, are refused when a run is made.

A type checker finds a function of the wrong signature, too: every `pyright: ignore` here is itself
an error to pyright where it finds nothing wrong.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

import dataclasses
from typing import Any

import numpy as np
import pytest
from problems import classification

import fedjaxsim as fjs
from fedjaxsim import models
from fedjaxsim.algorithm import WarmStart
from fedjaxsim.engine.checks import _PARTS
from fedjaxsim.privacy.samplers import Sampler

POPULATION, TASK = classification([4, 5, 6, 7])
GOOD, MECHANISM = fjs.fedavg(TASK), fjs.gaussian()


def simulation(algorithm: Any = GOOD, mechanism: Any = MECHANISM, sampling: Any = None):
    sampling = sampling or fjs.full_participation()
    batches = fjs.Minibatches(2, steps=1)
    return fjs.Simulation(algorithm, POPULATION, sampling, batches, mechanism)


def refusal(**parts: Any) -> str:
    """The one line in which parts are refused."""
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        simulation(**parts)
    message = str(refused.value)
    assert "\n" not in message
    return message


# --- signatures -----------------------------------------------------------------------------------


def a_client(
    shared: Any,
    personal: Any,
    data: fjs.ClientData,
    hparams: fjs.Hyperparameters,
    context: fjs.Context,
) -> tuple[Any, Any, dict]:
    return personal, shared, {}


def without_context(shared: Any, personal: Any, data: Any, hparams: Any):
    return personal, shared, {}


def a_server_with_messages(shared: Any, release: Any, messages: Any, hparams: Any, round_: Any):
    return shared


def add_without_state(accumulator: Any, messages: fjs.Messages, mask: Any, ids: Any, hparams: Any):
    return accumulator


def release_of_messages(messages: fjs.Messages, key: Any):
    return messages


RIGHT = fjs.Algorithm(
    GOOD.init, a_client, GOOD.server, GOOD.predict, TASK, hyperparameters=GOOD.hyperparameters
)
WRONG = {
    "the algorithm's client": fjs.Algorithm(
        GOOD.init,
        without_context,  # pyright: ignore[reportArgumentType]
        GOOD.server,
        GOOD.predict,
        TASK,
    ),
    "the algorithm's server": fjs.Algorithm(
        GOOD.init,
        a_client,
        a_server_with_messages,  # pyright: ignore[reportArgumentType]
        GOOD.predict,
        TASK,
    ),
    "the mechanism's add": fjs.Mechanism(
        MECHANISM.event,
        MECHANISM.init,
        MECHANISM.zero,
        add_without_state,  # pyright: ignore[reportArgumentType]
        MECHANISM.release,
    ),
    "the mechanism's release": fjs.Mechanism(
        MECHANISM.event,
        MECHANISM.init,
        MECHANISM.zero,
        MECHANISM.add,
        release_of_messages,  # pyright: ignore[reportArgumentType]
    ),
}


@pytest.mark.parametrize("function", WRONG)
def test_a_function_of_the_wrong_signature_is_refused(function):
    part = WRONG[function]
    kind = "algorithm" if isinstance(part, fjs.Algorithm) else "mechanism"
    assert refusal(**{kind: part}).startswith(function)


def test_one_of_the_right_signature_is_not():
    assert simulation(RIGHT).num_clients == 4


@pytest.mark.parametrize("function", ["client", "server", "predict", "check"])
def test_the_arguments_of_an_algorithm(function):
    algorithm = GOOD._replace(**{function: lambda one, two, three: one})
    message = refusal(algorithm=algorithm)
    assert message.startswith(f"the algorithm's {function}")
    assert message.endswith("(one, two, three)")


def test_the_first_states_may_be_made_from_the_shapes_of_fields():
    message = refusal(algorithm=GOOD._replace(init=lambda key: key))
    assert message.startswith("the algorithm's init must take (key, hparams[, fields])")
    shapes = {}

    def init(key, hparams, fields):
        shapes.update(fields)
        return GOOD.init(key, hparams)

    sim = simulation(GOOD._replace(init=init))
    sim.init(0, sim.hyperparameters(clip=1.0, noise_multiplier=1.0))
    for name, rows in POPULATION.fields.items():
        assert shapes[name].shape == (1, *rows.shape[1:])
    # Shared code would make them of the former types.
    whole = {"x": POPULATION.fields["x"].astype(np.int16), "y": POPULATION.fields["y"]}
    other = sim.with_population(dataclasses.replace(POPULATION, fields=whole))
    other.init(0, other.hyperparameters(clip=1.0, noise_multiplier=1.0))
    assert shapes["x"].dtype == np.int16


def test_the_arguments_of_the_other_parts():
    def of_sampler(**changes):
        sampling = fjs.poisson(1.0)
        return fjs.Sampling(lambda m: sampling.for_clients(m)._replace(**changes))

    start = WarmStart(lambda hparams, own: own)
    not_callable: Any = fjs.Sampling(0.5)  # pyright: ignore[reportArgumentType]
    metrics: Any = lambda params: {}  # noqa: E731
    for parts, function in (
        ({"algorithm": GOOD._replace(task=TASK._replace(metrics=metrics))}, "the task's metrics"),
        ({"mechanism": MECHANISM._replace(release=lambda total: total)}, "the mechanism's release"),
        ({"sampling": not_callable}, "the sampling's for_clients"),
        ({"sampling": of_sampler(rate=0.5)}, "the sampler's rate"),
        ({"sampling": of_sampler(draw=lambda key: key)}, "the sampler's draw"),
        ({"algorithm": GOOD._replace(warm_start=start)}, "the warm_start's start"),
    ):
        assert refusal(**parts).startswith(function)


def test_the_arguments_that_are_checked_are_those_of_the_protocols():
    for name, kind in [
        ("algorithm", fjs.Algorithm),
        ("warm_start", WarmStart),
        ("task", fjs.Task),
        ("mechanism", fjs.Mechanism),
        ("sampling", fjs.Sampling),
        ("sampler", Sampler),
    ]:
        functions = {
            field
            for field, hint in kind.__annotations__.items()
            if "Callable" in str(hint) or getattr(hint, "_is_protocol", False)
        }
        assert set(_PARTS[name][2]) == functions


def test_parts_of_another_kind():
    def of_population(fields):
        with pytest.raises(ValueError, match="population") as refused:
            fjs.Simulation(GOOD, fields, fjs.full_participation())
        return str(refused.value)

    assert refusal(algorithm=fjs.pmtl).endswith("got the function pmtl")  # the factory
    assert refusal(algorithm=TASK).startswith("algorithm")
    assert refusal(algorithm=GOOD._replace(task=models.linear((4,), 3))).startswith("task")
    assert refusal(sampling=fjs.poisson).startswith("sampling")
    nothing: Any = fjs.Sampling(lambda num_clients: None)  # pyright: ignore[reportArgumentType]
    assert refusal(sampling=nothing).startswith("sampler")
    assert of_population(POPULATION.fields).endswith("got a dict")
