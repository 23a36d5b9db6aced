"""Parts of another kind are refused when a run is made."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import classification

import fedjaxsim as fjs
from fedjaxsim import models

POPULATION, TASK = classification([4, 5, 6, 7])
X = jnp.zeros(3)
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


def test_the_first_states_may_be_made_from_the_shapes_of_fields():
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


class Mine:
    """A state that JAX knows nothing of."""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            GOOD._replace(init=lambda *given: (Mine(), ())),
            "init must return a server state of arrays, got a Mine: a class becomes a pytree by",
        ),
        (
            GOOD._replace(client=lambda shared, personal, *rest: (personal, {"w": X}, {})),
            "server fails on a release of the message's structure, PyTreeDef({'w': *}): its state",
        ),
    ],
)
def test_states_and_messages_of_another_structure_are_shown(changed, message):
    sim = simulation(changed)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        sim.init(0, sim.hyperparameters(clip=1.0, noise_multiplier=1.0))
    assert str(refused.value).startswith(message)
