"""A loop of one's own, as a user of JAX would write it; all is traced and nothing compiled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from support.problems import classification

import fedjaxsim as fjs
from fedjaxsim.gradients import Forward, Reverse, hypergradient, mean_metric


@functools.cache
def simulation():
    population, task = classification([6, 8, 5, 9])
    epoch = fjs.Minibatches(4, epochs=1)
    return fjs.Simulation(fjs.fedavg(task), population, fjs.poisson(0.5), epoch)


def hparams_of(rate):
    return simulation().hyperparameters(clip=1.0, noise_multiplier=1.0).replace(learning_rate=rate)


def after_rounds(program, rate):
    """A state after two rounds of a loop of one's own."""
    hparams = hparams_of(rate).as_arrays()
    begun = program.init(jax.random.key(0), hparams)
    return program.rounds(begun, hparams, simulation().rows["train"], 2)[0]


@pytest.mark.parametrize(
    ("transform", "function"),
    [
        pytest.param(jax.grad, "run", marks=pytest.mark.thorough),
        (jax.vmap, "evaluate"),
        (jax.jit, "guarantee"),
    ],
)
def test_what_computes_on_the_host_names_what_is_mapped_and_differentiated(transform, function):
    sim = simulation()

    def called(rate):
        hparams, state = hparams_of(rate), after_rounds(sim.program, rate)
        arguments = {"run": (hparams, 2), "evaluate": (hparams,), "guarantee": ()}[function]
        return getattr(sim, function)(state, *arguments)

    rate = jnp.ones(2) if transform is jax.vmap else jnp.ones(())
    with pytest.raises(ValueError, match=r"SimulationBatch.*hypergradient.*sim\.program"):
        jax.eval_shape(transform(called), rate)


@pytest.mark.parametrize("part", ["rounds", "evaluate"])
def test_reverse_mode_without_a_bound_on_rows_names_the_program_that_has_one(part):
    sim = simulation()

    def value(params):
        hparams = hparams_of(0.1).as_arrays()
        state = sim.program.init(jax.random.key(0), hparams)
        state = dataclasses.replace(state, shared=state.shared._replace(params=params))
        if part == "evaluate":
            measured = sim.program.evaluate(state, hparams, sim.rows["test"])
            return jnp.mean(measured.sums["loss"])
        state, _ = sim.program.step(state, hparams, sim.rows["train"])
        return sum(map(jnp.sum, jax.tree.leaves(state.shared.params)))

    params = sim.task.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"Reverse\(\)\.program.*mean_metric"):
        jax.eval_shape(jax.grad(value), params)
    jax.eval_shape(lambda at: jax.jvp(value, (at,), (at,)), params)


def test_the_program_of_reverse_mode_has_a_gradient():
    program = Reverse().program(simulation().program, simulation().rows["train"])
    loss = mean_metric(simulation(), split="test")
    gradient = jax.grad(lambda rate: loss(after_rounds(program, rate), hparams_of(rate)))
    assert jax.eval_shape(gradient, 0.1).shape == ()


@pytest.mark.parametrize("mode", [Forward(), pytest.param(Reverse(), marks=pytest.mark.thorough)])
def test_the_accuracy_has_no_derivative(mode):
    objective = mean_metric(simulation(), "accuracy", "test")
    gradient = hypergradient(simulation(), objective, 1, "learning_rate", mode=mode)
    with pytest.raises(ValueError, match=r"'accuracy' is constant between jumps.*take 'loss'"):
        gradient(0, hparams_of(0.1))
