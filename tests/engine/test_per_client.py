"""Hyperparameters with a value for each client: the same on every placement, and no server's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import coefficients, designs, gradient_descent, least_squares

import fedjaxsim as fjs
from fedjaxsim.algorithms.local_steps import PULL
from fedjaxsim.algorithms.optimizers import LEARNING_RATE, SERVER_LEARNING_RATE
from fedjaxsim.gradients.modes import Forward, Reverse
from fedjaxsim.gradients.whole_run import hypergradient, mean_metric
from fedjaxsim.simulation_batch import SimulationBatch

COUNTS = [6, 9, 11, 4, 8]
M = len(COUNTS)
ETA, LAM, MIXTURE = np.linspace(0.02, 0.1, M), np.linspace(0.1, 2.0, M), np.linspace(0.0, 1.0, M)
NOISE = {"clip": 0.5, "noise_multiplier": 1.0}


@functools.cache
def problem():
    return least_squares(COUNTS, test=0.3)


def simulation(make, sampling, **settings):
    population, task = problem()
    return fjs.Simulation(
        make(task), population, sampling, fjs.Minibatches(16, epochs=3), **settings
    )


def test_each_client_descends_with_its_own_eta_and_lambda():
    with jax.enable_x64(True):
        sim = simulation(fjs.ditto, fjs.full_participation())
        hparams = sim.hyperparameters(learning_rate=ETA, lam=LAM, clip=1.0, noise_multiplier=0.0)
        state = sim.init(0, hparams)
        w = coefficients(state.shared.params)
        state, _ = sim.round(state, hparams)
        found = coefficients(sim.models(state, hparams))
        for k, (x, y) in enumerate(designs(problem()[0], "train")):
            expected = gradient_descent(x, y, w, ETA[k], 3, w, LAM[k])
            np.testing.assert_allclose(found[k], expected, rtol=1e-10)


@functools.cache
def on_one_device():
    """States after two noised rounds, whose first ones follow α_k, and clients' losses."""
    return outcome(simulation(fjs.apfl, fjs.poisson(0.6)))


def outcome(sim):
    hparams = sim.hyperparameters(learning_rate=ETA, mixture=MIXTURE, **NOISE)
    state, _ = sim.run(sim.init(0, hparams), hparams, 2)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.shared, state.personal))], (
        sim.evaluate(state, hparams).values["loss"]
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "where",
    [
        pytest.param("scan", marks=pytest.mark.thorough),
        pytest.param("devices", marks=pytest.mark.thorough),
        "streamed",
    ],
)
def test_every_placement_gives_each_client_its_values(where):
    settings = {
        "scan": {"chunk_map": "scan", "chunk_size": 2},
        "devices": {"devices": jax.devices()[:2]},
        "streamed": {"streamed": True},
    }
    found = outcome(simulation(fjs.apfl, fjs.poisson(0.6), **settings[where]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, on_one_device()
    )


@pytest.mark.thorough
def test_settings_of_a_sweep_may_have_other_values_for_each_client():
    sim = simulation(fjs.apfl, fjs.poisson(0.6))
    hparams = sim.hyperparameters(learning_rate=ETA, mixture=MIXTURE, **NOISE)
    settings = [hparams.replace(mixture=MIXTURE[::-1]), hparams]
    batch = SimulationBatch(sim, settings, jax.devices()[:1])
    state, history = batch.run(batch.init(0), 2)
    np.testing.assert_allclose(state.personal.mixture[:, 0], MIXTURE[::-1], rtol=1e-6)
    losses = history[-1].evaluation.values["loss"]
    np.testing.assert_allclose(losses[:, 1], on_one_device()[1], rtol=1e-5)
    assert any("mixture differ between clients" in each for each in state.privacy.public)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [Forward(), pytest.param(Reverse(), marks=pytest.mark.thorough)])
def test_derivatives_agree_with_differences(mode):
    with jax.enable_x64(True):
        sim = simulation(fjs.pmtl, fjs.poisson(0.7))
        hparams = sim.hyperparameters(learning_rate=ETA, lam=LAM, **NOISE)
        objective = mean_metric(sim, "loss", split="test")
        wrt = ("lam", "learning_rate")
        derive = hypergradient(sim, objective, 4, wrt, mode=mode)
        _, found = derive(0, hparams)

        def at(name, k, step):
            values = np.asarray(getattr(hparams, name)) + step * (np.arange(M) == k)
            changed = hparams.replace(**{name: values})
            return derive(0, changed)[0]

        for name in wrt:
            for k in (0, 3):
                slope = (at(name, k, 1e-5) - at(name, k, -1e-5)) / 2e-5
                np.testing.assert_allclose(found[name][k], slope, rtol=1e-6, atol=1e-10)


def test_values_of_clients_are_public_and_a_guarantee_says_so():
    sim = simulation(fjs.pmtl, fjs.poisson(0.6))
    one = sim.hyperparameters(lam=0.1, **NOISE)
    of_each = one.replace(lam=LAM)
    for hparams, says in ((one, False), (of_each, True)):
        report = str(sim.guarantee(sim.init(0, hparams)))
        assert ("lam differ between clients and are public" in report) == says


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"lam": LAM[:3]},
            r"lam must be a number or one number per client \(5\), got shape \(3,\)",
        ),
        ({"lam": -LAM}, "lam must be finite and at least 0"),
        ({"clip": LAM}, "clip must be one number, got shape"),
        ({"server_learning_rate": LAM}, "server_learning_rate must be one number"),
    ],
)
def test_values_of_clients_are_refused_where_they_do_not_fit(values, message):
    with pytest.raises(ValueError, match=message):
        simulation(fjs.pmtl, fjs.poisson(0.6)).hyperparameters(**(NOISE | values))


def _with_server(task):
    return fjs.reads(LEARNING_RATE, SERVER_LEARNING_RATE, PULL)(
        lambda task: fjs.fedavg(task)._replace(
            server=lambda shared, release, hparams, round_: shared._replace(
                params=jax.tree.map(lambda w: w * hparams.lam, shared.params)
            )
        )
    )(task)


def _with_init(task):
    def init(key, hparams):
        return jax.tree.map(lambda w: w * hparams.lam, task.init(key)), jnp.zeros(())

    return fjs.reads(LEARNING_RATE, SERVER_LEARNING_RATE, PULL)(
        lambda task: fjs.Algorithm(
            init,
            lambda shared, personal, data, hparams, context: (personal, shared, {}),
            lambda shared, release, hparams, round_: release,
            lambda shared, personal, hparams, client_id: shared,
            task,
        )
    )(task)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_with_server, "'lam' is not declared .*, or has a value for each client"),
        (_with_init, "init must return a server state that depends on no client: lam has"),
    ],
)
def test_no_server_follows_values_of_clients(make, message):
    sim = simulation(make, fjs.poisson(0.6))
    with pytest.raises((AttributeError, ValueError), match=message):
        sim.init(0, sim.hyperparameters(lam=LAM, **NOISE))


def test_a_rate_that_the_server_reads_has_no_value_per_client():
    task = fjs.tasks.squared(fjs.models.linear((2,), 1))
    made = fjs.ppsgd(task), fjs.mpmtl(task), fjs.dp_mtrl(task, num_clients=5)
    for algorithm in made:
        rates = [r.per_client for r in algorithm.hyperparameters if r.name == "learning_rate"]
        assert rates == [False]


@pytest.mark.parametrize("declares", [False, True])
def test_no_mechanism_follows_values_of_clients(declares):
    """Scaled messages would move the release by more than C."""

    def add(accumulator, messages, mask, ids, state, hparams):
        scaled = messages.scale(hparams.lam[ids])
        return fjs.gaussian().add(accumulator, scaled, mask, ids, state, hparams)

    mechanism = fjs.gaussian()._replace(add=add)
    if declares:
        mechanism = mechanism._replace(hyperparameters=(*mechanism.hyperparameters, PULL))
    sim = simulation(fjs.pmtl, fjs.poisson(0.6), mechanism=mechanism)
    with pytest.raises(AttributeError, match=r"'lam' is not declared .*, or has a value for each"):
        sim.init(0, sim.hyperparameters(lam=LAM, **NOISE))
