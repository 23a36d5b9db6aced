"""Hyperparameters: composed of what a simulation's parts read, filled, checked, transformed."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import designs, every_system, least_squares, simulation_of

import fedjaxsim as fjs
from fedjaxsim.algorithms.optimizers import LEARNING_RATE, SERVER_LEARNING_RATE
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.factories import CommandLineText, import_factory, make, settings_of
from fedjaxsim.gradients.modes import Forward
from fedjaxsim.gradients.whole_run import hypergradient, mean_metric
from fedjaxsim.hyperparameters import (
    USUAL_STEP,
    Default,
    Hyperparameter,
    Hyperparameters,
    compose,
    declared_by,
    fill,
    on_host,
    reads,
)
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.choices import MECHANISMS, SAMPLERS
from fedjaxsim.privacy.mechanisms import CLIP_NORM, NOISE_MULTIPLIER
from fedjaxsim.privacy.mechanisms.sums import adaptive_clipping
from fedjaxsim.runs import settings
from fedjaxsim.tasks.task import softmax

POPULATION, TASK = least_squares([4, 5, 6], features=2)
NOISE = {"clip", "noise_multiplier"}
DERIVED = {Default.STEP: USUAL_STEP}  # a rate that follows is 1: all take part
RATE, WEIGHT = Hyperparameter("rate", 0.5), Hyperparameter("weight", help="of the penalty.")


def simulation(algorithm, sampling=None, mechanism=fjs.gaussian()):
    steps = fjs.Minibatches(2, steps=1)
    sampling = sampling or fjs.full_participation()
    return fjs.Simulation(algorithm, POPULATION, sampling, steps, mechanism)


# --- which ones a simulation has ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "sampling", "mechanism", "expected"),
    [
        (fjs.fedavg(TASK), None, fjs.gaussian(), {"learning_rate", "server_learning_rate", *NOISE}),
        (
            fjs.fedprox(TASK),
            fjs.poisson(0.3),
            fjs.gaussian(),
            {"learning_rate", "server_learning_rate", "mu", "sampling_rate", *NOISE},
        ),
        (fjs.local(TASK), None, fjs.no_release(), {"learning_rate"}),
        (
            fjs.pmtl(TASK),
            None,
            adaptive_clipping(),
            {
                *("learning_rate", "server_learning_rate", "lam"),
                *("target_quantile", "clip_learning_rate", "count_noise"),
                *NOISE,
            },
        ),
    ],
    ids=["fedavg", "poisson", "nothing sent", "adaptive"],
)
def test_a_simulation_has_those_that_its_parts_read(algorithm, sampling, mechanism, expected):
    sim = simulation(algorithm, sampling, mechanism)
    assert set(sim.records) == set(sim.hyperparameters()) == expected
    defaults = {
        name: DERIVED.get(record.default, 1.0)
        if isinstance(record.default, Default)
        else record.default
        for name, record in sim.records.items()
    }
    assert {name: getattr(sim.hyperparameters(), name) for name in sim.records} == defaults


def test_a_sampling_rate_that_is_not_given_is_that_of_the_sampler():
    sim = simulation(fjs.fedavg(TASK), fjs.poisson(0.3))
    assert sim.hyperparameters().sampling_rate == 0.3
    hparams = sim.check(sim.hyperparameters())
    assert float(sim.sampler.rate(hparams)) == pytest.approx(0.3, abs=1e-7)
    assert float(simulation(fjs.fedavg(TASK)).sampler.rate(Hyperparameters())) == 1.0


def names(part):
    return {record.name for record in part.hyperparameters}


def test_a_part_reads_what_its_arguments_ask_for():
    plain = {"learning_rate", "lam", "ridge", "clip"}
    for penalty, outliers in [("low-rank", set()), ("decomposed", {"lam2"})]:
        for protect, noise in [(False, set()), (True, {"message_epsilon"})]:
            part = fjs.mpmtl(TASK, penalty=penalty, protect_examples=protect)
            assert names(part) == plain | outliers | noise
            known = declared_by(fjs.mpmtl, penalty=penalty, protect_examples=protect)
            assert known == part.hyperparameters
    assert names(fjs.mpmtl(TASK, penalty="decomposed-group-sparse")) == plain | {"lam2"}
    penalties = {penalty: fjs.finetune(TASK, penalty=penalty) for penalty in ("mean", "kl", "ewc")}
    assert all(names(part) == {"learning_rate", "lam"} for part in penalties.values())
    assert names(fjs.finetune(TASK, penalty="vanilla")) == {"learning_rate"}


@pytest.mark.parametrize("name", every_system("pmtl", "mpmtl"))
def test_what_is_declared_is_what_is_read(name):
    # Without one of them a round cannot be traced, and a round reads no others.
    sim = simulation_of(
        name, TASK, POPULATION, fjs.poisson(0.5), fjs.Minibatches(2, steps=1), chunk_size=2
    )
    read = set()

    class Watched(Hyperparameters):
        def __getattr__(self, name):
            if name != "_values":
                read.add(name)
            return super().__getattr__(name)

    jax.tree_util.register_pytree_with_keys_class(Watched)
    values = sim.check(sim.hyperparameters())
    watched = Watched(**{name: getattr(values, name) for name in values})
    key = jax.random.key(0, impl="threefry2x32")
    state = jax.eval_shape(sim.program.init, key, watched)
    jax.eval_shape(sim.program.step, state, watched, sim.rows["train"])
    jax.eval_shape(sim.program.evaluate, state, watched, sim.rows["train"])
    assert read == set(sim.records)


@pytest.mark.parametrize("path", sorted({*MECHANISMS.values(), *SAMPLERS.values()}))
def test_a_factory_declares_before_it_is_called_what_its_part_has(path):
    settings: Any = {
        "fixed_size": {"cohort": 2},
        "fixed_groups": {"groups": 2},
        "random_allocation": {"every": 2},
        "cyclic": {"groups": 2},
        "per_part": {"parts": ("kernel", "bias")},
    }.get(path.split(":")[1], {})
    part = make(path, **settings)
    assert declared_by(import_factory(path), **settings) == part.hyperparameters


def test_every_system_declares_before_it_is_called_what_its_algorithm_has():
    for system in SYSTEMS.values():
        settings = {"head": "bias"} if "head" in settings_of(import_factory(system.factory)) else {}
        task = softmax(linear((2,), 3), 3) if system.softmax else TASK
        algorithm = system.make(task, 3, **settings)
        assert declared_by(import_factory(system.factory), **settings) == algorithm.hyperparameters
        assert "learning_rate" in {record.name for record in algorithm.hyperparameters}


def test_a_name_is_no_declaration():
    with pytest.raises(ValueError, match=r"such as fjs.Hyperparameter\('clip', 0.1\), got 'clip'"):
        reads("clip")  # type: ignore[arg-type]


def test_an_algorithm_of_ones_own_declares_what_it_reads():
    @reads(RATE, lambda heavy, **_: (WEIGHT,) if heavy else ())
    def mine(task, *, heavy=False):
        return fjs.fedavg(task)

    assert mine(TASK).hyperparameters == (RATE,)
    assert mine(TASK, heavy=True).hyperparameters == (RATE, WEIGHT)
    assert declared_by(mine) == (RATE,)
    assert declared_by(mine, heavy=True) == (RATE, WEIGHT)
    assert declared_by(lambda task: task) == ()

    @reads(mine, CLIP_NORM)
    def on_mine(task, heavy=True):
        return mine(task, heavy=heavy)

    assert declared_by(on_mine) == (RATE, WEIGHT, CLIP_NORM)
    assert on_mine(TASK, heavy=False).hyperparameters == (RATE, CLIP_NORM)
    sim = simulation(mine(TASK, heavy=True))
    assert set(sim.hyperparameters(weight=2.0)) == {"rate", "weight", *NOISE}


def test_two_parts_may_share_a_record_but_not_a_name():
    shared = compose([(RATE, CLIP_NORM), (CLIP_NORM, NOISE_MULTIPLIER), ()])
    assert list(shared) == ["rate", "clip", "noise_multiplier"]
    other = Hyperparameter("clip", 1.0)
    algorithm = fjs.fedavg(TASK)
    clashing = algorithm._replace(hyperparameters=(*algorithm.hyperparameters, other))
    for clash in (lambda: compose([(CLIP_NORM,), (other,)]), lambda: simulation(clashing)):
        with pytest.raises(ValueError, match="clip"):
            clash()


# --- values and refusals --------------------------------------------------------------------------


def test_defaults_fill_what_is_not_given():
    hparams = fill(compose([(RATE, WEIGHT)]), {"weight": 2.0})
    assert (hparams.rate, hparams.weight) == (0.5, 2.0)
    assert list(hparams) == ["rate", "weight"]
    assert "rate" in hparams
    assert "lam" not in hparams
    assert (hparams.get("weight"), hparams.get("lam"), hparams.get("lam", 3.0)) == (2.0, None, 3.0)


def test_a_default_in_words_is_none():
    with pytest.raises(ValueError, match=r"default of rate must be a number.*'0\.5'"):
        Hyperparameter("rate", default="0.5")  # pyright: ignore[reportArgumentType]


def test_values_are_compared_as_arrays_whatever_their_order():
    schedule = Hyperparameters(noise_multiplier=np.array([1.0, 2.0]), clip=1.0)
    assert schedule == Hyperparameters(clip=np.float64(1), noise_multiplier=[1.0, 2.0])
    assert schedule == schedule.as_arrays()
    for name, value in {"noise_multiplier": [1.0, 3.0], "clip": [1.0, 1.0]}.items():
        assert schedule != schedule.replace(**{name: value})
    assert schedule != Hyperparameters(clip=1.0)


def test_a_default_that_is_the_sampling_rate_follows_the_sampler():
    for sampling, given, wanted in [
        (fjs.poisson(0.3), {}, 0.3),
        (fjs.poisson(0.3), {"sampling_rate": 0.25}, 0.25),
        (fjs.poisson(0.3), {"server_learning_rate": 1.0}, 1.0),
        (fjs.privacy.fixed_size(cohort=2), {}, 2 / 3),
    ]:
        sim = simulation(fjs.pmtl(TASK, message="update"), sampling)
        hparams = sim.hyperparameters(**given)
        assert float(hparams.server_learning_rate) == pytest.approx(wanted)
    # The offset pulls w̃ back by itself: its step stays 1.
    offset = simulation(fjs.pmtl(TASK), fjs.poisson(0.3))
    assert offset.hyperparameters().server_learning_rate == 1.0


def test_an_unknown_name_is_refused_with_the_nearest_one():
    sim = simulation(fjs.fedavg(TASK))
    with pytest.raises(ValueError, match=r"got 'learning_rat' \(did you mean 'learning_rate'\?\)"):
        sim.hyperparameters(learning_rat=0.1)
    # FedAvg has no λ, and full participation no rate.
    for name in ("lam", "sampling_rate"):
        with pytest.raises(ValueError, match=name):
            sim.hyperparameters(**{name: 0.1})
    with pytest.raises(ValueError, match="'x'"):
        fill({}, {"x": 1.0})


def test_without_a_default_a_value_must_be_given():
    with pytest.raises(ValueError, match="weight"):
        fill(compose([(RATE, WEIGHT)]), {"rate": 0.1})


@pytest.mark.parametrize("value", [np.ones(3), [1.0, 2.0], jnp.ones((1,))])
def test_only_a_schedule_may_have_a_value_for_each_round(value):
    sim = simulation(fjs.pmtl(TASK))
    with pytest.raises(ValueError, match="clip"):
        sim.hyperparameters(clip=value)
    with pytest.raises(ValueError, match="clip"):
        sim.init(0, sim.hyperparameters().replace(clip=value))
    assert sim.hyperparameters(noise_multiplier=value).noise_multiplier is value
    with pytest.raises(ValueError, match="noise_multiplier"):
        sim.hyperparameters(noise_multiplier=np.ones((2, 2)))
    # Shapes are known while values are traced.
    with pytest.raises(ValueError, match="clip"):
        jax.eval_shape(lambda clip: sim.check(sim.hyperparameters(clip=clip)), jnp.ones(3))


@pytest.mark.parametrize(
    ("algorithm", "name", "value"),
    [
        (fjs.fedprox, "mu", -1.0),
        (fjs.fedavg, "server_learning_rate", np.nan),
        (fjs.fedavg, "learning_rate", np.inf),
        (fjs.ppsgd, "personalization", -0.5),
    ],
)
def test_a_value_out_of_range_is_refused(algorithm, name, value):
    sim = simulation(algorithm(TASK))
    with pytest.raises(ValueError, match=name):
        sim.hyperparameters(**{name: value})


def test_a_list_is_of_rounds_or_of_clients():
    with pytest.raises(ValueError, match="lam may have a value per round or per client, not both"):
        fjs.Hyperparameter("lam", schedule=True, per_client=True)
    with pytest.raises(ValueError, match="has a shape"):
        fjs.Hyperparameter("lam", schedule=True, shape=(2,))
    with pytest.raises(ValueError, match="sizes above 0"):
        fjs.Hyperparameter("lam", shape=(0,))
    with pytest.raises(ValueError, match="a tuple of sizes above 0"):
        fjs.Hyperparameter("lam", shape=3)  # pyright: ignore[reportArgumentType]


def test_a_flat_list_fills_a_declared_shape_row_by_row():
    rates = fjs.Hyperparameter("rates", shape=(2, 3))
    np.testing.assert_array_equal(rates.of_shape((1, 2, 3, 4, 5, 6)), [[1, 2, 3], [4, 5, 6]])
    rates.check(rates.of_shape([1.0] * 6))
    with pytest.raises(ValueError, match="of shape"):
        rates.check(rates.of_shape([1.0] * 5))


def test_values_outside_the_range_may_be_allowed():
    z = Hyperparameter("z", 1.0, range=(0.5, 2.0), also=(0.0, math.inf), allowed="be z")
    for value in (0.0, 0.5, 2.0, math.inf):
        z.check(value)
    for value in (0.4, 2.1, -math.inf, math.nan):
        with pytest.raises(ValueError, match="z"):
            z.check(value)


def test_those_of_another_simulation_are_refused():
    sim, other = simulation(fjs.fedavg(TASK)), simulation(fjs.pmtl(TASK))
    hparams = sim.hyperparameters()
    state = other.init(0, other.hyperparameters())
    uses = [
        lambda hparams: other.init(0, hparams),
        lambda hparams: other.run(state, hparams, 1),
        lambda hparams: other.round(state, hparams),
        lambda hparams: other.check(hparams),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="hyperparameters"):
            use(hparams)
    with pytest.raises(ValueError, match="learning_rate"):
        other.init(0, {"lam": 0.1})  # pyright: ignore[reportArgumentType]
    # Their order and where they were made do not matter.
    values = {name: getattr(other.hyperparameters(), name) for name in reversed(other.records)}
    assert set(other.check(Hyperparameters(**values))) == set(other.records)


def test_they_do_not_change_but_by_copies():
    hparams = simulation(fjs.fedavg(TASK)).hyperparameters(learning_rate=0.2)
    assert hparams.replace(learning_rate=0.3).learning_rate == 0.3
    assert hparams.learning_rate == 0.2
    with pytest.raises(ValueError, match="lam"):
        hparams.replace(lam=0.1)
    with pytest.raises(AttributeError, match="replace"):
        hparams.learning_rate = 0.3
    with pytest.raises(AttributeError, match="lam"):
        _ = hparams.lam


# --- a pytree of arrays ---------------------------------------------------------------------------


def test_they_go_through_transformations_of_jax():
    sim = simulation(fjs.fedavg(TASK))
    hparams = sim.hyperparameters(learning_rate=0.2).as_arrays()
    leaves, structure = jax.tree.flatten(hparams)
    assert jax.tree.unflatten(structure, leaves) == hparams
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(hparams)]
    assert paths == [f".{name}" for name in sim.records]

    def product(hparams):
        return hparams.learning_rate * hparams.server_learning_rate**2

    assert float(jax.jit(product)(hparams)) == pytest.approx(0.2)
    slope = jax.grad(product)(hparams)
    assert isinstance(slope, Hyperparameters)
    assert float(slope.server_learning_rate) == pytest.approx(0.4)
    assert float(slope.clip) == 0
    several = jax.tree.map(
        lambda a, b: jnp.stack([a, b]), hparams, hparams.replace(learning_rate=0.5)
    )
    mapped = jax.vmap(product)(several)
    np.testing.assert_allclose(mapped, [0.2, 0.5], rtol=1e-6)
    # One of them mapped, the others shared.
    axes = hparams.map(lambda _: None).replace(learning_rate=0)
    rates = hparams.replace(learning_rate=jnp.array([0.1, 0.3]))
    np.testing.assert_allclose(jax.vmap(product, (axes,))(rates), [0.1, 0.3], rtol=1e-6)


def test_numbers_of_all_kinds_make_one_program():
    records = compose([(LEARNING_RATE, SERVER_LEARNING_RATE)])
    traced = []

    @jax.jit
    def use(hparams):
        traced.append(1)
        return hparams.learning_rate

    for kind in (float, np.float64, np.float32, jnp.float32, np.asarray, jnp.asarray):
        hparams = fill(records, {"learning_rate": kind(0.25)}).as_arrays()
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(hparams))
        assert float(use(hparams)) == 0.25
    assert len(traced) == 1


def test_values_are_known_on_the_host_unless_traced():
    known = on_host([1.0, 2.0])
    assert known is not None
    assert known.dtype == np.float64
    seen = []
    jax.eval_shape(lambda value: seen.append(on_host(value)), jnp.ones(()))
    assert seen == [None]


def test_they_show_their_values():
    hparams = Hyperparameters(lam=0.1, noise_multiplier=np.ones(3))
    assert repr(hparams) == "Hyperparameters(lam=0.1, noise_multiplier=array[3])"


# --- calibration ----------------------------------------------------------------------------------


def test_calibration_finds_the_least_noise_of_a_target(shared_fedavg):
    sim = shared_fedavg
    asked = sim.hyperparameters(clip=1.0, sampling_rate=0.5)
    hparams = sim.calibrate(asked, epsilon=2.0, rounds=2, delta=1e-3)
    assert hparams.clip == 1.0
    state, _ = sim.run(sim.init(0, hparams), hparams, 2)
    epsilon = sim.guarantee(state, 1e-3).find("zero_out", "joint_dp").epsilon
    assert epsilon is not None
    assert 1.99 < epsilon <= 2.0


def test_what_cannot_be_calibrated_is_refused():
    silent = simulation(fjs.local(TASK), mechanism=fjs.no_release())
    with pytest.raises(ValueError, match="noise"):
        silent.calibrate(silent.hyperparameters(), epsilon=1.0, rounds=1)
    sim = simulation(fjs.fedavg(TASK))
    with pytest.raises(ValueError, match="clip"):
        sim.calibrate(sim.hyperparameters(), epsilon=1.0, rounds=1)


# --- a shape of one's own -------------------------------------------------------------------------

RATES = Hyperparameter("rates", 0.1, "η of w and of b", scale="log", shape=(2,))


@reads(RATES)
def by_layer(task):
    """Full gradient steps of every client, with a learning rate for each of two layers."""

    def client(shared, personal, data, hparams, context):
        del context

        def step(params, batch):
            gradient = task.gradient(params, batch)
            rates = dict(zip(("kernel", "bias"), hparams.rates, strict=True))
            return {name: params[name] - rates[name] * gradient[name] for name in params}

        return data.fold(step, personal), (), {}

    return fjs.Algorithm(
        lambda key, hparams: ((), task.init(key)),
        client,
        lambda shared, release, hparams, round_: shared,
        lambda shared, personal, hparams, client_id: personal,
        task,
    )


@functools.cache
def layered():
    population, task = least_squares([4, 5, 6], test=0.4)
    batches, release = fjs.Minibatches(16, epochs=3), fjs.no_release()
    return fjs.Simulation(by_layer(task), population, fjs.full_participation(), batches, release)


def test_a_learning_rate_for_each_layer_is_the_step_of_that_layer():
    with jax.enable_x64(True):
        sim = layered()
        hparams = sim.hyperparameters(rates=[0.2, 0.0])
        state = sim.init(0, hparams)
        before = sim.models(state, hparams)
        state, _ = sim.round(state, hparams)
        models = sim.models(state, hparams)
        np.testing.assert_array_equal(models["bias"], before["bias"])  # its rate is 0
        for k, (x, y) in enumerate(designs(sim.population, "train")):
            w, x = before["kernel"][k, 0], x[:, :-1]  # without the column of ones
            for _ in range(3):
                w = w - 0.2 * x.T @ (x @ w + before["bias"][k] - y) / len(y)
            np.testing.assert_allclose(models["kernel"][k, 0], w, rtol=1e-10)
        for rate in (0.3, (0.3,), jnp.float64(0.3)):
            np.testing.assert_array_equal(sim.hyperparameters(rates=rate).rates, [0.3, 0.3])
        np.testing.assert_array_equal(sim.hyperparameters().rates, [0.1, 0.1])
        for wrong in (np.ones(3), np.ones((1, 2))):
            with pytest.raises(ValueError, match=r"rates must be numbers of shape \(2,\), got"):
                sim.hyperparameters(rates=wrong)
        with pytest.raises(ValueError, match="rates must be finite and at least 0"):
            sim.hyperparameters(rates=[0.1, -0.1])
        bad = Hyperparameters(rates=jnp.ones(3))
        with pytest.raises(ValueError, match="rates must be numbers of shape"):
            jax.eval_shape(sim.program.init, jax.random.key(0), bad)
        with pytest.raises(ValueError, match="rates must be numbers of shape"):
            jax.eval_shape(sim.program.step, state, bad, sim.placed["train"])


@pytest.mark.thorough
def test_an_array_has_the_derivatives_of_its_numbers():
    with jax.enable_x64(True):
        sim = layered()
        objective = mean_metric(sim, "loss", split="test")
        derive = hypergradient(sim, objective, 2, ("rates",), mode=Forward())
        rates = np.array([0.2, 0.05])
        _, slopes = derive(0, sim.hyperparameters(rates=rates))
        for layer in range(2):
            ends = [
                derive(0, sim.hyperparameters(rates=rates + side * 1e-5 * np.eye(2)[layer]))[0]
                for side in (1, -1)
            ]
            assert slopes["rates"][layer] == pytest.approx(
                float(ends[0] - ends[1]) / 2e-5, rel=1e-6
            )


def test_a_file_and_a_flag_give_an_array():
    key = settings._key_of(RATES)
    assert key.convert(CommandLineText("0.1, 0.5")) == key.convert([0.1, 0.5]) == (0.1, 0.5)
    assert key.convert(0.3) == (0.3,)
    assert key.default == (0.1,)
