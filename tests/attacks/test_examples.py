"""Attacks on examples inside clients that once succeeded: refused, or at an ε that holds."""

import contextvars
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm
from support.problems import after

import fedjaxsim as fjs
from fedjaxsim.audit.bounds import of_scores
from fedjaxsim.data.minibatches import ExampleLeakError
from fedjaxsim.engine.evaluation import EvaluationPlan
from fedjaxsim.models.model import bind_weights
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import Examples, PrivacyLimit, PrivacySpend, Silos
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.privacy.mechanisms import noise_like

D = 4
W: Any = {"w": jnp.zeros(D)}


def exact_delta(mu, epsilon):
    """Of one Gaussian release of sensitivity μ (Balle and Wang 2018)."""
    first = norm.cdf(mu / 2 - epsilon / mu)
    return first - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))


def of_examples(found, adjacency="zero_out"):
    (guarantee,) = (g for g in found.guarantees if g.unit == "example" and g.adjacency == adjacency)
    return guarantee


def make_silos(counts, **settings):
    known = {"size": 10, "capacity": 48, "gradients": 1, "steps": 1, "epochs": None} | settings
    return Silos(tuple(counts), **known)


def charge(counts, z, rounds, **settings):
    event, m = Examples(silos=make_silos(counts, **settings)), len(counts)
    return PrivacySpend(SamplingScheme("full", m, m), event, (Entry(z, 1.0, rounds),))


def linear(scale=lambda: 1.0):
    return fjs.Model(
        init=lambda key: {"w": jnp.zeros(D)},
        apply=lambda p, x: scale() * (x @ p["w"])[:, None],
    )


def run(client, task, personal=W, clients=50, **settings):
    """The state and the report of one round, and the sums of clipped gradients of the rows."""
    rng = np.random.default_rng(0)
    rows = [
        {"x": rng.normal(size=(8, D)).astype(np.float32), "y": np.ones(8, np.float32)}
        for _ in range(clients)
    ]
    algorithm = fjs.Algorithm(
        lambda key, hparams: ((), personal), client, lambda s, r, h, t: s,
        lambda s, p, h, c: W, task,
    )  # fmt: skip
    population = fjs.data.Population.from_clients(rows)
    sim = fjs.Simulation(
        algorithm, population, fjs.full_participation(), fjs.Minibatches(8, steps=1),
        fjs.no_release(),
    )  # fmt: skip
    hparams = sim.hyperparameters()
    state, _ = sim.round(sim.init(3, hparams), hparams)
    return sim, state


def twice(first, second):
    """A client that takes the difference of two gradients of one minibatch."""

    def client(shared, personal, data, hparams, context):
        def step(carry, batch):
            return jax.tree.map(jnp.subtract, first(batch), second(batch))

        return data.fold(step, personal), (), {}

    return client


def test_the_delta_beside_an_epsilon_is_that_of_the_worst_client():
    """40,000 silos of one row beside one of 5,000: (1, 2e-5) was said, and (1, 0.1) is true."""
    n, rounds = (1, 5000), 10
    from fedjaxsim.privacy.calibration import equal_example_noise

    noise = equal_example_noise(make_silos(n), 1.0, rounds)
    found = report([charge(n, 1.0, rounds, noise=noise)], 1e-3)
    guarantee, z = of_examples(found), dict(noise)[1]
    assert guarantee.epsilon is not None
    true = exact_delta(math.sqrt(rounds) / z, guarantee.epsilon)
    assert 0.09 < true <= guarantee.delta * (1 + 1e-9) <= 0.1 * (1 + 1e-6)
    assert any(s.startswith("Warning: 1 clients have one or two") for s in guarantee.assumptions)
    assert found.to_json()["example"]["clients"]["delta"] == [0.1, 2e-5]


@pytest.mark.thorough
def test_two_gradients_of_other_types_have_noise_of_their_own():
    """Float32 and bfloat16 zeros have equal bits; once that gave both the same noise."""
    task = fjs.private_examples(fjs.tasks.squared(linear()), epsilon=0.5, rounds=1)
    narrow = {"w": jnp.zeros(D, jnp.bfloat16)}
    sim, state = run(
        twice(
            lambda batch: task.gradient(W, batch),
            lambda batch: jax.tree.map(
                lambda g: g.astype(jnp.float32), task.gradient(narrow, batch)
            ),
        ),
        task,
    )
    assert_noised(sim, state, 0.0)


@pytest.mark.thorough
def test_gradients_of_one_loss_under_another_setting_have_noise_of_their_own():
    """The loss reads a context variable; once both gradients had the same noise."""
    scale = contextvars.ContextVar("scale", default=1.0)
    task = fjs.private_examples(fjs.tasks.squared(linear(scale.get)), epsilon=0.5, rounds=1)

    def at(value, batch):
        token = scale.set(value)
        try:
            return task.gradient(W, batch)
        finally:
            scale.reset(token)

    sim, state = run(twice(lambda b: at(1.0, b), lambda b: at(-1.0, b)), task)
    assert_noised(sim, state, 2.0)


@pytest.mark.thorough
def test_gradients_of_two_frozen_parts_have_noise_of_their_own():
    whole = fjs.Model(init=None, apply=lambda p, x: (x @ p["body"] @ p["w"])[:, None])  # type: ignore[arg-type]
    weights = {"body": jnp.eye(D), "w": jnp.zeros(D)}
    model = fjs.models.trainable(whole, lambda name: name == "w", weights)
    task = fjs.private_examples(fjs.tasks.squared(model), epsilon=0.5, rounds=1)
    at = {"body": None, "w": jnp.zeros(D)}

    def other(batch):
        assert task.frozen is not None
        with bind_weights(task.frozen, {k: -v for k, v in task.frozen.argument.get().items()}):
            return {"w": task.gradient(at, batch)["w"]}

    sim, state = run(twice(lambda b: {"w": task.gradient(at, b)["w"]}, other), task)
    assert_noised(sim, state, 2.0)


def assert_noised(sim, state, weight):
    """Two gradients are charged, and the difference of both has the noise of two releases.

    Each row has the gradient −x, clipped to 1; `weight` times their mean is the difference.
    """
    silos = sim.examples.silos
    assert silos.gradients == 2
    x = sim.population.fields["x"].reshape(-1, 8, D)
    clipped = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1)
    left = np.asarray(state.personal["w"]) + weight * clipped.mean(1)
    spread = math.sqrt(2) * dict(silos.noise)[8] / 8
    # Of 200 numbers: five standard errors.
    assert abs(left.std() / spread - 1) < 5 / math.sqrt(2 * left.size)


def test_a_gradient_compiled_beside_the_algorithm_is_refused():
    """Once it kept the zeros of a check, and trained nothing."""
    task = fjs.private_examples(fjs.tasks.squared(linear()), epsilon=8.0, rounds=1)
    gradient = jax.jit(jax.grad(task.loss))

    def client(shared, personal, data, hparams, context):
        return data.fold(lambda w, batch: gradient(w, batch), personal), (), {}

    with pytest.raises((ExampleLeakError, TypeError), match=r"ProtectedBatch|protected examples"):
        run(client, task)


def test_a_released_evaluation_is_charged_to_examples():
    """A metric that tells an example apart 60 of 60 times once left its ε at 1."""
    z, rows = 0.2, {"x": np.ones((10, D), np.float32), "y": np.arange(10, dtype=np.float32)}
    population = fjs.data.split(fjs.data.Population.from_clients([rows] * 10), validation=0.1)
    task = fjs.private_examples(fjs.tasks.squared(linear()), epsilon=1.0, rounds=1)
    sim = fjs.Simulation(
        fjs.local(task), population, fjs.full_participation(), fjs.Minibatches(9, steps=1),
        fjs.no_release(),
    )  # fmt: skip
    hparams, plan = sim.hyperparameters(learning_rate=1e-6), EvaluationPlan(z, "loss", 1.0)
    state, _ = sim.run(sim.init(0, hparams), hparams, 1, evaluate_privately=plan)
    for adjacency in ("zero_out", "replace"):
        found = of_examples(sim.guarantee(state), adjacency)
        assert found.epsilon is not None
        # The evaluation alone is a Gaussian release of sensitivity 1.
        assert exact_delta(1 / z, found.epsilon) <= found.delta
        assert found.epsilon > 10


def test_examples_of_a_run_that_may_stop_are_charged_for_what_was_planned():
    """ε of the rounds done, at a stop that follows from releases, is met with 3.2 δ."""
    done, planned, z = 100, 400, 30.0
    limit = PrivacyLimit(20.0, 1e-3, ())
    unknown = of_examples(report([charge([10], z, done)], 1e-3, limit=limit))
    assert unknown.epsilon is None
    assert "planned is not known" in unknown.reason
    stopped = report([charge([10], z, done)], 1e-3, limit=limit, left=planned - done)
    whole = report([charge([10], z, planned)], 1e-3)
    assert of_examples(stopped).epsilon == of_examples(whole).epsilon
    early = of_examples(report([charge([10], z, done)], 1e-3)).epsilon
    full = of_examples(whole).epsilon
    assert early is not None
    assert full is not None
    assert early < 0.6 * full


def test_rounds_left_of_a_stage_have_the_least_noise_of_any_stage():
    """The first and the third stage had z = 2; five rounds of it were said to have z = 20."""
    spent = charge([10], 2.0, 3)
    [entry] = spent.entries
    stages = spent._replace(entries=(entry, Entry(20.0, 1.0, 3)))
    all_rounds = spent._replace(entries=(entry._replace(rounds=3 + 5), Entry(20.0, 1.0, 3)))
    stopped, whole = report([stages], 1e-3, left=5), report([all_rounds], 1e-3)
    assert of_examples(stopped).epsilon == of_examples(whole).epsilon
    begins = charge([10], 2.0, 0, size=5)._replace(entries=())
    unknown = of_examples(report([spent, begins], 1e-3, left=5))
    assert unknown.epsilon is None
    assert "not known" in unknown.reason


def one_example(target, devices, z):
    """The models of two clients after a step, if the last row of the first has this target."""
    rows = [{"x": np.ones((8, D), np.float32), "y": np.zeros(8, np.float32)} for _ in range(2)]
    rows[0]["y"][-1] = target
    task = fjs.private_examples(fjs.tasks.squared(linear()))
    task = task._replace(examples=dataclasses.replace(task.examples, most_at_once=4))
    sim = fjs.Simulation(
        fjs.local(task), fjs.data.Population.from_clients(rows), fjs.full_participation(),
        fjs.Minibatches(8, steps=1), fjs.no_release(), devices=devices,
    )  # fmt: skip
    hparams = sim.hyperparameters(learning_rate=8.0, example_clip=0.25, example_noise_multiplier=z)
    return np.asarray(after(sim, hparams, 1, seed=3).personal["w"], np.float64)[:2]


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
def test_one_example_moves_its_own_model_by_c_on_any_number_of_devices(devices):
    """Rate 1 and learning rate b: the step is the sum, and the noise is the same in both runs."""
    with_it, without = (one_example(y, jax.devices()[:devices], 1e-3) for y in (1e6, 0.0))
    moved = np.linalg.norm(with_it - without, axis=1)
    assert 0.2499 < moved[0] <= 0.25 * (1 + 1e-6)
    assert moved[1] == 0


@pytest.mark.thorough
def test_no_noise_meets_two_gradients_in_stages_after_a_kill_or_in_repeated_epochs(tmp_path):
    """Their difference would be a gradient without noise."""
    seen: dict[bytes, set[bytes]] = {}

    def see(key, total):
        seen.setdefault(np.asarray(key).tobytes(), set()).add(np.asarray(total).tobytes())

    def noise(key, total, scale):
        flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(total)])
        jax.debug.callback(see, jax.random.key_data(key), flat)
        return noise_like(key, total, scale)

    rng = np.random.default_rng(0)
    rows = [
        {"x": rng.normal(size=(8, D)).astype(np.float32), "y": np.ones(8, np.float32)}
        for _ in range(4)
    ]
    task = fjs.private_examples(fjs.tasks.squared(linear()))

    def simulation(algorithm) -> Any:
        return fjs.Simulation(
            algorithm(task), fjs.data.Population.from_clients(rows), fjs.full_participation(),
            fjs.Minibatches(4, epochs=1), unchecked=True,
        )  # fmt: skip

    def values(sim):
        known = {"learning_rate": 0.1, "example_noise_multiplier": 1.0, "local_epochs": 2}
        return sim.hyperparameters(**{k: v for k, v in known.items() if k in sim.records})

    def one_round(sim, state, new):
        before = len(seen)
        state, _ = sim.run(state, values(sim), 1)
        jax.block_until_ready(state)
        jax.effects_barrier()
        assert len(seen) - before == new
        assert {len(totals) for totals in seen.values()} == {1}
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedjaxsim.privacy.private_examples.noise_like", noise)
        ditto, fedavg = map(simulation, (fjs.ditto, fjs.fedavg))
        h = values(ditto)
        each = 4 * 2 * ditto.examples.silos.gradients  # clients, minibatches, gradients
        first = one_round(ditto, ditto.init(0, h), each)
        fjs.callbacks.Checkpoints(tmp_path).save(first)
        second = one_round(ditto, first, each)
        one_round(ditto, fjs.callbacks.Checkpoints(tmp_path).restore(ditto.init(0, h)), 0)
        stage = one_round(ditto, ditto.start_from(second, h), each)
        one_round(ditto, ditto.start_from(ditto.start_from(second, h), h), each)
        one_round(fedavg, fedavg.start_from(stage, values(fedavg), ditto, h), 4 * 2)


@pytest.mark.thorough
@pytest.mark.parametrize("reused", [False, True])
def test_canaries_over_two_stages_refute_noise_that_both_share(reused):
    """The second stage has half the clip norm: noise of the first one, doubled, would cancel."""
    canaries, delta, rate = 200, 1e-3, 200.0
    present = np.random.default_rng(0).integers(0, 2, canaries).astype(np.float32)
    model = fjs.Model(
        init=lambda key: {"w": jnp.zeros(canaries)}, apply=lambda p, x: (x @ p["w"])[:, None]
    )
    task = fjs.tasks.squared(model)._replace(
        loss=lambda p, batch: batch.mean(-0.5 * batch.fields["y"] * (batch.fields["x"] @ p["w"]))
    )
    population = fjs.data.Population.from_clients([{"x": np.eye(canaries), "y": present}])
    sim = fjs.Simulation(
        fjs.local(fjs.private_examples(task, delta=delta)), population,
        fjs.full_participation(), fjs.Minibatches(canaries, steps=1), fjs.no_release(),
    )  # fmt: skip

    def stage(state, clip):
        hparams = sim.hyperparameters(
            learning_rate=rate, example_clip=clip, example_noise_multiplier=4.0
        )
        before = 0.0 if state is None else np.asarray(state.personal["w"])[0]
        state = sim.init(0, hparams) if state is None else sim.start_from(state, hparams)
        state, _ = sim.run(state, hparams, 1)
        return state, (np.asarray(state.personal["w"])[0] - before) * canaries / rate

    def same(key, total, scale):
        return noise_like(jax.random.key(7, impl="threefry2x32"), total, scale)

    with pytest.MonkeyPatch.context() as patch:
        if reused:
            patch.setattr("fedjaxsim.privacy.private_examples.noise_like", same)
        state, first = stage(None, 1.0)
        state, second = stage(state, 0.5)
    claimed = of_examples(sim.guarantee(state)).epsilon
    assert claimed is not None
    found = max(
        of_scores(score, present > 0, delta).epsilon
        for score in (first + 2 * second, 2 * second - first)
    )
    assert (found > claimed) == reused
