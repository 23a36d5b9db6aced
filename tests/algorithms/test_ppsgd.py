"""PP-SGD against Algorithm 2 in numpy, its two ends, networks, derivatives and averages."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import after, classification, coefficients, least_squares, noise_key, read_by

from fedjaxsim.algorithm import Context
from fedjaxsim.algorithms.ppsgd import Parametrization, Risk, ppsgd
from fedjaxsim.data.minibatches import Batch, ClientData, Minibatches, RowReader
from fedjaxsim.data.population import Population
from fedjaxsim.hyperparameters import compose, fill
from fedjaxsim.keys import Stream, stream
from fedjaxsim.models import linear, mlp
from fedjaxsim.privacy.mechanisms import noise_like
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import Task, one_vs_all, squared

COUNTS = [5, 9, 17, 6]
N, D = len(COUNTS), 4  # clients; coefficients, the bias last
SIZES = [1, 4, 2, 3]
M = sum(SIZES)
BATCH = 4
INF = float("inf")
THOROUGH = pytest.mark.thorough


@functools.cache
def simulation(
    sampling: str,
    objective: Risk,
    parametrization: Parametrization = "grid",
    averaged: bool = False,
) -> Simulation:
    """Made once, for its compilation; in float64."""
    population, task = least_squares(COUNTS)
    algorithm = ppsgd(
        task,
        parametrization=parametrization,
        objective=objective,
        sizes=SIZES if objective == "weighted" else None,
        averaged=averaged,
    )
    sampler = full_participation() if sampling == "full" else poisson(1.0)
    return Simulation(algorithm, population, sampler, Minibatches(BATCH, steps=1))


def predictions(sim, state, hparams):
    """What every client predicts with, (N, d + 1)."""
    predict = jax.vmap(sim.algorithm.predict, (None, 0, None, 0))
    return coefficients(predict(state.shared, state.personal, hparams, jnp.arange(N)))


@functools.cache
def randomness(sampling, seed, rate, rounds):
    """What the engine draws: who takes part (T, N), minibatches X (T, N, b, d + 1) and y, and
    standard normal noise (T, d + 1). No setting of the algorithm enters."""
    sim = simulation(sampling, "average")
    hparams = read_by(sim, sampling_rate=rate)
    state = sim.init(seed, hparams)
    sampling_key = stream(state.key, Stream.SAMPLING)

    def minibatch(t, client):
        key = stream(stream(state.key, Stream.CLIENTS, t), Stream.MINIBATCHES, client)
        data = sim.rows["train"].of(client, key, sim.minibatches, sim.program.plan.reading)
        nothing = Batch({"x": jnp.zeros((BATCH, 3)), "y": jnp.zeros(BATCH)}, jnp.zeros(BATCH))
        return data.fold(lambda _, batch: batch._replace(keys=None), nothing).fields

    def one(t):
        cohort = sim.sampler.draw(sampling_key, t, hparams.as_arrays())
        present = jnp.zeros(N, bool).at[cohort.ids].max(cohort.mask)
        noise = noise_like(noise_key(state, t), state.shared.value, jnp.ones(()))
        return present, jax.vmap(minibatch, (None, 0))(t, jnp.arange(N)), noise

    present, fields, noise = jax.jit(jax.vmap(one))(jnp.arange(rounds))
    x = np.concatenate([fields["x"], np.ones((rounds, N, BATCH, 1))], axis=-1)
    return np.asarray(present), x, np.asarray(fields["y"]), coefficients(noise)


def step_sizes(parametrization, objective, eta, level, q):
    """(η_w, η_θ) on g_w as the server gets it, Σ clip(g_w)/(qN or qM), and on g_θ."""
    if parametrization == "paper":
        return level * eta, eta / (q * (M if objective == "weighted" else N))
    if level == INF:
        rates = eta, 0.0
    elif level <= 1:
        rates = level * eta, eta
    else:
        rates = eta, eta / level
    # On sums, M/N times as large on average as means.
    return (rates[0], rates[1] * N / M) if objective == "weighted" else rates


def algorithm_2(draws, parametrization, objective, eta, level, q, clip, z):
    """Algorithm 2 (with sums) and 3 (with means): all iterates w (T + 1, p), θ (T + 1, N, p)."""
    eta_w, eta_theta = step_sizes(parametrization, objective, eta, level, q)
    divisor = q * (M if objective == "weighted" else N)
    w, theta = np.zeros(D), np.zeros((N, D))
    history, clipped = [(w, theta)], 0
    for present, x, y, noise in zip(*draws, strict=True):
        theta, total = theta.copy(), np.zeros(D)
        for i in np.flatnonzero(present):
            rows = slice(SIZES[i]) if objective == "weighted" else slice(None)
            g = x[i][rows].T @ (x[i][rows] @ (w + theta[i]) - y[i][rows])
            g = g if objective == "weighted" else g / BATCH
            theta[i] -= eta_theta * g
            total += g / max(1, np.linalg.norm(g) / clip)
            clipped += np.linalg.norm(g) > clip
        w = w - eta_w * (total + (z * clip * noise if z else 0)) / divisor
        history.append((w, theta))
    return np.array([w for w, _ in history]), np.array([t for _, t in history]), clipped


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sampling", "objective", "parametrization", "averaged", "levels"),
    [
        ("poisson", "average", "grid", True, [0, 0.1, 1, 10, INF]),
        pytest.param("full", "weighted", "paper", False, [0, 0.05, 1.5], marks=THOROUGH),
        pytest.param("full", "weighted", "grid", False, [0, 0.1, 1, 10, INF], marks=THOROUGH),
        pytest.param("poisson", "weighted", "paper", True, [0, 0.05, 1.5], marks=THOROUGH),
        pytest.param("poisson", "average", "paper", False, [0, 0.05, 1.5], marks=THOROUGH),
    ],
)
def test_it_is_algorithm_2_written_in_numpy(sampling, objective, parametrization, averaged, levels):
    # The sampler rounds q to a multiple of 2⁻³².
    rounds, eta, q = 20, 0.05, 1.0 if sampling == "full" else 0.625
    with jax.enable_x64(True):
        sim = simulation(sampling, objective, parametrization, averaged)
        hparams = read_by(sim, learning_rate=eta, sampling_rate=q)
        draws = randomness(sampling, 3, q, rounds)
        assert draws[0].all() == (sampling == "full")
        for level, (clip, z) in itertools.product(levels, [(INF, 0.0), (1.0, 0.7)]):
            hparams = hparams.replace(personalization=level, clip=clip, noise_multiplier=z)
            state, clipped = sim.init(3, hparams), 0
            for _ in range(rounds):
                state, metrics = sim.round(state, hparams)
                clipped += int(metrics["clipped"])
            w, theta, expected = algorithm_2(
                draws, parametrization, objective, eta, level, q, clip, z
            )
            assert clipped == expected
            assert (0 < clipped < draws[0].sum()) == (z > 0)  # both cases occurred
            near = functools.partial(np.testing.assert_allclose, rtol=1e-10)
            near(coefficients(state.shared.value), w[-1])
            near(coefficients(state.personal.value), theta[-1])
            iterate = slice(0, rounds) if averaged else slice(rounds, None)
            used = w[iterate].mean(axis=0) + theta[iterate].mean(axis=0)
            near(predictions(sim, state, hparams), used)


PRIVATE = {
    "learning_rate": 0.05,
    "clip": 1.0,
    "noise_multiplier": 0.7,
    "sampling_rate": 0.625,
}


@pytest.mark.thorough
def test_at_level_0_nothing_of_the_others_reaches_a_client():
    with jax.enable_x64(True):
        sim = simulation("poisson", "average", averaged=True)
        x, y = (np.array(sim.population.fields[name]) for name in ("x", "y"))
        others = sim.population.splits["train"].start[1]
        x[others:], y[others:] = 7.0, -100.0
        altered = sim.with_population(
            Population({"x": x, "y": y}, sim.population.counts, sim.population.names)
        )
        hparams = sim.hyperparameters(**PRIVATE, personalization=0.0)
        one, two = after(sim, hparams, 10, seed=3), after(altered, hparams, 10, seed=3)
        own = [coefficients(state.personal.value) for state in (one, two)]
        assert np.any(own[0][0] != 0)
        np.testing.assert_array_equal(own[0][0], own[1][0])
        assert np.all(own[0][1:] != own[1][1:])
        used = [predictions(s, state, hparams) for s, state in ((sim, one), (altered, two))]
        np.testing.assert_array_equal(used[0][0], used[1][0])
        assert np.all(coefficients(one.shared.value) == 0)
        # At another level it does.
        hparams = sim.hyperparameters(**PRIVATE, personalization=0.01)
        one, two = after(sim, hparams, 10, seed=3), after(altered, hparams, 10, seed=3)
        own = [coefficients(state.personal.value) for state in (one, two)]
        assert np.any(own[0][0] != own[1][0])


@pytest.mark.thorough
def test_at_level_infinity_there_is_one_model():
    with jax.enable_x64(True):
        sim = simulation("poisson", "average", averaged=True)
        hparams = sim.hyperparameters(**PRIVATE, personalization=INF)
        state = after(sim, hparams, 10, seed=3)
        assert np.all(coefficients(state.personal.value) == 0)
        used = predictions(sim, state, hparams)
        assert np.all(used[0] != 0)
        np.testing.assert_array_equal(used, np.tile(used[0], (N, 1)))


@pytest.mark.thorough
def test_derivatives_in_the_learning_rate_and_the_level():
    with jax.enable_x64(True):
        sim = simulation("poisson", "average", averaged=True)
        private = sim.hyperparameters(**PRIVATE)
        start = sim.init(3, private)
        direction = np.random.default_rng(0).normal(size=(N, D))

        def outcome(rate, level):
            hparams = private.replace(learning_rate=rate, personalization=level)
            state, _ = jax.lax.scan(
                lambda state, _: (sim.round(state, hparams)[0], None), start, length=4
            )
            predict = jax.vmap(sim.algorithm.predict, (None, 0, None, 0))
            params = predict(state.shared, state.personal, hparams, jnp.arange(N))
            kernel, bias = params["kernel"][..., 0, :], params["bias"]
            return jnp.sum(direction * jnp.concatenate([kernel, bias], axis=-1))

        both = jax.jit(lambda point, tangents: jax.jvp(outcome, point, tangents))
        backward = jax.jit(jax.grad(outcome, (0, 1)))

        def at(rate, level):
            return both((rate, level), (0.0, 0.0))[0]

        h = 1e-6
        for level in [0.5, 3.0, 0.0, INF]:
            point = (0.2, level)
            by_rate = both(point, (1.0, 0.0))[1]
            by_level = both(point, (0.0, 1.0))[1]
            expected = (at(0.2 + h, level) - at(0.2 - h, level)) / (2 * h)
            np.testing.assert_allclose(by_rate, expected, rtol=1e-7)
            if level == INF:
                assert by_level == 0
            elif level == 0:  # there is no level below
                near = [at(0.2, k * h) for k in range(3)]
                expected = (-3 * near[0] + 4 * near[1] - near[2]) / (2 * h)
                np.testing.assert_allclose(by_level, expected, rtol=1e-7)
            else:
                expected = (at(0.2, level + h) - at(0.2, level - h)) / (2 * h)
                np.testing.assert_allclose(by_level, expected, rtol=1e-7)
            reverse = backward(*point)
            np.testing.assert_allclose(reverse, (by_rate, by_level), rtol=1e-10)


# --- networks -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_in_a_network_the_representation_is_shared_and_clipped_together_with_w():
    # 13 to 20 training rows in batches of 8: an epoch is one minibatch of all rows.
    population, _ = classification([16, 20, 25], features=3)
    task = one_vs_all(mlp((3,), 3, hidden=(4,)), 3)
    clip, eta, level = 0.1, 0.5, 0.4
    sim = Simulation(ppsgd(task), population, full_participation(), Minibatches(8, epochs=1))
    hparams = sim.hyperparameters(learning_rate=eta, personalization=level, clip=clip)
    state = sim.init(0, hparams)
    start = state.shared.value
    assert [leaf.shape for leaf in jax.tree.leaves(state.personal.value)] == [(3, 3), (3, 4, 3)]
    assert np.all(start["Dense_0"]["kernel"] != 0)
    for leaf in jax.tree.leaves((start["Dense_1"], state.personal.value)):
        assert np.all(leaf == 0)

    def numpy(tree):
        return jax.tree.map(np.asarray, tree)

    gradient = jax.jit(jax.grad(task.loss))
    w = numpy(start)
    thetas = [jax.tree.map(np.zeros_like, w["Dense_1"]) for _ in range(3)]
    for _ in range(3):
        state, metrics = sim.round(state, hparams)
        release = jax.tree.map(np.zeros_like, w)
        for i in range(3):
            own = {name: jnp.asarray(rows) for name, rows in population.rows(i, "train").items()}
            params = w | {"Dense_1": jax.tree.map(np.add, w["Dense_1"], thetas[i])}
            g = numpy(gradient(params, Batch(own, jnp.ones(len(own["y"])))))
            norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(g)))
            assert norm > clip
            release = jax.tree.map(lambda s, v, k=clip / norm: s + k * v / 3, release, g)
            thetas[i] = jax.tree.map(lambda t, v: t - eta * v, thetas[i], g["Dense_1"])
        w = jax.tree.map(lambda p, r: p - level * eta * r, w, release)
        assert int(metrics["clipped"]) == 3
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(near, numpy(state.shared.value), w)
    for i in range(3):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], state.personal.value)
        jax.tree.map(near, numpy(own["Dense_1"]), thetas[i])
    assert np.max(np.abs(w["Dense_0"]["kernel"] - start["Dense_0"]["kernel"])) > 1e-3

    # At level 0 the noise moves nothing.
    hparams = hparams.replace(personalization=0.0, noise_multiplier=3.0)
    state = after(sim, hparams, 2, seed=3)
    begun = sim.init(3, hparams).shared.value
    jax.tree.map(np.testing.assert_array_equal, numpy(state.shared.value), numpy(begun))


def defaults(algorithm):
    """The hyperparameters of an algorithm without a simulation."""
    return fill(compose([algorithm.hyperparameters]), {}).as_arrays()


def test_before_the_first_round_the_averaged_iterate_is_the_first_one():
    def init(key):
        return {"body": jax.random.normal(key, (3,)), "head": {"a": jnp.ones(2), "b": jnp.ones(2)}}

    task = Task(init, lambda params, batch: jnp.zeros(()), lambda params, batch: {})
    algorithm = ppsgd(task, personal=lambda path: path == "head/b", averaged=True)
    hparams = defaults(algorithm)
    shared, personal = algorithm.init(jax.random.key(0), hparams)
    assert jax.tree.map(jnp.shape, personal.value) == {"body": None, "head": {"a": None, "b": (2,)}}
    params = algorithm.predict(shared, personal, hparams, jnp.int32(0))
    expected = init(jax.random.key(0))
    expected["head"]["b"] = jnp.zeros(2)  # w starts at 0
    chex.assert_trees_all_equal(params, expected)


# --- sizes, units and refusals --------------------------------------------------------------------


@pytest.mark.parametrize(
    "minibatches", [Minibatches(2, epochs=1), Minibatches(5, epochs=1), Minibatches(5, steps=1)]
)
def test_the_weighted_objective_uses_m_i_examples(minibatches):
    # Rows of the identity and w = 0: the gradient is −y_r for each use of row r.
    sizes, y = [3, 5], np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    task = squared(linear((5,), 1, bias=False))
    algorithm = ppsgd(task, objective="weighted", sizes=sizes)
    hparams = defaults(algorithm)
    shared, personal = algorithm.init(jax.random.key(0), hparams)

    @jax.jit
    def message(client_id):
        fields = {"x": jnp.eye(5), "y": jnp.asarray(y)}
        count = jnp.int32(5)
        rows = RowReader(fields, jnp.int32(0), count)
        data = ClientData(rows, count, jax.random.key(1), minibatches)
        context = Context(jnp.int32(0), jax.random.key(2), client_id, 2, jnp.ones(()))
        return algorithm.client(shared, personal, data, hparams, context)[1]

    for i, size in enumerate(sizes):
        uses = np.asarray(message(jnp.int32(i))["kernel"])[0] / -y
        np.testing.assert_allclose(uses, np.round(uses), atol=1e-6)
        assert np.round(uses).sum() == size
        if minibatches.epochs:
            assert np.round(uses).max() == 1


@pytest.mark.parametrize(
    ("sizes", "minibatches", "message"),
    [
        (None, Minibatches(4, steps=2), "minibatch"),
        (None, Minibatches(4, epochs=2), "minibatch"),
        ([1, 2], Minibatches(4, steps=1), "4 clients"),
        (5, Minibatches(4, steps=1), "sizes"),
    ],
)
def test_minibatches_that_do_not_suit_are_refused(sizes, minibatches, message):
    population, task = least_squares(COUNTS)
    algorithm = ppsgd(task, objective="weighted" if sizes else "average", sizes=sizes)
    sim = Simulation(algorithm, population, full_participation(), minibatches)
    with pytest.raises(ValueError, match=message):
        sim.init(0, sim.hyperparameters())


def test_settings_out_of_range_are_refused():
    _, task = least_squares(COUNTS)
    for sizes in (0, 1.5, [2, 0], [[1]], []):
        with pytest.raises(ValueError, match="sizes"):
            ppsgd(task, objective="weighted", sizes=sizes)
    with pytest.raises(ValueError, match="parametrization"):
        ppsgd(task, parametrization="code")  # pyright: ignore[reportArgumentType]
    algorithm = ppsgd(task, parametrization="paper")
    with pytest.raises(ValueError, match="personalization"):
        algorithm.check(defaults(algorithm).replace(personalization=INF))
    with pytest.raises(ValueError, match="Dense_1"):
        ppsgd(task, personal="Dense_1").init(jax.random.key(0), defaults(algorithm))
    for objective, sizes in [("weighted", None), ("average", [1, 2]), ("median", None)]:
        with pytest.raises(ValueError, match="objective"):
            ppsgd(task, objective=objective, sizes=sizes)  # pyright: ignore[reportArgumentType]
