"""The estimate that cuts sweeps into chunks, against what compiled programs say they need."""

from typing import Any

import jax
import optax
import pytest
from support.problems import classification, read_by

from fedjaxsim import fedavg, gaussian, local, no_release, pmtl, ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.models.network import mlp
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.runs.memory import bytes_per_run, traffic
from fedjaxsim.simulation import Simulation
from fedjaxsim.simulation_batch import SimulationBatch
from fedjaxsim.tasks.task import known_regression, softmax

pytestmark = pytest.mark.usefixtures("optimized")


def stream():
    population, task = regression_stream(1000, 100), known_regression(100)
    return Simulation(ppsgd(task), population, full_participation(), Minibatches(10, steps=1))


def network():
    population, _ = classification([20] * 30)
    task = softmax(mlp((4,), 3, hidden=(64,)), 3)
    return Simulation(pmtl(task), population, poisson(0.3), Minibatches(5, epochs=1))


@pytest.mark.parametrize("simulation", [stream, pytest.param(network, marks=pytest.mark.thorough)])
def test_the_estimate_is_above_what_a_program_needs_and_not_far(simulation):
    sim, runs = simulation(), 32
    base = sim.hyperparameters(clip=1.0)
    many = SimulationBatch(sim, [base.replace(learning_rate=0.01 * (i + 1)) for i in range(runs)])
    rows = sim.rows["train"]
    hparams = many._hparams
    state = jax.eval_shape(many.program.init, jax.random.key(0, impl="threefry2x32"), hparams)
    compiled: Any = many.program.compiled().rounds
    lowered = compiled.lower(state, hparams, rows, rounds=2)
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None
    devices = len(jax.devices())
    needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    data = sum(leaf.nbytes for leaf in jax.tree.leaves(rows))
    of_one = (needed - data) * devices / runs
    assert of_one < bytes_per_run(sim, base) < 10 * of_one


def test_bytes_up_and_down_are_those_of_the_parameters():
    population, _ = classification([20] * 30)
    task = softmax(mlp((4,), 3, hidden=(64,)), 3)
    parameters = (4 + 1) * 64 + (64 + 1) * 3
    sampling, once = poisson(0.25, max_rate=0.3), Minibatches(5, epochs=1)

    def of(algorithm, mechanism=gaussian()):
        simulation = Simulation(algorithm, population, sampling, once, mechanism)
        told = traffic(simulation, read_by(simulation, clip=1.0))
        return told["message_bytes"], told["server_bytes"], told["cohort"]

    assert of(pmtl(task)) == (4 * parameters, 4 * parameters, 7.5)
    # Adam's server keeps two moments and a count.
    adam = fedavg(task, server_optimizer=lambda _: optax.adam(0.1))
    assert of(adam) == (4 * parameters, 4 * (3 * parameters + 1), 7.5)
    assert of(local(task), no_release())[:2] == (0, 0)
