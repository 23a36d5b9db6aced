"""Fine-tuning: its penalties in closed form, alone and among all, what it costs and refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import classification, coefficients, designs, least_squares, read_by

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local import finetune, fisher, local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.privacy.assumptions import NO_RELEASE
from fedjaxsim.privacy.mechanisms import gaussian, no_release
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import known_regression
from fedjaxsim.testing import check_billboard

FEW = Minibatches(1000, epochs=20)
VALUES = {"learning_rate": 0.1, "lam": 0.7, "clip": 0.5, "noise_multiplier": 2.0}
POPULATION, TASK = least_squares([12, 15, 9], features=2)


def simulation(algorithm, mechanism=None, minibatches=FEW, population=POPULATION, task=TASK):
    clients = full_participation()
    return Simulation(algorithm, population, clients, minibatches, mechanism or no_release())


def begin(sim, seed=0):
    """The state before the first round."""
    return sim.init(seed, read_by(sim, **VALUES))


def following(sim, state, before):
    """The state before the first round of fine-tuning after another stage."""
    return sim.start_from(state, read_by(sim, **VALUES), before, read_by(before, **VALUES))


def thorough(penalty):
    return pytest.param(penalty, marks=pytest.mark.thorough)


@pytest.fixture(scope="module")
def ended():
    """PMTL of updates after two rounds, in float64: three models, and one far off, published."""
    with jax.enable_x64(True):
        sim = simulation(pmtl(TASK, message="update"), gaussian())
        return sim, rounds(sim, begin(sim, seed=2), 2)


@functools.cache
def tuning(penalty):
    """Fine-tuning with a penalty; further rounds of it compile nothing."""
    return simulation(finetune(TASK, penalty=penalty))


def rounds(sim, state, count):
    for _ in range(count):
        state, _ = sim.round(state, read_by(sim, **VALUES))
    return state


@pytest.mark.thorough
@pytest.mark.parametrize("penalty", [thorough("vanilla"), thorough("mean"), "kl", thorough("ewc")])
def test_it_reaches_the_minimizer_that_a_linear_system_gives(ended, penalty):
    # Of ‖Xw − y‖²/(2n) + (λ/2) (w − w̃)ᵀ M (w − w̃): M = I, XᵀX/n (the predictions are normal
    # variables of variance 1, whose divergence is (xᵀw − xᵀw̃)²) or the diagonal of F.
    with jax.enable_x64(True):
        sim = tuning(penalty)
        state = rounds(sim, following(sim, ended[1], ended[0]), 100)
        w_tilde = coefficients(ended[1].shared.params)
        for (x, y), found in zip(designs(POPULATION), coefficients(state.personal), strict=True):
            gram = x.T @ x / len(y)
            information = np.mean(((x @ w_tilde - y)[:, None] * x) ** 2, axis=0)
            metric = {
                "vanilla": 0 * gram, "mean": np.eye(3), "kl": gram, "ewc": np.diag(information)
            }[penalty]  # fmt: skip
            pull = VALUES["lam"] * metric
            expected = np.linalg.solve(gram + pull, x.T @ y / len(y) + pull @ w_tilde)
            assert np.abs(expected - w_tilde).max() > 0.1
            np.testing.assert_allclose(found, expected, rtol=1e-9)
        if penalty != "vanilla":  # the billboard stays as it is
            np.testing.assert_array_equal(coefficients(state.shared), w_tilde)


@pytest.mark.thorough
@pytest.mark.parametrize("penalty", [*map(thorough, ("vanilla", "mean", "ewc")), "kl"])
def test_a_client_alone_is_tuned_as_among_all(ended, penalty):
    with jax.enable_x64(True):
        among = tuning(penalty)
        begun = following(among, ended[1], ended[0])
        alone = simulation(
            finetune(TASK, penalty=penalty),
            population=Population.from_clients([POPULATION.rows(1)]),
        )
        own = jax.tree.map(lambda leaf: leaf[1:2], begun.personal)
        first = dataclasses.replace(
            begin(alone), shared=jax.tree.map(jnp.copy, begun.shared), personal=own
        )
        state, others = rounds(alone, first, 2), rounds(among, begun, 2)
        np.testing.assert_allclose(
            coefficients(state.personal)[0], coefficients(others.personal)[1], rtol=1e-12
        )


@pytest.mark.thorough
def test_fisher_information_of_softmax_regression():
    # The gradient of a row is x_j (p_c − [y = c]) for the kernel and p_c − [y = c] for the bias.
    with jax.enable_x64(True):
        population, task = classification([40, 9])
        sim = simulation(local(task), population=population, task=task)
        params = {
            "kernel": jax.random.normal(jax.random.key(0), (3, 4)),
            "bias": jnp.array([0.3, -0.2, 0.1]),
        }
        for client in range(2):
            rows = sim.rows["train"]
            data = rows.of(jnp.int32(client), jax.random.key(0), FEW, sim.program.plan.reading)
            found = fisher(task, params, data)
            x, y = (population.rows(client, "train")[name] for name in ("x", "y"))
            outputs = np.exp(x.astype(float) @ params["kernel"].T + params["bias"])
            residual = outputs / outputs.sum(axis=1, keepdims=True) - np.eye(3)[y]
            expected = {"kernel": (residual.T**2) @ x**2 / len(y), "bias": (residual**2).mean(0)}
            for name, leaf in found.items():
                np.testing.assert_allclose(leaf, expected[name], rtol=1e-6)


@pytest.mark.parametrize("origin", ["personal", "global"])
def test_clients_start_from_their_own_or_the_published_model(ended, origin):
    with jax.enable_x64(True):
        sim, state = ended
        begun = following(simulation(finetune(TASK, origin=origin)), state, sim)
        published = coefficients(state.shared.params)
        expected = np.stack([published] * 3)
        if origin == "personal":
            expected = coefficients(state.personal)
            assert np.all(np.abs(expected - published) > 0)
        np.testing.assert_array_equal(coefficients(begun.personal), expected)


def test_it_costs_nothing_and_says_what_is_another_matter(ended):
    with jax.enable_x64(True):
        before, state = ended
        sim = tuning("mean")
        first = before.guarantee(state)
        state = rounds(sim, following(sim, state, before), 2)
        both = sim.guarantee(state)
        assert [each.epsilon for each in both.guarantees] == [
            each.epsilon for each in first.guarantees
        ]
        assert both.charges == first.charges
        assert NO_RELEASE not in first.guarantees[0].assumptions
        assert NO_RELEASE in both.guarantees[0].assumptions


@pytest.mark.thorough
@pytest.mark.parametrize("penalty", [thorough("kl"), "ewc"])
def test_one_clients_data_reaches_nobody_else(penalty):
    population, task = classification([9, 10, 11])
    sim = simulation(finetune(task, penalty=penalty), population=population, task=task)
    check_billboard(sim, sim.hyperparameters(lam=0.2), rounds=2, clients=[1])


def test_bad_input_says_what_is_allowed(ended):
    with pytest.raises(ValueError, match="penalty"):
        finetune(TASK, penalty="l2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="origin"):
        finetune(TASK, origin="both")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="divergence"):
        finetune(TASK._replace(divergence=None), penalty="kl")
    with pytest.raises(ValueError, match="lam"):
        simulation(finetune(TASK)).hyperparameters(lam=-0.1)
    sim = simulation(finetune(TASK))
    with pytest.raises(ValueError, match="lam"):
        sim.init(0, sim.hyperparameters().replace(lam=-0.1))
    # Of rows that are made afresh there is no exact pass. (A client without rows is no client of a
    # population.)
    task = known_regression(5)
    stream = regression_stream(3, 5)
    sim = simulation(finetune(task, penalty="ewc"), None, Minibatches(2, steps=1), stream, task)
    with pytest.raises(ValueError, match="a pass over all rows"):
        begin(sim)
    population, task = least_squares([12, 15, 9], features=4)
    larger = simulation(finetune(task), population=population, task=task)
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match="server state"),
    ):
        following(larger, ended[1], ended[0])


@pytest.mark.thorough
def test_what_was_never_published_is_no_place_to_be_pulled_to():
    before = simulation(local(TASK))
    state = begin(before)
    vanilla = finetune(TASK, penalty="vanilla", origin="global")
    for algorithm in (finetune(TASK, penalty="ewc"), vanilla):
        with pytest.raises(ValueError, match="published"):
            following(simulation(algorithm), state, before)
    following(simulation(finetune(TASK, penalty="vanilla")), state, before)
    one_model = simulation(fedavg(TASK), gaussian())
    following(simulation(finetune(TASK, penalty="ewc")), begin(one_model), one_model)
