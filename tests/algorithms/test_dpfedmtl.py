"""DPFedMTL: by hand, against plain loops, its noise as published, and what stays with a client."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import classification, read_by

import fedjaxsim as fjs
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.dpfedmtl import dpfedmtl, dpfedmtl_as_published, fedper, fedrep
from fedjaxsim.algorithms.layers import paths_of
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.hyperparameters import compose, fill
from fedjaxsim.models import cnn, mlp
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.mechanisms.sums import plain_mean
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config, table_of, unread
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks import softmax
from fedjaxsim.tasks.task import Task
from fedjaxsim.testing import check_billboard

THOROUGH = pytest.mark.thorough
CLIENTS, LINEAR = classification([10, 12, 14, 9])


@functools.cache
def network():
    return softmax(mlp((4,), 3, hidden=(5,)), 3)


def batches(steps):
    """So many steps on all of a client's rows."""
    return Minibatches(100, epochs=steps)


# --- what is computed -----------------------------------------------------------------------------


def product_of_two():
    """Parameters a and b, one row y per client, loss (ab − y)²/2, at first a = b = 1."""

    def residual(params, batch):
        return params["a"] * params["b"] - batch.fields["y"]

    return Task(
        init=lambda key: {"a": jnp.ones(()), "b": jnp.ones(())},
        loss=lambda params, batch: batch.mean(residual(params, batch) ** 2) / 2,
        metrics=lambda params, batch: {"squared_error": residual(params, batch) ** 2},
    )


@pytest.mark.parametrize(
    ("factory", "steps", "tau", "clip", "trunk", "heads"),
    [
        # η = 1/2, y = 3 and 5. From (1, 1) the residuals are −2 and −4: (a, b) = (2, 2) and (3, 3).
        pytest.param(fedper, 1, {}, np.inf, (2 + 3) / 2, [2, 3], marks=THOROUGH),
        # Then they are 1 and 4: a − 1/2·1·2 = 1, and 3 − 1/2·4·3 = −3; b is a.
        pytest.param(dpfedmtl, 2, {}, np.inf, (1 - 3) / 2, [1, -3], marks=THOROUGH),
        # The copies moved by 0 and −4, of which −1 is left.
        (dpfedmtl, 2, {}, 1.0, 1 + (0 - 1) / 2, [1, -3]),
        # b first, with a = 1: 2 and 3. The residuals are −1 and −2: a = 1 + 1/2·1·2, 1 + 1/2·2·3.
        pytest.param(fedrep, 1, {}, np.inf, (2 + 4) / 2, [2, 3], marks=THOROUGH),
        # b halves its distance to y twice: 2.5 and 4. Then a, with residuals −1/2 and 17/16 of the
        # first client and −1 and 7 of the second: 1, 13/8, 19/64 and 1, 3, −11.
        pytest.param(fedrep, 2, {}, np.inf, (19 / 64 - 11) / 2, [2.5, 4], marks=THOROUGH),
        # τ = 2 and one epoch of the trunk.
        (fedrep, 1, {"head_epochs": 2}, np.inf, (13 / 8 + 3) / 2, [2.5, 4]),
    ],
)
def test_a_round_is_worked_by_hand(factory, steps, tau, clip, trunk, heads):
    with jax.enable_x64(True):
        population = Population.from_clients([{"y": np.array([y])} for y in (3.0, 5.0)])
        algorithm = factory(product_of_two(), head="b", **tau)
        sim = Simulation(algorithm, population, full_participation(), Minibatches(1, epochs=steps))
        hparams = sim.hyperparameters(learning_rate=0.5, clip=clip)
        state, _ = sim.round(sim.init(0, hparams), hparams)
        np.testing.assert_allclose(state.shared.trunk.params["a"], trunk, rtol=1e-12)
        np.testing.assert_allclose(state.personal["b"], heads, rtol=1e-12)
        assert state.shared.trunk.params["b"] is None
        assert state.personal["a"] is None


def momentum(learning_rate):
    return optax.sgd(learning_rate, momentum=0.5)


def gradient(parts, x, y):
    """Of the mean cross-entropy of a network with one hidden layer: (kernel, bias) of each part."""
    trunk, head = parts
    hidden = np.maximum(x @ trunk[0] + trunk[1], 0)
    outputs = hidden @ head[0] + head[1]
    error = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True) - np.eye(3)[y]
    error /= len(y)
    below = (error @ head[0].T) * (hidden > 0)
    return [x.T @ below, below.sum(axis=0)], [hidden.T @ error, error.sum(axis=0)]


@pytest.mark.thorough
@pytest.mark.parametrize("factory", [dpfedmtl, fedrep])
def test_without_noise_it_is_fedper_and_fedrep_written_in_numpy(factory):
    # Arivazhagan et al. 2019 and Collins et al. 2021, with momentum, H = 3 and two rounds.
    algorithm = factory(network(), local_optimizer=optimizers.local(momentum))
    sim = Simulation(algorithm, CLIENTS, full_participation(), batches(3))
    hparams = sim.hyperparameters(learning_rate=0.3)
    state = sim.init(0, hparams)
    trunk = layer(state.shared.trunk.params["Dense_0"])
    heads = [[leaf[k] for leaf in layer(state.personal["Dense_1"])] for k in range(4)]

    def steps(parts, moving, x, y):
        velocity = [0.0] * 4
        for _ in range(3):
            both = [g for part in gradient(parts, x, y) for g in part]
            velocity = [g + 0.5 * v for g, v in zip(both, velocity, strict=True)]
            moves = [velocity[:2], velocity[2:]]
            parts = [
                [w - 0.3 * v for w, v in zip(part, move, strict=True)] if index in moving else part
                for index, (part, move) in enumerate(zip(parts, moves, strict=True))
            ]
        return parts

    for _ in range(2):
        copies = []
        for k in range(4):
            rows = CLIENTS.rows(k, "train")
            parts = [trunk, heads[k]]
            for moving in [(0, 1)] if factory is dpfedmtl else [(1,), (0,)]:
                parts = steps(parts, moving, rows["x"], rows["y"])
            copies.append(parts[0])
            heads[k] = parts[1]
        trunk = [np.mean(leaves, axis=0) for leaves in zip(*copies, strict=True)]
        state, _ = sim.round(state, hparams)
    expected = [*trunk, *(np.stack(leaves) for leaves in zip(*heads, strict=True))]
    found = [*layer(state.shared.trunk.params["Dense_0"]), *layer(state.personal["Dense_1"])]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def layer(params):
    return [np.asarray(params[name], np.float64) for name in ("kernel", "bias")]


def test_the_papers_cnn_splits_at_its_output_layer():
    algorithm = dpfedmtl(softmax(cnn((28, 28), 62), 62))
    hparams = fill(compose([algorithm.hyperparameters]), {})
    shared, head = jax.eval_shape(algorithm.init, jax.random.key(0), hparams.as_arrays())
    assert paths_of(head) == ["Dense_0/bias", "Dense_0/kernel"]
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(part)) for part in (shared.trunk.params, head)
    ]
    assert sizes == [832 + 51_264, 63_550]


# --- noise as published ---------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_map", ["vmap", pytest.param("scan", marks=THOROUGH)])
@pytest.mark.usefixtures("exact_noise")
def test_noise_as_published_has_the_mean_and_the_variance_of_equation_3(chunk_map):
    # The trunk's gradient is v everywhere, of norm 4, so clip(v) = v/2. After H steps of each of K
    # clients the trunk has mean −ηHv/2 and variance η²·H·(σS)²/K, if all draws are independent.
    d, steps, rate, clip, sigma, p = 4000, 3, 0.1, 2.0, 0.7, 0.5
    v = np.full(d, 4 / np.sqrt(d), np.float32)
    task = Task(
        init=lambda key: {"trunk": jnp.zeros(d), "head": jnp.zeros(2)},
        loss=lambda params, batch: params["trunk"] @ v + jnp.sum(params["head"]),
        metrics=lambda params, batch: {"squared_error": batch.weight},
    )
    sim = Simulation(
        dpfedmtl_as_published(task, head="head"),
        CLIENTS,
        poisson(p),
        batches(steps),
        plain_mean(),
        chunk_size=2,
        chunk_map=chunk_map,
    )
    hparams = sim.hyperparameters(
        learning_rate=rate, clip=clip, noise_multiplier=sigma, sampling_rate=p
    )
    state, metrics = sim.round(sim.init(1, hparams), hparams)
    present = int(metrics["participants"])
    assert present > 1
    moved = np.asarray(state.shared.trunk.params["trunk"], np.float64)
    expected = rate * sigma * 2 * clip * p * np.sqrt(steps / present)
    noise = (moved + rate * steps * v / 2) / expected
    assert abs(noise.mean()) < 5 / np.sqrt(d)
    assert abs(noise.std() - 1) < 5 / np.sqrt(2 * d)
    # The head's gradient is plain.
    heads = np.asarray(state.personal["head"])
    np.testing.assert_allclose(heads[np.any(heads != 0, axis=1)], [[-rate * steps] * 2] * present)


def test_the_sound_default_costs_what_fedavg_does_and_the_published_noise_has_no_epsilon():
    plain, central, published = (
        Simulation(algorithm, CLIENTS, poisson(1.0), Minibatches(4, steps=1), mechanism)
        for algorithm, mechanism in (
            (fjs.fedavg(LINEAR), gaussian()),
            (dpfedmtl(LINEAR, head="bias"), gaussian()),
            (dpfedmtl_as_published(LINEAR, head="bias"), plain_mean()),
        )
    )
    # A report is made of the sampler, the event and the charges, which planned rounds have, too.
    assert central.mechanism.event == plain.mechanism.event
    z = [
        sim.calibrate(
            read_by(sim, clip=0.2, sampling_rate=0.6), epsilon=3.0, rounds=2, delta=1e-3
        ).noise_multiplier
        for sim in (plain, central)
    ]
    assert z[0] == z[1] > 0
    values = {"clip": 0.2, "noise_multiplier": 0.5, "sampling_rate": 0.6}
    found = report([published.planned(read_by(published, **values), 0, 1)], 1e-3)
    assert len(found.guarantees) > 0
    assert all(guarantee.epsilon is None for guarantee in found.guarantees)


# --- what stays with a client ---------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("factory", [dpfedmtl, fedrep])
def test_a_head_never_leaves_its_client(factory):
    sim = Simulation(factory(network()), CLIENTS, full_participation(), batches(1))
    hparams = sim.hyperparameters(learning_rate=0.3, clip=0.5, noise_multiplier=0.1)
    message = sim.message_shapes(jax.random.key(0), hparams.as_arrays())
    assert paths_of(message) == ["Dense_0/bias", "Dense_0/kernel"]
    check_billboard(sim, hparams, rounds=2, clients=[1])


@pytest.mark.thorough
def test_stages_hand_over_the_trunk_and_each_clients_own_head():
    sims = [
        Simulation(factory(network()), CLIENTS, full_participation(), batches(1))
        for factory in (dpfedmtl, pmtl)
    ]
    ours, theirs = sims
    hparams, their_hparams = (read_by(sim, learning_rate=0.3, lam=0.0) for sim in sims)
    head = jax.tree.map(np.array, ours.init(0, hparams).shared.head)
    state, _ = ours.run(ours.init(0, hparams), hparams, 2)
    other = theirs.start_from(state, their_hparams, ours, hparams)
    # What was published: the trunk, with the head that all began with.
    for found, layer in [(state.shared.trunk.params, "Dense_0"), (head, "Dense_1")]:
        for a, b in zip(
            jax.tree.leaves(other.shared.params[layer]), jax.tree.leaves(found), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    back = ours.start_from(other, hparams, theirs, their_hparams)
    for found, expected in [
        (other.personal["Dense_1"], state.personal["Dense_1"]),
        (back.personal, state.personal),
        (back.shared.trunk.params, state.shared.trunk.params),
        (back.shared.head, head),
    ]:
        chex.assert_trees_all_equal(found, expected)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (None, "head"),
        (["kernel", "bias"], "trunk"),
        (lambda path: True, "trunk"),
        (lambda path: False, "predicate"),
        ("Dense_7", "Dense_7"),
        (["bias", "kern"], "kern"),
    ],
)
def test_a_split_that_leaves_a_part_empty_is_refused_at_once(head, message):
    for factory in (dpfedmtl, dpfedmtl_as_published):
        with pytest.raises(ValueError, match=message):
            factory(LINEAR, head=head)


def test_other_bad_input_is_refused():
    with pytest.raises(ValueError, match="steps"):
        Minibatches(4, steps=0)
    algorithm = dpfedmtl_as_published(network())
    sim = Simulation(algorithm, CLIENTS, full_participation(), batches(1), plain_mean())
    with pytest.raises(ValueError, match="clip"):
        sim.init(0, sim.hyperparameters(noise_multiplier=1.0))


# --- as a run -------------------------------------------------------------------------------------


def config(algorithm="dpfedmtl-as-published", **settings):
    return run_config(algorithm=algorithm, data="synthetic", loss="squared", clients=5, **settings)


def without_effect(names, algorithm="dpfedmtl-as-published", **parts):
    """Why settings have no effect on a run with these parts."""
    return unread(names, table_of({"algorithm": algorithm, "data": "synthetic", **parts}))


def test_a_run_reads_head_clip_and_noise():
    prepared = prepare(config(head=("bias",), clip=2.0, noise_multiplier=0.4))
    assert (prepared.hparams.clip, prepared.hparams.noise_multiplier) == (2.0, 0.4)
    message = prepared.simulation.message_shapes(jax.random.key(0), prepared.hparams.as_arrays())
    assert paths_of(message) == ["kernel"]
    # Without noise nothing is clipped, as elsewhere.
    assert prepare(config(head=("bias",))).hparams.clip == np.inf
    assert without_effect(["clip", "noise_multiplier", "head"]) == []
    assert without_effect(["clip", "epsilon"], mechanism="gaussian") == []
    assert without_effect(["clip"], "pmtl", mechanism="plain-mean") != []
    assert "only with dpfedmtl" in without_effect(["head"], "pmtl")[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "dpfedmtl"}, "head"),
        ({"head": ("bias", "kernel")}, "trunk"),
        ({"head": ("bias",), "epsilon": 1.0}, "epsilon"),
    ],
)
def test_runs_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        prepare(config(**settings))
