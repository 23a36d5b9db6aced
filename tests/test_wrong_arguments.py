"""Arguments that someone who knows JAX would try are refused by name, with what is allowed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import least_squares, read_by

import fedjaxsim as fjs

any_fjs: Any = fjs
X, Y = np.ones((4, 3)), np.ones(4)
POPULATION, TASK = least_squares([4, 3])
SIM: Any = fjs.Simulation(
    fjs.fedavg(TASK), POPULATION, fjs.poisson(0.5), fjs.Minibatches(2, steps=1)
)
HPARAMS = read_by(SIM, clip=1.0, noise_multiplier=1.0, sampling_rate=0.5)


def simulation(**settings):
    return any_fjs.Simulation(fjs.fedavg(TASK), POPULATION, fjs.poisson(0.5), **settings)


def run(*arguments, **settings):
    return SIM.run(SIM.init(0, HPARAMS), HPARAMS, *arguments, **settings)


WRONG = {
    "devices must be a list of JAX devices, such as jax.devices()[:2], got 2":
        lambda: simulation(devices=2),
    "minibatches must be of type Minibatches, such as Minibatches(10, epochs=1)":
        # A subclass could have other sizes each time it is asked.
        lambda: simulation(minibatches=type("Own", (fjs.Minibatches,), {})(2, steps=1)),
    "chunk_size must be an integer of at least 2, got 2.5": lambda: simulation(chunk_size=2.5),
    "learning_rate must be a number or one number per client (2), got '0.1'":
        lambda: SIM.hyperparameters(learning_rate="0.1"),
    "learning_rate must be a number or one number per client (2), got None":
        lambda: SIM.hyperparameters(learning_rate=None),
    "noise_multiplier must be a number or one number per round, got shape (0,)":
        lambda: SIM.hyperparameters(noise_multiplier=[]),
    "hyperparameter must be one of":
        lambda: SIM.hyperparameters(epsilon=1),
    "runs must be a dict of Records by label, got []":
        lambda: any_fjs.callbacks.compare_records([]),
    "key must be a seed, such as 0, or jax.random.key(0), got a float":
        lambda: SIM.init(0.5, HPARAMS),
    "key must be a seed, such as 0, or jax.random.key(0), got a Hyperparameters":
        lambda: SIM.init(HPARAMS, 0),
    "rounds must be an integer of at least 1, got 2.5": lambda: run(2.5),
    "eval_every must be an integer of at least 1, got 0": lambda: run(2, eval_every=0),
    "keep must be an integer of at least 0, got -1": lambda: run(2, keep=-1),
    "delta must lie in (0, 1), got 2": lambda: run(2, delta=2),
    "callbacks must be a list, got a Progress": lambda: run(2, callbacks=fjs.callbacks.Progress()),
    "callbacks must be a list, got a Records":
        lambda: fjs.callbacks.Checkpoints("folder", any_fjs.callbacks.Records()),
    "such as Progress(), got the class": lambda: run(2, callbacks=[fjs.callbacks.Progress]),
    "a callback must take (state, segment), got the function <lambda>":
        lambda: run(2, callbacks=[lambda segment: None]),
    "evaluate_privately must be an EvaluationPlan, got a str":
        lambda: run(2, evaluate_privately="loss"),
    "state must be one that init or run returned, got a Hyperparameters":
        lambda: SIM.run(HPARAMS, HPARAMS, 2),
    "state must be one that": lambda: SIM.guarantee(HPARAMS),
    "epsilon must lie in [1e-06, 1000000.0], got '1'":
        lambda: SIM.calibrate(HPARAMS, epsilon="1", rounds=3),
    "delta must lie in (0, 1), got '1e-5'":
        lambda: SIM.calibrate(HPARAMS, epsilon=1, rounds=3, delta="1e-5"),
    "clients must be a list with a dict of arrays for each, such as [{'x': …, 'y': …}], got a dict":
        lambda: any_fjs.Population.from_clients({"x": X, "y": Y}),
    "got a tuple in it": lambda: any_fjs.Population.from_clients([(X, Y)]),
    "fields must be a dict of arrays":
        lambda: any_fjs.Population.from_flat(X, [2, 2]),
    "clients must be indices in [0, 2), at least one, got [2]": lambda: POPULATION.of_clients([2]),
    "clients must be indices in [0, 2), at least one, got 1":
        lambda: any_fjs.Population.of_clients(POPULATION, 1),
    "split needs a Population, got a dict": lambda: any_fjs.data.split({"x": X}, test=0.2),
    "data set must be a dict of arrays": lambda: any_fjs.data.iid((X, Y), num_clients=2),
    "load needs the name of data": lambda: any_fjs.data.load(X),
    "private_examples needs a Task, got a Model":
        lambda: any_fjs.private_examples(fjs.models.linear((3,), 1)),
    "did you mean 'num_clients'": lambda: fjs.data.load("digits", clients=10),
    "batch size must be an integer of at least 1, got 10.0":
        lambda: any_fjs.Minibatches(10.0, steps=1),
    "local steps must be an integer of at least 1, got 1.5":
        lambda: any_fjs.Minibatches(10, steps=1.5),
    "sampling_rate must be one number, got '0.1'": lambda: any_fjs.poisson("0.1"),
    "max_rate must lie in (0, 1], got 2": lambda: fjs.poisson(0.1, max_rate=2),
    "a sweep needs a Simulation and a list": lambda: any_fjs.SimulationBatch(SIM, HPARAMS),
    "got a Algorithm": lambda: any_fjs.SimulationBatch(fjs.fedavg(TASK), [HPARAMS]),
    "evaluations must be an integer of at least 1, got 0": lambda: fjs.callbacks.Patience(0),
    "epsilon must lie in [1e-06, 1000000.0], got -1":
        lambda: fjs.private_examples(TASK, epsilon=-1),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_refused_by_name(words):
    with pytest.raises(ValueError, match=r"must|needs|mean") as error:
        WRONG[words]()
    assert words in str(error.value)
    assert len(str(error.value)) < 200


def test_jax_scalars_and_masks_are_what_they_stand_for():
    assert fjs.poisson(jnp.float32(0.5)).hyperparameters[0].default == 0.5
    z = SIM.calibrate(HPARAMS, epsilon=jnp.float32(1), rounds=3).noise_multiplier
    assert z == SIM.calibrate(HPARAMS, epsilon=1.0, rounds=3).noise_multiplier
    masked = POPULATION.of_clients(np.array([False, True]))
    np.testing.assert_array_equal(masked.fields["x"], POPULATION.of_clients([1]).fields["x"])


def test_a_state_that_a_run_reused_says_where_to_go_on():
    state = SIM.init(0, HPARAMS)
    after, _ = SIM.run(state, HPARAMS, 2)
    for use in (
        lambda: SIM.run(state, HPARAMS, 2),
        lambda: SIM.evaluate(state, HPARAMS),
        lambda: SIM.guarantee(state),
        lambda: SIM.round(state, HPARAMS),
    ):
        with pytest.raises(ValueError, match="the state is used up: run reuses"):
            use()
    assert int(jax.block_until_ready(SIM.run(after, HPARAMS, 2)[0].round)) == 4
