"""The estimate that cuts sweeps into chunks, against what compiled programs say they need."""

import jax
import pytest
from problems import classification

from fedjaxsim import pmtl, ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.hparams import Hyperparameters
from fedjaxsim.models.known_risk import known_regression
from fedjaxsim.models.network import mlp
from fedjaxsim.models.task import softmax
from fedjaxsim.privacy.sampling import everyone, poisson
from fedjaxsim.runs.many import ManyRuns
from fedjaxsim.runs.memory import bytes_per_run
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
