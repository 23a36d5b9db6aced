"""Standard errors of personal models: those of ridge regressions, and what runs' noise does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fedjaxsim as fjs
from fedjaxsim.algorithms.shared_model import SharedModel
from fedjaxsim.engine import personal_errors
from fedjaxsim.models import linear
from fedjaxsim.tasks import cox, squared

RANGES = {"age": (20, 80), "dose": (0, 5), "y": (-50, 150)}
HALF, CENTRE = np.array([30, 2.5]), np.array([50, 2.5])
TASK = squared(linear((2,), 1))


def frame_of(clients, rows, seed=0):
    """Make a frame of scaled columns (n, 2) and targets, around other coefficients per client."""
    rng = np.random.default_rng(seed)
    n = clients * rows
    x = rng.uniform(-1, 1, (n, 2))
    # The spread grows with age, so only robust errors are right.
    y = 0.2 + x @ [0.3, -0.1] + rng.normal(0, 0.05 * (1.5 + x[:, 0]))
    age, dose = (CENTRE + HALF * x).T
    who = np.repeat([f"c{k:03d}" for k in range(clients)], rows)
    return pd.DataFrame({"who": who, "age": age, "dose": dose, "y": 50 + 100 * y})


def simulation(frame, algorithm, rate=None, task=TASK, steps=1, **mechanism):
    rows = fjs.data.from_dataframe(frame, client="who", target="y")
    return fjs.Simulation(
        algorithm(task),
        fjs.data.scale(rows, RANGES),
        fjs.full_participation() if rate is None else fjs.poisson(rate),
        fjs.Minibatches(100, epochs=steps),  # steps on all rows
        fjs.gaussian(**mechanism),
    )


def design(frame):
    x = (frame[["age", "dose"]].to_numpy() - CENTRE) / HALF
    return np.column_stack([np.ones(len(frame)), x])


def in_units(scaled):
    """Return coefficients (…, 3) of scaled columns in the frame's units."""
    slopes = 100 * scaled[..., 1:] / HALF
    intercept = 50 + 100 * scaled[..., 0] - slopes @ CENTRE
    return np.concatenate([intercept[..., None], slopes], axis=-1)


def test_errors_are_those_of_a_clients_ridge_regression_and_cover_what_it_estimates():
    clients, rows = 200, 30
    frame, centre = frame_of(clients, rows), np.array([0.1, 0.0, 0.2])
    sim = simulation(frame, fjs.ditto)
    hparams = sim.hyperparameters(lam=0.0)
    state = sim.init(0, hparams)
    w = {"bias": jnp.array(centre[:1], float), "kernel": jnp.array(centre[None, 1:], float)}
    x, y = design(frame).reshape(clients, rows, 3), (frame.y.to_numpy() - 50).reshape(-1, rows)
    y = y / 100
    for lam in (0.0, 0.2):
        hessian = x.swapaxes(1, 2) @ x / rows
        bread = np.linalg.inv(hessian + lam * np.eye(3))
        v = np.einsum("mij,mj->mi", bread, np.einsum("mni,mn->mi", x, y) / rows + lam * centre)
        personal = {"bias": jnp.array(v[:, :1], float), "kernel": jnp.array(v[:, None, 1:], float)}
        shared = SharedModel(w, state.shared.optimizer)
        at_fit = dataclasses.replace(state, shared=shared, personal=personal)
        table = pd.DataFrame(
            sim.standard_errors(at_fit, hparams.replace(lam=lam), model="personal")
        )
        assert [*table.client[:4]] == ["c000"] * 3 + ["c001"]
        assert [*table.coefficient[:3]] == ["intercept", "age", "dose"]
        np.testing.assert_allclose(table.estimate.to_numpy().reshape(-1, 3), in_units(v), rtol=2e-4)
        scores = x * (np.einsum("mni,mi->mn", x, v) - y)[..., None]
        scores /= 1 - np.einsum("mni,mij,mnj->mn", x, bread, x)[..., None] / rows
        covariance = bread @ scores.swapaxes(1, 2) @ scores @ bread / rows**2
        errors = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
        slopes = table.sampling.to_numpy().reshape(-1, 3)[:, 1:]
        np.testing.assert_allclose(slopes, 100 * errors[:, 1:] / HALF, rtol=2e-3)
        assert not table[["noise", "cohorts"]].to_numpy().any()
        # The columns' expected squares are 1 and 1/3, so that is what λ shrinks.
        expected = np.array([1, 1 / 3, 1 / 3])
        wanted = (expected * [0.2, 0.3, -0.1] + lam * centre) / (expected + lam)
        inside = (table.low < np.tile(in_units(wanted), clients)) & (
            table.high > np.tile(in_units(wanted), clients)
        )
        # The standard error of a share of 0.95 in 200 is 0.0154.
        shares = inside.to_numpy().reshape(-1, 3).mean(axis=0)
        np.testing.assert_allclose(shares, 0.95, atol=0.045)
        if lam == 0:
            # Student's t with 27 degrees of freedom: 2.052 (a table of quantiles).
            width = (table.high - table.low) / (2 * table.sampling)
            np.testing.assert_allclose(width, 2.052, atol=1e-3)
            api = pytest.importorskip("statsmodels.api")
            first = frame[frame.who == "c000"]
            fit = api.OLS(first.y, api.add_constant(first[["age", "dose"]])).fit(cov_type="HC3")
            np.testing.assert_allclose(table.sampling[:3], fit.bse, rtol=2e-3)


def response(**parts):
    """The linear form of a round of two clients with numbers in place of matrices, by default 0."""
    shapes = {
        "contraction": (1, 1), "of_release": (1, 1), "parts": (2, 1), "part_of_personal": (2, 1, 1),
        "of_personal": (2, 1, 1), "of_shared": (2, 1, 1), "model_of_personal": (2, 1, 1),
        "model_of_shared": (2, 1, 1),
    }  # fmt: skip
    given = {
        name: np.broadcast_to(np.asarray(parts.get(name, 0.0)), shapes[name]) for name in shapes
    }
    return personal_errors._Response(**given)


def test_what_rounds_add_is_a_sum_by_hand():
    # A round halves the shared number w, which is the model, and adds its noise over m = 2.
    halving = response(contraction=0.5, of_release=1.0, model_of_shared=1.0, parts=[[1], [-1]])
    noise, cohorts = personal_errors._propagated(halving, np.array([3.0, 4.0]), 1.0)
    np.testing.assert_allclose(noise, (1.5**2 + 4**2) / 4)
    assert not cohorts.any()
    # At p = 1/5 the mean divides by p m, and a cohort moves w by 4 (1² + 1²).
    noise, cohorts = personal_errors._propagated(halving, np.array([3.0, 4.0]), 0.2)
    np.testing.assert_allclose(noise, (1.5**2 + 4**2) / 0.4**2)
    np.testing.assert_allclose(cohorts, 8 * (1 + 0.5**2))
    # The model is w as its client last saw it: at p = 1/2 half of them saw the first round's noise.
    seen = response(contraction=1.0, of_release=1.0, of_shared=1.0, model_of_personal=1.0)
    noise, _ = personal_errors._propagated(seen, np.array([3.0, 0.0]), 0.5)
    np.testing.assert_allclose(noise, 3.0**2 / 2)


@pytest.mark.thorough
@pytest.mark.parametrize(("algorithm", "rate"), [(fjs.pmtl, 0.5), (fjs.ppsgd, None)])
def test_noise_and_cohorts_are_the_deviation_of_runs_that_differ_in_them(algorithm, rate):
    clients, rounds, runs = 10, 120, 400
    sim = simulation(frame_of(clients, 8), algorithm, rate)
    lam = {"lam": 0.5} if "lam" in sim.records else {}
    hparams = sim.hyperparameters(clip=0.5, noise_multiplier=0.2, learning_rate=0.6, **lam)
    program, rows = sim.program, sim.rows["train"]

    def trained(key):
        return program.rounds(program.init(key, hparams), hparams, rows, rounds)[0]

    states = jax.jit(jax.vmap(trained))(jax.random.split(jax.random.key(0), runs))
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), (states.shared, states.personal))
    state, _ = sim.run(sim.init(0, hparams), hparams, rounds)
    state = dataclasses.replace(state, shared=mean[0], personal=mean[1])
    table = pd.DataFrame(sim.standard_errors(state, hparams, model="personal"))
    both = np.hypot(table.noise, table.cohorts).to_numpy().reshape(-1, 3)[:, 1:]

    def model(shared, personal):
        return algorithm(TASK).predict(shared, personal, hparams, jnp.int32(0))

    models = jax.vmap(jax.vmap(model, (None, 0)))(states.shared, states.personal)
    kernels = np.asarray(models["kernel"])[:, :, 0]
    wanted = 100 * kernels.std(axis=0) / HALF
    # 400 runs tell a deviation to 3.5 %, and there are 20 of them.
    np.testing.assert_allclose(both, wanted, rtol=0.15)
    np.testing.assert_allclose((both / wanted).mean(), 1, rtol=0.05)
    assert table.cohorts.any() == (rate is not None)


@pytest.mark.thorough
def test_a_loss_that_compares_rows_has_no_errors():
    sim = simulation(frame_of(3, 6), fjs.ditto, task=cox(linear((2,), 1, bias=False)))
    hparams = sim.hyperparameters()
    state, _ = sim.run(sim.init(0, hparams), hparams, 1)
    with pytest.raises(ValueError, match="a mean over rows"):
        sim.standard_errors(state, hparams, model="personal")
