"""All systems beside plain numpy loops, with unequal rows, steps and availability.

All rows of a client are equal, so that each of its minibatches has the same gradient, in any order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import after, coefficients, read_by, simulation_of

from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.algorithms.scaffold import scaffold
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.models.model import linear
from fedjaxsim.privacy import available
from fedjaxsim.privacy.samplers import Availability, full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import softmax, squared

M, D, CLASSES = 3, 3, 3
ROWS, BATCHES = (1, 4, 7), (1, 2, 4)  # of each client; minibatches of two rows
SHARES = np.array([[1, 1, 1], [0, 0.5, 1], [1, 0, 0.5], [1, 1, 1]], np.float32)
ANSWERS = float(np.mean(SHARES > 0))  # the rate that the server knows, 10/12
COHORT = M * ANSWERS
X = np.array([[0.9, -0.4, 1.0], [-0.3, 0.8, 1.0], [0.5, 0.6, 1.0]])  # the last is the intercept's
Y, LABELS = np.array([1.0, -0.7, 0.4]), np.array([0, 2, 1])
ETA, LAM, MU, SERVER, ALPHA, RIDGE = 0.2, 0.4, 0.3, 0.5, 0.15, 0.1
VALUES = {
    "learning_rate": ETA, "lam": LAM, "mu": MU, "server_learning_rate": SERVER, "fairness": 0.5,
    "server_momentum": 0.7, "mixture": 0.3, "envelope_rate": 0.6, "adaptation_rate": ALPHA,
    "separation": 0.5, "aggregation_rate": 0.8, "personalization": 2.0, "ridge": RIDGE,
    "typical_batches": 3.0, "clip": 1e6, "noise_multiplier": 0.0,
}  # fmt: skip
TRUNK, HEAD = np.array([1.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0])


def gradient(k, w):
    """Gradient of client k's loss, in all its minibatches; w is (3,), or (3, 3) for classes."""
    if np.ndim(w) == 1:
        return X[k] * (X[k] @ w - Y[k])
    exponentials = np.exp(w @ X[k])
    return np.outer(exponentials / exponentials.sum() - (np.arange(CLASSES) == LABELS[k]), X[k])


def rounds():
    """Yield each round and (client, number of its steps) of those who answer."""
    for t, shares in enumerate(SHARES):
        steps = np.ceil(shares * BATCHES).astype(int)
        yield t, [(k, steps[k]) for k in range(M) if shares[k] > 0]


def descend(k, w, steps, weight=0.0, centre: Any = 0.0, slope: Any = 0.0, mask: Any = 1.0):
    for _ in range(steps):
        w = w - ETA * mask * (gradient(k, w) + weight * (w - centre) + slope)
    return w


def averaged(update, server=None, shape=(D,), divisor=lambda cohort: COHORT):
    """One model for all: clients send `update(k, w, steps)`, and `server(w, mean, state)` steps."""
    w, state = np.zeros(shape), {}
    for _, cohort in rounds():
        mean = sum(update(k, w, steps) for k, steps in cohort) / divisor(cohort)
        w = w + SERVER * mean if server is None else server(w, mean, state)
    return np.stack([w] * M)


def fedavg(k, w, steps):
    return descend(k, w, steps) - w


def of_fedavg():
    return averaged(fedavg)


def of_fedprox():
    return averaged(lambda k, w, steps: descend(k, w, steps, MU, w) - w)


def of_qffl():
    return averaged(lambda k, w, s: np.sqrt((X[k] @ w - Y[k]) ** 2 / 2) * fedavg(k, w, s))


def of_fedavgm():
    def server(w, mean, state):
        state["m"] = 0.7 * state.get("m", 0) + mean
        return w + SERVER * state["m"]

    return averaged(fedavg, server)


def of_fedadam(second=lambda v, r: 0.99 * v + 0.01 * r**2):
    def server(w, mean, state):
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * mean
        state["v"] = second(state.get("v", np.full(D, 1e-6)), mean)
        return w + SERVER * state["m"] / (np.sqrt(state["v"]) + 1e-3)

    return averaged(fedavg, server)


def of_fedyogi():
    return of_fedadam(lambda v, r: v - 0.01 * r**2 * np.sign(v - r**2))


def of_knnper():
    return averaged(fedavg, shape=(CLASSES, D))


def of_perfedavg():
    def update(k, w, steps):
        v = w
        for batch in range(steps):
            if 2 * batch + 1 < ROWS[k]:  # one row has no second half
                v = v - ETA * gradient(k, v - ALPHA * gradient(k, v))
        return v - w

    models = averaged(update)
    return np.stack([w - ALPHA * gradient(k, w) for k, w in enumerate(models)])


def of_scaffold(message="update"):
    x, c, c_i, b = np.zeros(D), np.zeros(D), np.zeros((M, D)), 3.0
    for _, cohort in rounds():
        change_x, change_c = np.zeros(D), np.zeros(D)
        for k, steps in cohort:
            y = descend(k, x, steps, slope=c - c_i[k])
            new = c_i[k] - c + (x - y) / (steps * ETA)
            change_x += -b * ETA * new if message == "steps" else y - x
            change_c += (new - c if message == "steps" else new - c_i[k]) / COHORT
            c_i[k] = new
        if message == "steps":  # the fixed divisor counts those who are silent, too
            change_c += c * (len(cohort) / COHORT - 1)
        x, c = x + SERVER * change_x / COHORT, c + ANSWERS * change_c
    return np.stack([x] * M)


def of_feddyn():
    theta, h, g = np.zeros(D), np.zeros(D), np.zeros((M, D))
    for _, cohort in rounds():
        mean = np.zeros(D)
        for k, steps in cohort:
            v = descend(k, theta, steps, LAM, theta, -g[k])
            g[k] = g[k] - LAM * (v - theta)
            mean += (v - theta) / COHORT
        h = h - LAM * ANSWERS * mean
        theta = theta + mean - h / LAM
    return np.stack([theta + h / LAM] * M)


def of_pmtl():
    w, shared = np.zeros((M, D)), np.zeros(D)
    for _, cohort in rounds():
        total = np.zeros(D)
        for k, steps in cohort:
            w[k] = descend(k, w[k], steps, LAM, shared)
            total += w[k] - shared
        shared = shared + SERVER * total / COHORT
    return w


def of_naive_dp():
    rows = np.zeros((M, D))
    for _, cohort in rounds():
        mean, old = rows.mean(axis=0), rows.copy()
        for k, steps in cohort:
            rows[k] = descend(k, old[k], steps, LAM, mean)
    return rows


def of_local(lam=0.0):
    w = np.zeros((M, D))
    for _, cohort in rounds():
        for k, steps in cohort:
            w[k] = descend(k, w[k], steps, lam)  # w̃ is the first model, 0
    return w


def of_finetune():
    return of_local(LAM)


def of_ditto():
    w, v = np.zeros(D), np.zeros((M, D))
    for _, cohort in rounds():
        total = np.zeros(D)
        for k, steps in cohort:
            v[k] = descend(k, v[k], steps, LAM, w)
            total += fedavg(k, w, steps)
        w = w + SERVER * total / COHORT
    return v


def of_ppsgd():
    w, theta = np.zeros(D), np.zeros((M, D))
    for _, cohort in rounds():
        total = np.zeros(D)
        for k, _ in cohort:
            found = gradient(k, w + theta[k])
            theta[k] = theta[k] - ETA / 2 * found  # level 2: η_w = η, η_θ = η/2
            total += found
        w = w - ETA * total / COHORT
    return w + theta


def of_dpfedmtl(divisor: Any = lambda cohort: COHORT, head_first=False):
    """The intercept is the head."""
    trunk, heads = np.zeros(D), np.zeros((M, D))
    for _, cohort in rounds():
        total = np.zeros(D)
        for k, steps in cohort:
            if head_first:
                w = descend(k, trunk + heads[k], steps, mask=HEAD)
                w = descend(k, w, steps, mask=TRUNK)
            else:
                w = descend(k, trunk + heads[k], steps)
            heads[k] = HEAD * w
            total += TRUNK * w - trunk
        trunk = trunk + SERVER * total / divisor(cohort)
    return trunk + heads


def of_apfl():
    alpha, w, v = 0.3, np.zeros(D), np.zeros((M, D))
    for _, cohort in rounds():
        total = np.zeros(D)
        for k, steps in cohort:
            w_i = w
            for _ in range(steps):
                mixed = gradient(k, alpha * v[k] + (1 - alpha) * w_i)
                v[k], w_i = v[k] - ETA * alpha * mixed, w_i - ETA * gradient(k, w_i)
            total += w_i - w
        w = w + SERVER * total / COHORT
    return alpha * v + (1 - alpha) * w


def of_pfedme():
    w, theta = np.zeros(D), np.zeros((M, D))
    for _, cohort in rounds():
        total = np.zeros(D)
        for k, steps in cohort:
            w_i = theta[k] = w
            for _ in range(steps):
                for _ in range(5):
                    theta[k] = theta[k] - ETA * (gradient(k, theta[k]) + LAM * (theta[k] - w_i))
                w_i = w_i - 0.6 * LAM * (w_i - theta[k])
            total += w_i - w
        w = w + SERVER * total / COHORT
    return theta


def of_fedala():
    w, theta, weights = np.zeros(D), np.zeros((M, D)), np.ones((M, D))
    for _, cohort in rounds():
        total = np.zeros(D)
        for k, steps in cohort:
            towards = w - theta[k]
            for _ in range(steps):
                found = gradient(k, theta[k] + towards * weights[k])
                weights[k] = np.clip(weights[k] - 0.8 * found * towards, 0, 1)
            theta[k] = descend(k, theta[k] + towards * weights[k], steps)
            total += theta[k] - w
        w = w + SERVER * total / COHORT
    return theta


def of_ifca(first):
    models = first.copy()

    def best(k):
        return np.argmin([(X[k] @ w - Y[k]) ** 2 for w in models])

    for _, cohort in rounds():
        total = np.zeros_like(models)
        for k, steps in cohort:
            total[best(k)] += fedavg(k, models[best(k)], steps)
        models = models + SERVER * total / COHORT
    return np.stack([models[best(k)] for k in range(M)])


def of_stl():
    w, before = np.zeros((M, D)), np.zeros((M, D))
    for t, cohort in rounds():
        for k, _ in cohort:
            z = w[k] + max(t - 1, 0) / (t + 2) * (w[k] - before[k])
            step = z - ETA * (gradient(k, z) + RIDGE * z)
            new = np.sign(step) * np.maximum(np.abs(step) - ETA * LAM, 0)
            before[k], w[k] = new if t == 0 else w[k], new
    return w


def shrunk(models, relationship=False):
    """M = U max(0, 1 − θ/√Λ) Uᵀ of WᵀW with θ = ηλ or, in a relationship, ηλ Σ max(0, √Λ − θ)."""
    values, vectors = np.linalg.eigh(models.T @ models)
    roots = np.sqrt(np.maximum(values, 1e-30))
    low, high = 0.0, float(roots.sum())
    for _ in range(200):
        middle = (low + high) / 2
        rises = ETA * LAM * np.maximum(roots - middle, 0).sum() > middle
        low, high = (middle, high) if rises else (low, middle)
    threshold = low if relationship else ETA * LAM
    return vectors @ np.diag(np.maximum(0, 1 - threshold / roots)) @ vectors.T


def of_mpmtl():
    matrix, w, before = np.eye(D), np.zeros((M, D)), np.zeros((M, D))
    for t, cohort in rounds():
        sent = np.zeros((M, D))
        for k, _ in cohort:
            hat = matrix @ w[k]
            z = hat + max(t - 1, 0) / (t + 2) * (hat - before[k])
            w[k] = sent[k] = z - ETA * (gradient(k, z) + RIDGE * z)
            before[k] = w[k] if t == 0 else hat
        matrix = shrunk(sent)
    return w @ matrix


def of_dp_mtrl():
    rows = np.zeros((M, D))
    for _, cohort in rounds():
        sent = np.zeros((M, D))  # a silent client's row is released as 0
        for k, _ in cohort:
            sent[k] = rows[k] - ETA * (gradient(k, rows[k]) + RIDGE * rows[k])
        rows = sent @ shrunk(sent, relationship=True)
    return rows


REFERENCES = {
    "pmtl": of_pmtl, "ditto": of_ditto, "ppsgd": of_ppsgd, "dpfedmtl": of_dpfedmtl,
    "dpfedmtl-as-published": lambda: of_dpfedmtl(len), "fedavg": of_fedavg, "fedprox": of_fedprox,
    "mpmtl": of_mpmtl, "dp-mtrl": of_dp_mtrl, "stl": of_stl, "naive-dp": of_naive_dp,
    "local": of_local, "finetune": of_finetune, "scaffold": of_scaffold, "feddyn": of_feddyn,
    "qffl": of_qffl, "apfl": of_apfl, "pfedme": of_pfedme, "per-fedavg": of_perfedavg,
    "ifca": of_ifca, "fedala": of_fedala, "knn-per": of_knnper, "fedavgm": of_fedavgm,
    "fedadam": of_fedadam, "fedyogi": of_fedyogi, "fedper": of_dpfedmtl,
    "fedrep": lambda: of_dpfedmtl(head_first=True), "fedbn": of_dpfedmtl,
}  # fmt: skip
QUICK = ("scaffold", "pmtl")
"""MP-MTL and DPFedMTL have quick rounds by hand of their own."""


def population(classes=False):
    labels = LABELS if classes else Y
    return Population.from_clients(
        [
            {"x": np.tile(X[k, :-1], (n, 1)), "y": np.repeat(labels[k], n)}
            for k, n in enumerate(ROWS)
        ]
    )


def recorded():
    def work(key, round_, client_id):
        return jnp.asarray(SHARES)[round_, client_id]

    return available(full_participation(), Availability(work, ANSWERS))


def compare(sim, reference):
    hparams = read_by(sim, **VALUES)
    first = coefficients(sim.init(0, hparams).shared.params) if reference is of_ifca else None
    models = sim.models(after(sim, hparams, len(SHARES)), hparams)
    models = getattr(models, "params", models)  # kNN-Per's come with neighbours
    found = np.concatenate([models["kernel"], np.asarray(models["bias"])[..., None]], axis=-1)
    expected = reference() if first is None else reference(first)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-9, atol=1e-11)


def test_there_is_a_reference_for_every_system():
    assert REFERENCES.keys() == SYSTEMS.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough)
        for name in REFERENCES
    ],
)
def test_a_system_with_unequal_clients_is_its_numpy_loop(name):
    with jax.enable_x64(True):
        classes = SYSTEMS[name].softmax
        model = linear((D - 1,), CLASSES if classes else 1)
        task = softmax(model, CLASSES) if classes else squared(model)
        batches = Minibatches(2, epochs=1)
        sim = simulation_of(name, task, population(classes), recorded(), batches)
        compare(sim, REFERENCES[name])


@pytest.mark.thorough
def test_steps_of_scaffold_with_unequal_clients_are_its_numpy_loop():
    with jax.enable_x64(True):
        algorithm = scaffold(squared(linear((D - 1,), 1)), message="steps")
        sim = Simulation(algorithm, population(), recorded(), Minibatches(2, epochs=1))
        compare(sim, lambda: of_scaffold("steps"))


@pytest.mark.thorough
@pytest.mark.parametrize("message", ["update", pytest.param("steps", marks=pytest.mark.thorough)])
def test_scaffold_settles_where_the_mean_gradient_is_zero_whatever_the_steps(message):
    """Rows (1, 6) with labels 0 and 1: the mean of the clients' minima, not that of the rows."""
    ys = (0.0, 1.0)
    rows = [{"x": np.ones((n, 1)), "y": np.full(n, y)} for n, y in zip((1, 6), ys, strict=True)]
    with jax.enable_x64(True):
        algorithm = scaffold(squared(linear((1,), 1, bias=False)), message=message)
        batches = Minibatches(1, epochs=1)
        data = Population.from_clients(rows)
        sim = Simulation(algorithm, data, full_participation(), batches)
        hparams = sim.hyperparameters(learning_rate=0.2)
        state, _ = sim.run(sim.init(0, hparams), hparams, rounds=80)
        np.testing.assert_allclose(np.ravel(sim.models(state, hparams)["kernel"]), 0.5, atol=1e-6)
