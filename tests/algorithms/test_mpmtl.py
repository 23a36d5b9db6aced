"""MP-MTL against independent solvers, its formulas written in numpy, and the paper's statements."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import gamma, kstest, norm
from support.linear_tasks import (
    ETA,
    LAM,
    PLAIN,
    ROUNDS,
    TASK,
    D,
    M,
    N,
    X,
    Y,
    behind,
    gradient,
    path,
)
from support.problems import classification, read_by

from fedjaxsim.algorithms.mpmtl import dp_mtrl, mpmtl, stl
from fedjaxsim.algorithms.server_maps import ServerMap
from fedjaxsim.data.population import Population
from fedjaxsim.models.model import linear
from fedjaxsim.models.network import mlp
from fedjaxsim.privacy.guarantee import Report, compose_reports
from fedjaxsim.privacy.mechanisms import gaussian, no_release
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram
from fedjaxsim.tasks.regressions import cox
from fedjaxsim.tasks.task import softmax
from fedjaxsim.testing import check_billboard


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def proximal(w, threshold, penalty):
    if penalty == "group-sparse":
        norms = np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-300)
        return w * np.maximum(1 - threshold / norms, 0)
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    return u @ np.diag(np.maximum(s - threshold, 0)) @ vt


def objective(w, penalty):
    errors = np.einsum("mnd,dm->mn", X, w) - Y
    norms = np.linalg.svd(w)[1] if penalty == "low-rank" else np.linalg.norm(w, axis=1)
    return np.sum(errors**2) / (2 * N) + LAM * norms.sum()


@functools.cache
def minimum(penalty):
    """Of the convex problem, by another solver: proximal gradient in numpy, 5,000 steps."""
    w = np.zeros((D, M))
    for _ in range(5000):
        w = proximal(w - ETA * gradient(w), ETA * LAM, penalty)
    return w, objective(w, penalty)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "penalty", ["low-rank", pytest.param("group-sparse", marks=pytest.mark.thorough)]
)
def test_without_noise_it_reaches_the_minimum_and_acceleration_gets_there_sooner(penalty):
    best, least = minimum(penalty)
    rank = np.linalg.matrix_rank(best, 1e-6)
    zeros = np.sum(np.linalg.norm(best, axis=1) < 1e-6)
    assert rank < D if penalty == "low-rank" else zeros > 0  # the penalty is not idle
    rounds = {}
    for acceleration in ("none", "convex"):
        models = path(penalty, acceleration)(PLAIN)
        excess = np.array([objective(w, penalty) - least for w in models[::20]])
        assert -1e-9 < excess[-1] < 1e-6
        rounds[acceleration] = np.argmax(excess < 1e-6)
    assert rounds["convex"] < rounds["none"] / 1.5


@pytest.mark.thorough
def test_relationship_is_mtrl():
    # Zhang and Yeung: W for Ω, all clients at once, in closed form; then Ω = (WᵀW)^½/tr, here by
    # its dual, D = (WWᵀ)^½/tr for each feature. A small λ: directions that vanish would freeze.
    lam = 0.001
    w, d = np.zeros((D, M)), np.eye(D) / D
    squares, right = np.einsum("mnd,mne->mde", X, X) / N, np.einsum("mnd,mn->md", X, Y) / N
    for _ in range(500):
        w = np.linalg.solve(squares + lam * np.linalg.inv(d), right[..., None])[..., 0].T
        values, vectors = np.linalg.eigh(w @ w.T)
        root = vectors * np.sqrt(values) @ vectors.T
        d = root / np.trace(root)

    def value(w, lam):
        errors = np.einsum("mnd,dm->mn", X, w) - Y
        return np.sum(errors**2) / (2 * N) + lam / 2 * np.linalg.svd(w)[1].sum() ** 2

    found = path("relationship", "convex", 4 * ROUNDS)(PLAIN | {"lam": lam})[-1]
    assert value(found, lam) == pytest.approx(value(w, lam), abs=1e-6)
    # That penalty is the one on Ω: tr(WΩ⁻¹Wᵀ) = ‖W‖_*² (for Ω of the clients' own space).
    u, s, vt = np.linalg.svd(found, full_matrices=False)
    omega_inverse = vt.T / s @ vt * s.sum()
    assert np.trace(found @ omega_inverse @ found.T) == pytest.approx(s.sum() ** 2)
    # With a large λ: minus the gradient is λ ‖W‖_* (UVᵀ + Z), Z orthogonal to U and V, ‖Z‖ ≤ 1.
    found = path("relationship", "convex", 4 * ROUNDS)(PLAIN)[-1]
    u, s, vt = np.linalg.svd(found, full_matrices=False)
    rank = np.sum(s > 1e-6)
    assert rank < D
    dual = -gradient(found) / (LAM * s.sum())
    rest = dual - u[:, :rank] @ vt[:rank]
    np.testing.assert_allclose(u[:, :rank].T @ rest, 0, atol=1e-6)
    np.testing.assert_allclose(rest @ vt[:rank].T, 0, atol=1e-6)
    assert np.linalg.norm(rest, 2) <= 1


@pytest.mark.thorough
def test_stl_without_a_penalty_is_mp_mtl_without_one_and_with_it_it_solves_the_lasso():
    sim = behind(stl(TASK, acceleration="convex"), no_release())

    def models(values, rounds):
        hparams = sim.hyperparameters(**values)
        state, _ = sim.run(sim.init(0, hparams), hparams, rounds)
        assert sim.guarantee(state).find("replace").epsilon == 0
        return np.asarray(state.personal.w)[:, :, 0].T

    ridge = PLAIN | {"lam": 0.0, "ridge": 0.1}
    np.testing.assert_allclose(
        models(ridge, 5), path("low-rank", "convex")(ridge)[4], rtol=1e-6, atol=1e-9
    )
    w = models(PLAIN | {"lam": 1.0}, 3000)
    slopes = gradient(w)
    zero = w == 0
    assert 0 < zero.sum() < w.size
    assert np.all(np.abs(slopes[zero]) <= 1.0)
    np.testing.assert_allclose(slopes[~zero], -np.sign(w[~zero]), atol=1e-6)


def test_replacing_all_examples_moves_a_ridge_minimizer_no_further_than_group_privacy_says():
    # Logistic loss and ‖x‖ ≤ 1: G = 1. One of n examples moves the minimizer by at most 2G/(nμ), so
    # all n by 2G/μ, which is what a clip to C = G/μ allows. Attacks: the worst examples there are.
    mu, n = 0.3, 5
    towards = np.array([1.0, 0.0])

    def minimizer(x):
        def value(w):
            return np.mean(np.logaddexp(0, -x @ w)) + mu / 2 * w @ w

        return minimize(value, np.zeros(2), tol=1e-12).x

    path_ = [minimizer(np.array([-towards] * k + [towards] * (n - k))) for k in range(n + 1)]
    moves = np.linalg.norm(np.diff(path_, axis=0), axis=1)
    assert np.all(moves <= 2 / (n * mu))
    assert max(np.linalg.norm(w) for w in path_) <= 1 / mu
    assert np.linalg.norm(path_[0] - path_[-1]) > 0.25 * 2 / mu  # and it is not far below


def test_it_is_the_paper_written_in_numpy():
    # Algorithm 2 with clipping, a ridge and the acceleration for strong convexity, whose β is
    # (1 − √(μη))/(1 + √(μη)); W⁰ is one step of each client alone, from 0.
    mu, k, rounds = 0.1, 1.2, 4
    values = PLAIN | {"ridge": mu, "clip": k}
    found = path("low-rank", "strongly-convex", rounds)(values)
    root = math.sqrt(mu * ETA)
    beta = (1 - root) / (1 + root)
    w = -ETA * gradient(np.zeros((D, M)))
    previous = None
    for t in range(rounds):
        clipped = w / np.maximum(1, np.linalg.norm(w, axis=0) / k)
        previous = clipped if previous is None else previous
        values, vectors = np.linalg.eigh(clipped @ clipped.T)
        kept = np.maximum(0, 1 - ETA * LAM / np.sqrt(np.maximum(values, 1e-300)))
        hat = vectors @ np.diag(kept) @ vectors.T @ clipped
        z = hat + beta * (hat - previous)
        w, previous = z - ETA * (gradient(z) + mu * z), hat
        np.testing.assert_allclose(found[t], hat, rtol=1e-9, atol=1e-12)
    assert np.any(np.linalg.norm(w, axis=0) > k)  # something was clipped


@pytest.mark.thorough
def test_the_decomposed_model_is_algorithm_4_written_in_numpy():
    # η = 1/(2L); both parts take one gradient, and Q starts at 0.
    eta, lam2, rounds = ETA / 2, 0.1, 20
    values = PLAIN | {"learning_rate": eta, "lam2": lam2}
    found = path("decomposed", "convex", rounds)(values)
    p = q = -eta * gradient(np.zeros((D, M)))
    old_p, old_q = p, q
    for t in range(1, rounds + 1):
        p = proximal(p, eta * LAM, "low-rank")
        q = np.sign(q) * np.maximum(np.abs(q) - eta * lam2, 0)
        beta = (t - 1) / (t + 2)
        z_p, z_q = p + beta * (p - old_p), q + beta * (q - old_q)
        old_p, old_q = p, q
        p, q = (z - eta * gradient(z_p + z_q) for z in (z_p, z_q))
        np.testing.assert_allclose(found[t - 1], old_p + old_q, rtol=1e-8, atol=1e-10)
    assert np.any(old_q != 0)
    assert np.any(old_q == 0)


@pytest.mark.thorough
def test_as_noise_grows_the_models_are_those_of_each_client_alone():
    # Proposition 1: M → I, and what is left is gradient descent with the same η, T and ridge.
    values = PLAIN | {"lam": 0.5, "ridge": 0.05, "clip": 4.0}
    w, alone = np.zeros((D, M)), []
    for _ in range(30):
        w = w - ETA * (gradient(w) + 0.05 * w)
        alone.append(w)
    assert np.linalg.norm(w, axis=0).max() < 4
    without_penalty = path()(values | {"lam": 0.0})
    np.testing.assert_allclose(without_penalty[:30], alone, rtol=1e-9)
    apart = [
        np.abs(path()(values | {"noise_multiplier": z})[:30] - alone).max()
        for z in (1.0, 1e2, 1e4, 1e6, 1e8)
    ]
    # 1 − ηλ/√Λ with Λ in proportion to z: a hundred times the noise is a tenth of the difference.
    assert apart[0] > 1e-3
    np.testing.assert_allclose(np.divide(apart[1:-1], apart[2:]), 10, rtol=0.3)
    diagonal = path("group-sparse")(values | {"noise_multiplier": 1e10})[:30]
    np.testing.assert_allclose(diagonal, alone, atol=1e-5)


NOISED = PLAIN | {
    "clip": 2.0,
    "noise_multiplier": 1.5,
    "lam2": 0.1,
    "message_epsilon": 5.0,
}


def test_the_gram_matrix_is_one_product_a_chunk_and_costs_what_its_noise_says():
    mechanism, added = gaussian_gram(), []

    def add(accumulator, messages, *others):
        added.append(messages.dense().shape)
        return mechanism.add(accumulator, messages, *others)

    sim = behind(mpmtl(TASK), mechanism._replace(add=add), chunk_map="scan", chunk_size=4)
    noised = read_by(sim, **NOISED)
    state = sim.init(0, noised)
    added.clear()  # the check of a mechanism of one's own adds one message
    state, metrics = sim.round(state, noised)
    assert set(added) == {(4, D, 1)}
    w = -ETA * gradient(np.zeros((D, M)))
    norms = np.linalg.norm(w, axis=0)
    np.testing.assert_allclose(
        state.personal.sent.w[:, :, 0].T, w / np.maximum(1, norms / 2.0), rtol=1e-6
    )
    assert int(metrics["clipped"]) == np.sum(norms > 2.0)
    for _ in range(2):
        state, _ = sim.round(state, noised)
    report = sim.guarantee(state, 1e-3)
    exact = (report.find("zero_out"), 1.0), (report.find("replace"), math.sqrt(2))
    for found, sensitivity in exact:
        mu = sensitivity * math.sqrt(3) / 1.5
        assert found.status == "exact"
        assert found.epsilon is not None
        above = norm.cdf(-found.epsilon / mu + mu / 2)
        delta = above - math.exp(found.epsilon) * norm.cdf(-found.epsilon / mu - mu / 2)
        assert delta == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.thorough
def test_others_learn_of_a_client_through_the_releases_alone():
    algorithm = mpmtl(
        TASK,
        penalty="decomposed",
        outliers="columns",
        acceleration="convex",
        protect_examples=True,
    )
    sim = behind(algorithm, gaussian_gram())
    check_billboard(sim, sim.hyperparameters(**NOISED), clients=[2])


@pytest.mark.thorough
def test_several_outputs_and_intercepts_are_columns_and_coordinates():
    # With M = I and no noise a round is a gradient step on each client's own loss.
    population, task = classification([5, 7, 4], features=3, classes=3)
    sim = behind(mpmtl(task), gaussian_gram(), population)
    hparams = sim.hyperparameters(learning_rate=0.5, lam=0.0)
    state, _ = sim.run(sim.init(0, hparams), hparams, 2)
    assert state.shared.shape == (4, 4)
    for client in range(3):
        rows = population.rows(client, "train")
        x, y = rows["x"].astype(np.float64), np.eye(3)[rows["y"]]
        w, b = np.zeros((3, 3)), np.zeros(3)
        for _ in range(2):
            p = np.exp(x @ w + b)
            p /= p.sum(axis=1, keepdims=True)
            w, b = w - 0.5 * x.T @ (p - y) / len(y), b - 0.5 * (p - y).mean(axis=0)
        found = np.asarray(state.personal.sent.w[client])
        np.testing.assert_allclose(found, np.vstack([w, b]), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_server_may_map_all_releases_to_anything_that_clients_can_apply():
    # f(Σ^(1:t)) = 0.1 times the trace of all releases so far; client i multiplies by 1 + i f.
    own = ServerMap(
        init=lambda d, c: jnp.zeros(()),
        step=lambda last, gram, hparams, round_: last + 0.1 * jnp.trace(gram),
        apply=lambda f, w, client_id: w * (1 + client_id * f),
    )
    found = path(server_map=own, rounds=2)(PLAIN)
    w, total = np.zeros((D, M)), 0.0
    for t in range(2):
        w = w - ETA * gradient(w)
        total += np.sum(w**2)
        w = w * (1 + 0.1 * total * np.arange(M))
        np.testing.assert_allclose(found[t], w, rtol=1e-9)


@pytest.mark.thorough
@pytest.mark.usefixtures("exact_noise")
def test_examples_are_protected_by_noise_of_the_right_law():
    # Zero data: what a client goes on from is the noise alone, whose norm is Gamma(d, 2K/ε).
    m = 3000
    population = Population.from_clients([{"x": np.zeros((1, D)), "y": np.zeros(1)}] * m)
    sim = behind(mpmtl(TASK, protect_examples=True), gaussian_gram(), population)
    hparams = sim.hyperparameters(lam=0.0, clip=1000.0, message_epsilon=500.0)
    state = sim.init(0, hparams)
    b = np.asarray(sim.round(state, hparams)[0].personal.sent.w)[:, :, 0]
    assert kstest(np.linalg.norm(b, axis=1), gamma(D, scale=4.0).cdf).pvalue > 1e-4
    directions = b / np.linalg.norm(b, axis=1, keepdims=True)
    assert np.linalg.norm(directions.mean(axis=0)) < 5 / math.sqrt(m)
    much = hparams.replace(clip=0.5, message_epsilon=0.01)
    clipped = np.asarray(sim.round(state, much)[0].personal.sent.w)[:, :, 0]
    norms = np.linalg.norm(clipped, axis=1)
    assert np.all(norms <= 0.5)
    assert np.mean(norms > 0.499) > 0.99


@pytest.mark.thorough
def test_the_noise_for_examples_has_an_account_of_its_own():
    sim = behind(mpmtl(TASK, protect_examples=True), gaussian_gram())
    hparams = sim.hyperparameters(**(PLAIN | {"clip": 1.0, "message_epsilon": 0.1}))

    def after(seed, rounds, **changes):
        state = sim.init(seed, hparams)
        for _ in range(rounds):
            state, _ = sim.round(state, hparams.replace(**changes))
        return state

    def of_examples(state):
        *_, found = sim.guarantee(state, 1e-5).guarantees
        assert (found.unit, found.adjacency) == ("example", "replace")
        return found

    state = after(0, 3)
    assert of_examples(state).epsilon == pytest.approx(0.3, rel=1e-3)
    stage, _ = sim.round(sim.start_from(state, hparams), hparams)
    assert of_examples(stage).epsilon == pytest.approx(0.4, rel=1e-3)
    free = of_examples(after(0, 2, message_epsilon=math.inf))
    assert (free.epsilon, free.reason) == (None, "no noise was added")
    # Two settings of one seed send the same noise, so publishing both reveals their difference.
    other = after(0, 3, learning_rate=0.02)
    with pytest.raises(ValueError, match="same key"):
        compose_reports([sim.guarantee(each, 1e-5) for each in (state, other)])
    both = compose_reports([sim.guarantee(each, 1e-5) for each in (state, after(1, 2))])
    assert both.guarantees[-1].epsilon == pytest.approx(0.5, rel=1e-3)
    assert Report.from_json(both.to_json()).guarantees == both.guarantees


def start(sim, **changes):
    """The state before the first round."""
    return sim.init(0, sim.hyperparameters(**(PLAIN | changes)))


def test_what_does_not_suit_is_refused():
    with pytest.raises(ValueError, match="linear"):
        mpmtl(softmax(mlp((D,), 2), 2))
    with pytest.raises(ValueError, match="penalty"):
        mpmtl(TASK, penalty="lowrank")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="acceleration"):
        mpmtl(TASK, acceleration="fast")  # pyright: ignore[reportArgumentType]
    for mechanism in (gaussian(), gaussian_gram(diagonal=True)):
        with pytest.raises(ValueError, match="Gram"):
            start(behind(mpmtl(TASK), mechanism))
    with pytest.raises(ValueError, match="every_row"):
        start(behind(dp_mtrl(TASK, num_clients=M), gaussian()))
    fast = behind(mpmtl(TASK, acceleration="strongly-convex"), gaussian_gram())
    with pytest.raises(ValueError, match="ridge"):
        start(fast)
    with pytest.raises(ValueError, match="learning_rate"):
        start(fast, learning_rate=3.0, ridge=0.5)
    with pytest.raises(ValueError, match="clip"):
        start(behind(mpmtl(TASK, protect_examples=True), gaussian_gram()))


@pytest.mark.parametrize("factory", [mpmtl, stl])
def test_models_that_are_no_matrix_and_losses_that_compare_rows_are_refused(factory):
    for task in (cox(linear((2,), 1)), softmax(mlp((2,), 2), 2)):
        with pytest.raises(ValueError, match=r"linear models.* compares no rows of a client"):
            factory(task)
