"""The estimate that cuts sweeps into chunks, against what compiled programs say they need."""

import jax
import optax
import pytest
from problems import classification

from fedjaxsim import closed, fedavg, local, pmtl, ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.hparams import Hyperparameters
from fedjaxsim.models.known_risk import known_regression
from fedjaxsim.models.network import mlp
from fedjaxsim.models.task import softmax
from fedjaxsim.privacy.sampling import everyone, poisson
from fedjaxsim.runs.many import ManyRuns
from fedjaxsim.runs.memory import bytes_per_run, traffic
from fedjaxsim.simulation import Simulation

pytestmark = pytest.mark.usefixtures("fully_optimized")


def stream():
    population, task = regression_stream(1000, 100), known_regression(100)
    return Simulation(ppsgd(task), task, population, everyone(1000), Minibatches(10, steps=1))


def network():
    population, _ = classification([20] * 30)
    task = softmax(mlp((4,), 3, hidden=(64,)), 3)
    sampling = poisson(30, max_rate=0.3)
    return Simulation(pmtl(task), task, population, sampling, Minibatches(5, epochs=1))


@pytest.mark.parametrize("simulation", [stream, pytest.param(network, marks=pytest.mark.thorough)])
def test_the_estimate_is_above_what_a_program_needs_and_not_far(simulation):
    sim, runs = simulation(), 32
    rate = 1.0 if sim.sampling.scheme.kind == "everyone" else 0.3
    base = Hyperparameters(clip_norm=1.0, sampling_rate=rate)
    many = ManyRuns(sim, [base.replace(learning_rate=0.01 * (i + 1)) for i in range(runs)])
    rows = sim.rows["train"]
    lowered = many._rounds.lower(many.state_shapes, many._hparams, rows, rounds=2)
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
    sampling, once = poisson(30, max_rate=0.3), Minibatches(5, epochs=1)
    hparams = Hyperparameters(clip_norm=1.0, sampling_rate=0.25)

    def of(algorithm, mechanism=None):
        simulation = Simulation(algorithm, task, population, sampling, once, mechanism)
        told = traffic(simulation, hparams)
        return told["message_bytes"], told["server_bytes"], told["cohort"]

    assert of(pmtl(task)) == (4 * parameters, 4 * parameters, 7.5)
    # Adam's server keeps two moments and a count.
    adam = fedavg(task, server_optimizer=lambda _: optax.adam(0.1))
    assert of(adam) == (4 * parameters, 4 * (3 * parameters + 1), 7.5)
    assert of(local(task), closed())[:2] == (0, 0)
