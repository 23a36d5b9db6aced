"""Running statistics of BatchNorm: kept by clients, or averaged where nothing is noised."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedjaxsim as fjs
from fedjaxsim.models import from_equinox, from_flax, from_nnx, in_bfloat16, trainable
from fedjaxsim.tasks import squared

MOMENTUM, EPS, ETA, SIZES = 0.9, 1e-5, 0.2, (5, 8)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(not train, momentum=MOMENTUM, epsilon=EPS, name="bn")(x)
        return nn.Dense(1, name="out")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.bn = nnx.BatchNorm(2, momentum=MOMENTUM, epsilon=EPS, rngs=rngs)
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.bn(x))


class Equinox(eqx.Module):
    bn: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        self.bn = eqx.nn.BatchNorm(2, "batch", EPS, momentum=MOMENTUM, mode="batch")
        self.out = eqx.nn.Linear(2, 1, key=key)

    def __call__(self, x, state):
        x, state = self.bn(x, state)
        return self.out(x), state


def linen():
    return from_flax(Linen(), (2,))


def equinox():
    return from_equinox(eqx.nn.make_with_state(Equinox))


@functools.cache
def clients():
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(3, 2, (n, 2)), "y": rng.normal(size=n)} for n in SIZES]


def simulation(algorithm, model, rows=None, **parts):
    population = fjs.Population.from_clients(clients() if rows is None else rows)
    # Two steps of all rows; the first client's batches have three rows of padding.
    batches = fjs.Minibatches(8, epochs=2)
    return fjs.Simulation(
        algorithm(squared(model)), population, fjs.full_participation(), batches, **parts
    )


class ByHand:
    """FedBN, or FedAvg, of one normalized layer and a linear one, in numpy."""

    def __init__(self, w, b, rows=None):
        self.w, self.b = w, b
        self.rows = clients() if rows is None else rows
        self.own = [[np.ones(2), np.zeros(2), np.zeros(2), np.ones(2)] for _ in SIZES]

    def round(self, averages=False):
        """Take a round of FedBN, or with `averages` of FedAvg."""
        updates = []
        for k, rows in enumerate(self.rows):
            x, y, (gamma, beta, mean, var) = rows["x"], rows["y"], self.own[k]
            w, b = self.w.copy(), self.b
            for _ in range(2):
                normed = (x - x.mean(0)) / np.sqrt(x.var(0) + EPS)
                residual = (gamma * normed + beta) @ w + b - y
                slope = residual[:, None] * w
                gradients = (
                    (residual[:, None] * (gamma * normed + beta)).mean(0),
                    residual.mean(),
                    (slope * normed).mean(0),
                    slope.mean(0),
                )
                w, b = w - ETA * gradients[0], b - ETA * gradients[1]
                gamma, beta = gamma - ETA * gradients[2], beta - ETA * gradients[3]
                mean = MOMENTUM * mean + (1 - MOMENTUM) * x.mean(0)
                var = MOMENTUM * var + (1 - MOMENTUM) * x.var(0)
            self.own[k] = [gamma, beta, mean, var]
            updates.append((w - self.w, b - self.b))
        self.w, self.b = (
            old + np.mean([update[at] for update in updates], axis=0)
            for at, old in enumerate((self.w, self.b))
        )
        if averages:
            means = [np.mean(of_clients, axis=0) for of_clients in zip(*self.own, strict=True)]
            self.own = [means for _ in SIZES]


def test_fedbn_is_the_algorithm_by_hand():
    sim = simulation(fjs.fedbn, linen())
    hparams = sim.hyperparameters(learning_rate=ETA)
    state = sim.init(0, hparams)
    first = state.shared.trunk.params["out"]
    hand = ByHand(np.float64(first["kernel"][:, 0]), 0.0)
    for _ in range(3):
        state, _ = sim.round(state, hparams)
        hand.round()
    trunk, own = state.shared.trunk.params, state.personal
    np.testing.assert_allclose(trunk["out"]["kernel"][:, 0], hand.w, rtol=1e-4)
    assert len(jax.tree.leaves(trunk)) == 2  # nothing of BatchNorm is sent
    found = (*(own["bn"][n] for n in ("scale", "bias")), *own["statistics"]["bn"].values())
    for place, leaf in enumerate(found):
        expected = [each[place] for each in hand.own]
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)
    # Evaluations read the running statistics, not those of their batches.
    losses = []
    for rows, (gamma, beta, mean, var) in zip(clients(), hand.own, strict=True):
        normed = gamma * (rows["x"] - mean) / np.sqrt(var + EPS) + beta
        losses.append(np.mean((normed @ hand.w + hand.b - rows["y"]) ** 2) / 2)
    evaluated = sim.evaluate(state, hparams, "train").values["loss"]
    np.testing.assert_allclose(evaluated, losses, rtol=1e-4)


def in_linen(params):
    """Return the parameters of the models here in the order of `ByHand`: W, b, γ, β, mean, var."""
    out, bn = params["out"], params["bn"]
    statistics = params["statistics"]["bn"]
    return out["kernel"][..., 0], out["bias"], bn["scale"], bn["bias"], *statistics.values()


@pytest.mark.thorough
@pytest.mark.parametrize("library", [pytest.param("linen", marks=pytest.mark.thorough), "nnx"])
def test_fedavg_averages_statistics(library):
    x, y = clients()[1].values()
    # Linen masks the rows that a batch lacks; nnx takes full ones.
    rows = clients() if library == "linen" else [{"x": x, "y": y}, {"x": 2 * x - 1, "y": -y}]
    sim = simulation(fjs.fedavg, linen() if library == "linen" else from_nnx(Nnx), rows)
    hparams = sim.hyperparameters(learning_rate=ETA)
    state = sim.init(0, hparams)
    hand = ByHand(np.float64(state.shared.params["out"]["kernel"][:, 0]), 0.0, rows)
    for _ in range(3):
        state, _ = sim.round(state, hparams)
        hand.round(averages=True)
    expected = hand.w, [hand.b], *hand.own[0]
    for leaf, by_hand in zip(in_linen(state.shared.params), expected, strict=True):
        np.testing.assert_allclose(leaf, by_hand, rtol=1e-4, atol=1e-5)


AVERAGING = ("fedavgm", "fedyogi", "fedprox", "scaffold", "ditto", "apfl", "pmtl", "perfedavg")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*AVERAGING, "fedala"])
def test_one_client_alone_publishes_its_own_statistics(name):
    rows = clients()[1]
    population = fjs.Population.from_clients([rows])
    batches = fjs.Minibatches(8, epochs=2)
    algorithm = getattr(fjs, name)(squared(linen()))
    sim = fjs.Simulation(algorithm, population, fjs.full_participation(), batches)
    hparams = sim.hyperparameters(learning_rate=ETA)
    state, _ = sim.round(sim.init(0, hparams), hparams)
    shared = getattr(state.shared, "model", state.shared)
    statistics, x = shared.params["statistics"]["bn"], rows["x"]
    np.testing.assert_allclose(statistics["mean"], (1 - MOMENTUM**2) * x.mean(0), rtol=1e-4)
    var = MOMENTUM**2 + (1 - MOMENTUM**2) * x.var(0)
    np.testing.assert_allclose(statistics["var"], var, rtol=1e-4)


def test_statistics_are_not_noised_and_stay_with_their_client():
    sim = simulation(fjs.fedbn, linen())
    noised = sim.hyperparameters(learning_rate=ETA, clip=1.0, noise_multiplier=50.0)
    state, _ = sim.round(sim.init(0, noised), noised)
    for rows, mean in zip(clients(), state.personal["statistics"]["bn"]["mean"], strict=True):
        weight = 1 - MOMENTUM**2  # the layer sees rows alone, which no noise touches
        np.testing.assert_allclose(mean, weight * rows["x"].mean(0), rtol=1e-5)


@pytest.mark.thorough
def test_statistics_reach_no_other_client():
    sim = simulation(fjs.fedbn, linen())
    noised = sim.hyperparameters(learning_rate=ETA, clip=1.0, noise_multiplier=50.0)
    fjs.testing.check_billboard(sim, noised, rounds=2)


def test_a_layer_that_is_called_statistics_is_a_layer():
    params = {"statistics": {"kernel": jnp.ones(2)}, "out": jnp.zeros(2)}
    model = fjs.Model(lambda key: params, lambda p, x: x @ p["statistics"]["kernel"] + p["out"][:1])
    algorithm = fjs.fedavg(squared(model))
    hparams = fjs.Hyperparameters(server_learning_rate=0.5).as_arrays()
    shared, _ = algorithm.init(jax.random.key(0), hparams)
    release = jax.tree.map(lambda leaf: jnp.full_like(leaf, 4.0), params)
    found = algorithm.server(shared, release, hparams, jnp.int32(0)).params
    np.testing.assert_allclose(found["statistics"]["kernel"], 3.0)  # 1 + 0.5 · 4
    with pytest.raises(ValueError, match="normalization layers"):
        fjs.fedbn(squared(model))


@pytest.mark.thorough
def test_equinox_keeps_its_state():
    sim = simulation(fjs.local, equinox(), mechanism=fjs.no_release())
    hparams = sim.hyperparameters(learning_rate=ETA)
    state, _ = sim.round(sim.init(0, hparams), hparams)
    kept = state.personal["statistics"]["bn"]
    np.testing.assert_array_equal(kept["batch_counter"], 2)
    # The second client's batches are full: those of the first are filled up with its rows in turn.
    x = clients()[1]["x"]
    mean = (1 - MOMENTUM**2) * x.mean(0)
    var = MOMENTUM**2 + (1 - MOMENTUM**2) * x.var(0)
    np.testing.assert_allclose(kept["batch_state_index"][0][1], mean, rtol=1e-5)
    np.testing.assert_allclose(kept["batch_state_index"][1][1], var, rtol=1e-5)
    model, params = equinox(), jax.tree.map(lambda leaf: leaf[1], state.personal)
    debiased = (x - mean / (1 - MOMENTUM**2)) / np.sqrt(var / (1 - MOMENTUM**2) + EPS)
    expected = params["bn"]["weight"] * debiased + params["bn"]["bias"]
    expected = expected @ params["out"]["weight"].T + params["out"]["bias"]
    np.testing.assert_allclose(model.apply(params, jnp.float32(x)), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [linen, equinox])
def test_layers_with_statistics_are_personal_whatever_their_name(make):
    sim = simulation(fjs.fedbn, make())
    state = jax.eval_shape(sim.program.init, jax.random.key(0), sim.hyperparameters())
    assert set(jax.tree.leaves(state.shared.trunk.params["bn"])) == set()
    assert len(jax.tree.leaves(state.personal["bn"])) == 2


def test_an_algorithm_that_would_send_statistics_is_refused():
    sim = simulation(fjs.qffl, linen())
    with pytest.raises(ValueError, match="running statistics"):
        sim.init(0, sim.hyperparameters())
    # Those that average them do it without noise and clipping.
    sim = simulation(fjs.fedavg, linen())
    for values in ({"clip": 1.0}, {"clip": 1.0, "noise_multiplier": 1.0}):
        with pytest.raises(ValueError, match=r"GroupNorm .*models\.trainable.*fedbn"):
            sim.init(0, sim.hyperparameters(**values))

    # Statistics of rows without noise are nothing that examples could be private in.
    def private(task):
        return fjs.fedbn(fjs.private_examples(task))

    with pytest.raises(ValueError, match="without noise"):
        simulation(private, linen())
    # An algorithm of layers keeps them wherever the head is.
    sim = simulation(functools.partial(fjs.dpfedmtl, head="out"), linen())
    sim.init(0, sim.hyperparameters())


@pytest.mark.thorough
def test_statistics_of_no_rows_and_of_half_precision_are_numbers():
    model = linen()
    params, x = model.init(jax.random.key(0)), jnp.ones((3, 2))
    half = in_bfloat16(model).train
    assert model.train is not None
    assert half is not None
    _, kept = model.train(params, x, jnp.zeros(3), None)
    assert np.isfinite(jax.tree.leaves(kept)).all()
    outputs, kept = half(params, x, jnp.ones(3), None)
    assert {leaf.dtype for leaf in (outputs, *jax.tree.leaves(kept))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(kept["bn"]["mean"], (1 - MOMENTUM) * np.ones(2), rtol=1e-6)
    assert trainable(model, lambda name: name.startswith("out"), params).train is None
