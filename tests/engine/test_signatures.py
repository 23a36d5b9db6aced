"""A function of the wrong signature is found twice: by a type checker, and when a run is made.

Every `pyright: ignore` here is itself an error to pyright where it finds nothing wrong.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any

import pytest
from problems import classification

import fedjaxsim as fjs

POPULATION, TASK = classification([4, 5, 6, 7])
GOOD, MECHANISM = fjs.fedavg(TASK), fjs.gaussian()


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
    r"the algorithm's client must take \(shared, personal, data, hparams, context\)": fjs.Algorithm(
        GOOD.init,
        without_context,  # pyright: ignore[reportArgumentType]
        GOOD.server,
        GOOD.predict,
        TASK,
    ),
    r"the algorithm's server must take \(shared, release, hparams, round\)": fjs.Algorithm(
        GOOD.init,
        a_client,
        a_server_with_messages,  # pyright: ignore[reportArgumentType]
        GOOD.predict,
        TASK,
    ),
    r"the mechanism's add must take \(accumulator, messages, mask, ids": fjs.Mechanism(
        MECHANISM.event,
        MECHANISM.init,
        MECHANISM.zero,
        add_without_state,  # pyright: ignore[reportArgumentType]
        MECHANISM.release,
    ),
    r"the mechanism's release must take \(accumulator, denominator": fjs.Mechanism(
        MECHANISM.event,
        MECHANISM.init,
        MECHANISM.zero,
        MECHANISM.add,
        release_of_messages,  # pyright: ignore[reportArgumentType]
    ),
}


def simulation(part):
    algorithm, mechanism = (part, None) if isinstance(part, fjs.Algorithm) else (GOOD, part)
    return fjs.Simulation(
        algorithm, POPULATION, fjs.full_participation(), fjs.Minibatches(2, steps=1), mechanism
    )


@pytest.mark.parametrize("expected", WRONG)
def test_a_function_of_the_wrong_signature_is_refused(expected):
    with pytest.raises(ValueError, match=expected):
        simulation(WRONG[expected])


def test_one_of_the_right_signature_is_not():
    assert simulation(RIGHT).num_clients == 4
