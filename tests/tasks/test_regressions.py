"""Losses of tables against scikit-learn and scipy: values, gradients and what models predict."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize
from scipy.stats import logistic as logistic_distribution
from scipy.stats import nbinom
from scipy.stats import poisson as poisson_distribution
from sklearn.linear_model import (
    GammaRegressor,
    LinearRegression,
    PoissonRegressor,
    QuantileRegressor,
)
from sklearn.metrics import mean_gamma_deviance, mean_pinball_loss, mean_poisson_deviance

from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models import linear
from fedjaxsim.tasks import (
    cox,
    gamma,
    logistic,
    negative_binomial,
    ordinal,
    poisson,
    quantile,
    softmax,
    squared,
)
from fedjaxsim.tasks.task import check_rows

N = 60


def batch_of(rng, y, **more):
    x = rng.normal(size=(N, 2)).astype(np.float32)
    return Batch({"x": jnp.asarray(x), "y": jnp.asarray(y), **more}, jnp.ones(N))


def best(task, batch):
    """Return the parameters of least loss, by scipy."""
    first, unravel = ravel_pytree(task.init(jax.random.key(0)))
    function = jax.jit(jax.value_and_grad(lambda flat: task.loss(unravel(flat), batch)))

    def value(flat):
        loss, gradient = function(jnp.asarray(flat, jnp.float32))
        return float(loss), np.asarray(gradient, float)

    return unravel(jnp.asarray(minimize(value, first, jac=True, tol=1e-9).x, jnp.float32))


def test_poisson_with_exposure_is_the_weighted_fit_of_scikit_learn():
    rng = np.random.default_rng(0)
    years = rng.uniform(0.5, 3, N).astype(np.float32)
    y = rng.poisson(years * np.exp(0.5)).astype(np.int32)
    batch = batch_of(rng, y, exposure=jnp.asarray(years))
    task = poisson(linear((2,), 1))
    params = best(task, batch)
    # Counts with an exposure are rates, weighted by it.
    x = np.asarray(batch.fields["x"])
    want = PoissonRegressor(alpha=0, tol=1e-8).fit(x, y / years, sample_weight=years)
    np.testing.assert_allclose(params["kernel"][0], want.coef_, atol=2e-3)
    np.testing.assert_allclose(params["bias"][0], want.intercept_, atol=2e-3)
    assert task.predict is not None
    mean = np.asarray(jax.jit(task.predict)(params, batch.fields)["prediction"])
    np.testing.assert_allclose(mean, years * want.predict(x), rtol=5e-3)
    deviances = jax.jit(task.metrics)(params, batch)["deviance"]
    assert np.mean(deviances) == pytest.approx(mean_poisson_deviance(y, mean), rel=1e-4)
    likelihood = poisson_distribution.logpmf(y, y + 1e-9) - poisson_distribution.logpmf(y, mean)
    np.testing.assert_allclose(deviances, 2 * likelihood, atol=1e-3)


def test_gamma_is_the_fit_of_scikit_learn():
    rng = np.random.default_rng(5)
    y = rng.gamma(2, 3, N).astype(np.float32)
    batch, task = batch_of(rng, y), gamma(linear((2,), 1))
    params, x = best(task, batch), np.asarray(batch.fields["x"])
    want = GammaRegressor(alpha=0, tol=1e-8).fit(x, y)
    np.testing.assert_allclose(params["kernel"][0], want.coef_, atol=2e-3)
    np.testing.assert_allclose(params["bias"][0], want.intercept_, atol=2e-3)
    deviance = np.mean(jax.jit(task.metrics)(params, batch)["deviance"])
    assert deviance == pytest.approx(mean_gamma_deviance(y, want.predict(x)), rel=1e-4)
    with pytest.raises(ValueError, match="must be positive, got labels from 0"):
        check_rows(task, {"x": x, "y": y - y.min()})


def test_negative_binomial_is_the_likelihood_of_scipy():
    rng = np.random.default_rng(6)
    y, alpha = rng.negative_binomial(2, 0.3, N).astype(np.int32), 0.5
    batch, task = batch_of(rng, y), negative_binomial(linear((2,), 1), alpha)
    params = {"kernel": jnp.array([[0.3, -0.2]]), "bias": jnp.array([1.0])}
    assert task.predict is not None
    predict, loss = jax.jit(task.predict), jax.jit(task.loss)
    mean = np.asarray(predict(params, batch.fields)["prediction"], float)

    def log_likelihood(mean):  # scipy: 1/α failures, p = 1/(1 + αμ)
        return nbinom.logpmf(y, 1 / alpha, 1 / (1 + alpha * np.maximum(mean, 1e-9)))

    deviance = 2 * (log_likelihood(y) - log_likelihood(mean))
    metrics = jax.jit(task.metrics)(params, batch)
    np.testing.assert_allclose(metrics["deviance"], deviance, atol=2e-4)
    # The loss differs from the negative log-likelihood by a constant.
    other = params | {"bias": jnp.array([0.2])}
    fitted = np.asarray(predict(other, batch.fields)["prediction"], float)
    gap = float(loss(params, batch)) - float(loss(other, batch))
    assert gap == pytest.approx(np.mean(log_likelihood(fitted) - log_likelihood(mean)), abs=1e-4)


def test_cox_is_the_partial_likelihood_of_rows_at_risk():
    y, scores = np.array([2.0, -3.0, 1.0, 2.0, 9.0]), np.array([0.5, -1.0, 0.3, 0.2, 4.0])
    task = cox(linear((1,), 1, bias=False))
    fields = {"x": jnp.asarray(scores[:, None]), "y": jnp.asarray(y)}
    batch = Batch(fields, jnp.array([1.0, 1, 1, 1, 0]))  # the last row is padding
    hazard = np.exp(scores[:4])
    # Events at 1 (all four at risk), and two at 2 (Breslow: without row 2 for both).
    by_hand = 3 * [0.0]
    by_hand[0] = np.log(hazard.sum()) - 0.3
    by_hand[1:] = (np.log(hazard[[0, 1, 3]].sum()) - score for score in (0.5, 0.2))
    params = {"kernel": jnp.ones((1, 1))}
    loss, slope = jax.jit(jax.value_and_grad(task.loss))(params, batch)
    assert float(loss) == pytest.approx(sum(by_hand) / 4, rel=1e-5)
    assert np.isfinite(slope["kernel"]).all()
    # Comparable: row 2 with 0, 1, 3; rows 0 and 3 with 1. Wrong: 2 with 0 alone.
    metric = task.streaming_metrics["concordance"]
    value = jax.jit(lambda: metric.value(metric.add(metric.start(5), params, batch)))
    assert float(value()) == pytest.approx(4 / 5)


def test_cox_stratified_by_client_is_that_of_statsmodels():
    api = pytest.importorskip("statsmodels.api")
    rng = np.random.default_rng(7)
    x, client = rng.normal(size=(N, 2)).astype(np.float32), np.arange(N) % 3
    times = rng.exponential(np.exp(-x[:, 0] + client)).astype(np.float32)
    happened = rng.uniform(size=N) < 0.7
    fit = api.PHReg(times, x, happened.astype(int), strata=client, ties="breslow").fit()
    task, y = cox(linear((2,), 1)), np.where(happened, times, -times)
    params = {"kernel": jnp.asarray(fit.params[None], jnp.float32), "bias": jnp.zeros(1)}

    def loss(params):
        batches = [Batch({"x": jnp.asarray(x[own]), "y": jnp.asarray(y[own])}, jnp.ones(own.sum()))
                   for own in (client == k for k in range(3))]  # fmt: skip
        return sum(N / 3 * task.loss(params, batch) for batch in batches)

    assert float(loss(params)) == pytest.approx(-fit.llf, rel=1e-4)
    gradient = jax.grad(loss)(params)
    np.testing.assert_allclose(gradient["kernel"], 0, atol=2e-3)
    np.testing.assert_allclose(gradient["bias"], 0, atol=1e-5)


def test_quantile_loss_is_that_of_scikit_learn():
    rng = np.random.default_rng(1)
    y = rng.exponential(size=N).astype(np.float32)
    batch, task = batch_of(rng, y), quantile(linear((2,), 1), 0.8)
    fit = QuantileRegressor(quantile=0.8, alpha=0).fit(batch.fields["x"], y)
    params = {"kernel": jnp.asarray(fit.coef_[None]), "bias": jnp.asarray([fit.intercept_])}
    want = mean_pinball_loss(y, fit.predict(batch.fields["x"]), alpha=0.8)
    loss = jax.jit(task.loss)
    assert float(loss(params, batch)) == pytest.approx(want, rel=1e-5)
    for name in params:  # the fit is a minimum: no neighbour is better
        for step in (-0.01, 0.01):
            other = params | {name: np.asarray(params[name]) + np.float32(step)}
            assert float(loss(other, batch)) >= want - 1e-6
    assert abs(np.mean(jax.jit(task.metrics)(params, batch)["below"]) - 0.8) <= 3 / N


def test_ordinal_loss_is_the_proportional_odds_model():
    rng = np.random.default_rng(2)
    y = rng.integers(0, 4, N).astype(np.int32)
    batch, task = batch_of(rng, y), ordinal(linear((2,), 1, bias=False), 4)
    params = {"model": {"kernel": jnp.array([[0.5, -1.0]])}, "cuts": jnp.array([-1.0, 0.2, -0.5])}
    cuts = np.cumsum([-1.0, np.exp(0.2), np.exp(-0.5)])
    score = np.asarray(batch.fields["x"]) @ [0.5, -1.0]
    below = logistic_distribution.cdf(np.array([-np.inf, *cuts, np.inf]) - score[:, None])
    share = np.diff(below, axis=1)
    metrics = jax.jit(task.metrics)(params, batch)
    np.testing.assert_allclose(metrics["loss"], -np.log(share[np.arange(N), y]), rtol=1e-4)
    assert task.predict is not None
    found = jax.jit(task.predict)(params, batch.fields)
    np.testing.assert_array_equal(found["prediction"], share.argmax(axis=1))
    np.testing.assert_allclose(found["probability"], share.max(axis=1), rtol=1e-4)
    assert task.classes is not None  # so it has F1, calibration and others by name
    scores = jax.jit(task.classes.scores)(params, batch.fields)
    np.testing.assert_allclose(np.exp(scores), share, rtol=1e-4)
    np.testing.assert_array_equal(metrics["off"], np.abs(share.argmax(axis=1) - y))
    far = params | {"model": {"kernel": jnp.array([[300.0, 0.0]])}}
    assert all(
        np.isfinite(leaf).all()
        for leaf in jax.tree.leaves(jax.jit(jax.grad(task.loss))(far, batch))
    )


@pytest.mark.parametrize(
    ("task", "bound"),
    [(logistic(linear((2,), 1)), 1 / 4), (softmax(linear((2,), 3), 3), 1 / 2)],
)
def test_bounds_on_the_curvature_hold_and_are_reached(task, bound):
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.uniform(-1, 1, (1, 2)), jnp.float32)
    batch = Batch({"x": x, "y": jnp.zeros(1, jnp.int32)}, jnp.ones(1))
    limit = task.curvature(float(jnp.sum(x**2)))
    assert limit == pytest.approx(bound * (float(jnp.sum(x**2)) + 1))

    unravel = ravel_pytree(task.init(jax.random.key(0)))[1]
    hessian = jax.jit(jax.hessian(lambda flat: task.loss(unravel(flat), batch)))

    def curvature(params):
        return float(np.linalg.eigvalsh(hessian(ravel_pytree(params)[0]))[-1])

    zero = task.init(jax.random.key(0))
    # Two classes of equal odds are the worst case: the third has none.
    worst = zero | {"bias": jnp.array([0.0, 0.0, -30.0])[: len(zero["bias"])]}
    assert curvature(worst) == pytest.approx(limit, rel=1e-4)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), zero)
    assert curvature(params) <= limit * (1 + 1e-5)


def test_the_curvature_of_poisson_is_bounded_up_to_e_times_the_prior():
    """That of one row is μ (‖x‖² + 1), whatever y is, for a rate μ."""
    task, bare = poisson(linear((2,), 1), prior=4.0), poisson(linear((2,), 1))
    assert bare.curvature is None
    x = jnp.array([[0.6, -0.3]])
    batch = Batch({"x": x, "y": jnp.array([90])}, jnp.ones(1))
    start, unravel = ravel_pytree(task.init(jax.random.key(0)))
    hessian = jax.jit(jax.hessian(lambda flat: task.loss(unravel(flat), batch)))
    assert task.curvature is not None
    limit = task.curvature(0.45)
    shares = []
    for log_ratio in (-3.0, 0.0, 0.9, 1.0, 1.1):
        params = unravel(start) | {"bias": jnp.log(4.0) + jnp.full(1, log_ratio)}
        largest = np.linalg.eigvalsh(hessian(ravel_pytree(params)[0]))[-1]
        shares.append(float(largest) / limit)
    np.testing.assert_allclose(shares, np.exp([-4, -1, -0.1, 0, 0.1]), rtol=1e-4)


def test_a_prior_is_what_models_predict_first():
    fields = {"x": jnp.ones((2, 2)), "y": jnp.zeros(2, jnp.int32)}
    for task, name, want in (
        (logistic(linear((2,), 1), prior=0.01), "probability", 0.01),
        (softmax(linear((2,), 3), 3, prior=(0.1, 0.2, 0.7)), "probability", 0.7),
        (poisson(linear((2,), 1), prior=4.0), "prediction", 4.0),
    ):
        assert task.predict is not None
        found = jax.jit(task.predict)(task.init(jax.random.key(0)), fields)
        np.testing.assert_allclose(found[name], want, rtol=1e-5)
        assert "taken as public" in task.public[-1]
    with pytest.raises(ValueError, match="prior must be the shares of the 3 classes"):
        softmax(linear((2,), 3), 3, prior=(0.1, 0.2))
    with pytest.raises(ValueError, match="a prior needs a model with 1 intercept"):
        logistic(linear((2,), 1, bias=False), prior=0.1)


def test_weights_of_rows_are_the_sample_weights_of_scikit_learn():
    rng = np.random.default_rng(4)
    weight = rng.uniform(0.05, 1, N).astype(np.float32)
    y = rng.normal(size=N).astype(np.float32)
    batch = batch_of(rng, y, row_weight=jnp.asarray(weight))
    x, task = np.asarray(batch.fields["x"]), squared(linear((2,), 1))
    params = best(task, batch)
    want = LinearRegression().fit(x, y, sample_weight=weight)
    np.testing.assert_allclose(params["kernel"][0], want.coef_, atol=1e-3)
    np.testing.assert_allclose(params["bias"][0], want.intercept_, atol=1e-3)
    # Metrics count each row once.
    error = np.mean((y - want.predict(x)) ** 2)
    assert np.mean(task.metrics(params, batch)["squared_error"]) == pytest.approx(error, rel=1e-3)
    # Gradients of single examples are weighted, too.
    assert task.layers is not None
    outputs = jnp.zeros((N, 1))
    np.testing.assert_allclose(
        task.layers.losses(outputs, batch.fields), weight * y**2 / 2, rtol=1e-5
    )
