"""Mechanisms as records of their choices: which fit together, and what one client may move."""

import inspect
import itertools
import math
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.problems import classification, numbers

import fedjaxsim as fjs
from fedjaxsim.engine.state import state_of
from fedjaxsim.factories import import_factory, make
from fedjaxsim.gradients.whole_run import check_names
from fedjaxsim.hyperparameters import Hyperparameters, declared_by
from fedjaxsim.privacy.choices import MECHANISMS
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import Correlated, PrivacySpend
from fedjaxsim.privacy.mechanisms import noise_like, record
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram, pure_gram
from fedjaxsim.privacy.mechanisms.record import SOUND, Bound, Noise, mechanism_of, parts_bound
from fedjaxsim.privacy.mechanisms.sums import _records_of, adaptive_clipping, per_layer, per_part
from fedjaxsim.privacy.messages import Messages
from fedjaxsim.testing import check_billboard

C, Z, M = 2.0, 1.5, 3
PARTS = "update", "steps"
HPARAMS = Hyperparameters(
    clip=C, noise_multiplier=Z, clip_update=C, clip_steps=5.0, share_update=3.0, share_steps=1.0,
    count_noise=2.0, target_quantile=0.5, clip_learning_rate=0.2,
).as_arrays()  # fmt: skip
GRAM: record.Statistic = record.SUM._replace(kind="Gram matrix")
STATISTICS = {each.kind: each for each in (record.SUM, record.EXACT_SUM, record.ROWS)}
NOISES = {
    "gaussian": record.GAUSSIAN_NOISE,
    "pure": record.PURE_NOISE,
    "correlated": record.correlated_noise(Correlated(bands=2)),
    "banded": record.banded_noise((0.8, 0.6)),
}
ADAPTIVE = Bound("adaptive", lambda state, hparams: state, record.CLIP.clip)
BOUNDS = {
    "clip norm": record.CLIP,
    "layers": record.LAYERS,
    "parts": parts_bound(PARTS, _records_of(PARTS)),
    "adaptive": ADAPTIVE,
}
PAIRS = list(itertools.product(NOISES, BOUNDS, [*STATISTICS, "Gram matrix"]))


def test_the_table_has_these_kinds_and_no_others():
    assert SOUND.keys() == NOISES.keys()
    assert {bound for bounds in SOUND.values() for bound in bounds} == BOUNDS.keys()


@pytest.mark.parametrize(("noise", "bound", "statistic"), PAIRS)
def test_each_pair_has_its_cost_or_is_refused(noise, bound, statistic):
    chosen = STATISTICS.get(statistic, GRAM), BOUNDS[bound], NOISES[noise]
    if statistic in SOUND[noise].get(bound, ()):
        assert mechanism_of(*chosen).event == NOISES[noise].event(2.0)
    else:
        with pytest.raises(ValueError, match=f"{noise} noise on .*{bound}.* no known cost"):
            mechanism_of(*chosen)
    # No divisor that is private, and no noise that is not in the table, has a known cost.
    assert not mechanism_of(*chosen, "cohort").event.known
    assert not mechanism_of(*chosen[:2], Noise("mine", chosen[2].draw)).event.known


def test_the_events_of_gram_matrices_follow_from_their_statistic():
    assert gaussian_gram().event == fjs.privacy.Gaussian(replace=math.sqrt(2))
    assert pure_gram().event == fjs.privacy.Pure(replace=math.sqrt(2))


@pytest.mark.parametrize("path", MECHANISMS.values())
def test_a_mechanism_reads_what_its_choices_read(path):
    settings = {"parts": PARTS} if path.endswith("per_part") else {}
    factory = import_factory(path)
    made = inspect.unwrap(factory)(**settings)
    assert set(made.hyperparameters) == set(declared_by(factory, **settings))


# --- what one client may move ---------------------------------------------------------------------


def message_of(numbers):
    """Two parts, one of which has two layers: 2 + 1 + 2 numbers."""
    v = numbers
    layers = {"a": {"kernel": v[..., :2], "bias": v[..., 2:3]}, "b": {"kernel": v[..., 3:]}}
    return {"update": layers, "steps": v[..., 0]}


def scales_of(mechanism, accumulator):
    """Return the standard deviation of the noise of each leaf, as it is drawn."""
    state, key = mechanism.init(HPARAMS), jax.random.key(4)

    @jax.jit
    def released(z):
        hparams = HPARAMS.replace(noise_multiplier=z)
        return mechanism.release(accumulator, 1.0, key, state, hparams, jnp.int32(0)).value

    like, noised = (released(jnp.float32(z)) for z in (0.0, HPARAMS.noise_multiplier))
    if mechanism.event.kind == "correlated":
        key = jax.random.fold_in(key, 0)
    unit = jax.jit(lambda: noise_like(key, like, jnp.float32(1)))()
    arrays = map(jax.device_get, (noised, like, unit))
    return jax.tree.map(lambda b, a, u: float(np.mean((b - a) / u)), *arrays)


def sound(noise, bound, statistic):
    return mechanism_of(STATISTICS[statistic], BOUNDS[bound], NOISES[noise], "one")


def total_of(mechanism):
    @jax.jit
    def added(numbers, mask):
        messages = message_of(numbers)
        one = jax.tree.map(lambda leaf: leaf[0], messages)
        ids, state = jnp.arange(M), mechanism.init(HPARAMS)
        accumulator = mechanism.add(
            mechanism.zero(one, M), Messages(messages), mask, ids, state, HPARAMS
        )
        # Without noise, the release is the statistic.
        quiet = HPARAMS.replace(noise_multiplier=0.0)
        released = mechanism.release(accumulator, 1.0, jax.random.key(0), state, quiet, 0)
        return released.value, accumulator.clipped, accumulator.nonfinite

    return added


LAWFUL = [
    (noise, bound, statistic)
    for noise, bound, statistic in PAIRS
    if noise in ("gaussian", "correlated")
    and bound in ("layers", "parts")
    and statistic in SOUND[noise].get(bound, ())
]
QUICK = (("gaussian", "parts", "sum"),)
EXTREME = st.sampled_from([0.0, 1e-30, 1.0, -2.0, 1e9, -1e18, math.nan, math.inf])
messages_of = hnp.arrays(np.float32, (M, 5), elements=EXTREME | st.floats(-4, 4, width=32))
other = hnp.arrays(np.float32, 5, elements=EXTREME | st.floats(-4, 4, width=32))


@pytest.mark.parametrize(
    "choices",
    [pytest.param(c, marks=() if c in QUICK else pytest.mark.thorough) for c in LAWFUL],
    ids=str,
)
def test_a_client_of_extreme_leaves_moves_the_release_by_what_is_charged(choices):
    mechanism = sound(*choices)
    added = total_of(mechanism)
    one = jax.tree.map(lambda leaf: leaf[0], message_of(np.zeros((M, 5), np.float32)))
    scales = scales_of(mechanism, mechanism.zero(one, M))

    def distance(first, second):
        """Return the distance of two sums in units of the noise as drawn, over 1/z."""
        first, second = jax.device_get((first, second))
        moved = jax.tree.map(
            lambda a, b, scale: np.sum(((np.float64(a) - b) / scale) ** 2), first, second, scales
        )
        return Z * math.sqrt(sum(jax.tree.leaves(moved)))

    everybody = np.ones(M, bool)

    @settings(deadline=None, max_examples=40)
    @given(messages=messages_of, other=other, client=st.integers(0, M - 1))
    def law(messages, other, client):
        whole, _, _ = added(messages, everybody)
        absent, _, _ = added(messages, everybody & (np.arange(M) != client))
        replaced = messages.copy()
        replaced[client] = other
        assert distance(whole, absent) <= 1 + 1e-5
        assert distance(whole, added(replaced, everybody)[0]) <= 2 + 1e-5

    law()
    # The worst case is reached: a client all of whose leaves are large, and its negative.
    largest = np.zeros((M, 5), np.float32)
    largest[1] = 1e9
    nothing, _, _ = added(np.zeros((M, 5), np.float32), everybody)
    assert 1 - 1e-4 < distance(added(largest, everybody)[0], nothing) <= 1 + 1e-6
    opposite = added(-largest, everybody)[0]
    assert 2 - 2e-4 < distance(added(largest, everybody)[0], opposite) <= 2 + 1e-6
    # One leaf that is not finite makes all of the message zero, and is no clipped one.
    largest[1, 4] = math.nan
    broken, clipped, nonfinite = added(largest, everybody)
    assert (distance(broken, nothing), int(clipped), int(nonfinite)) == (0, 0, 1)


def test_layers_and_parts_are_clipped_to_norms_of_their_own():
    v = np.array([[30.0, 40.0, 0.0, 0.3, 0.4], [0.0, 0.0, 0.1, 0.0, 0.0], [0.0] * 5], np.float32)
    layers, _, _ = total_of(per_layer())(v, np.ones(M, bool))
    # Three layers, the parts' own leaf among them, of norm at most 2/√3 each.
    norm = C / math.sqrt(3)
    update = layers["update"]
    np.testing.assert_allclose(update["a"]["kernel"], [0.6 * norm, 0.8 * norm], rtol=1e-4)
    np.testing.assert_allclose(update["a"]["bias"], [0.1], rtol=1e-4)
    np.testing.assert_allclose(update["b"]["kernel"], [0.3, 0.4], rtol=1e-4)
    np.testing.assert_allclose(layers["steps"], norm, rtol=1e-4)
    parts, clipped, _ = total_of(per_part(parts=PARTS))(v, np.ones(M, bool))
    np.testing.assert_allclose(parts["steps"], 5.0, rtol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(parts["update"]["a"]["kernel"]), C, rtol=1e-4)
    assert int(clipped) == 1
    # A message of one layer is clipped as by `gaussian`.
    one = Messages({"kernel": v[:, :2], "bias": v[:, 2:]})
    zero = fjs.gaussian().zero({"kernel": v[0, :2], "bias": v[0, 2:]}, M)
    mask, ids = jnp.ones(M, bool), jnp.arange(M)
    for leaf, same in zip(
        *(
            jax.tree.leaves(jax.jit(lambda add=add: add(zero, one, mask, ids, (), HPARAMS).total)())
            for add in (per_layer().add, fjs.gaussian().add)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(leaf, same, rtol=1e-6)


def test_parts_that_do_not_cover_the_message_are_refused():
    for parts, why in (
        (("update",), "'steps' is in none"),
        (("update", "steps", "more"), "no part 'more'"),
        (("update", "update/a", "steps"), "'update/a/bias' is in update and update/a"),
    ):
        with pytest.raises(ValueError, match=why):
            _added(per_part(parts=parts), parts)
    with pytest.raises(ValueError, match="number of parts"):
        per_part(parts=())
    with pytest.raises(ValueError, match="different names"):
        per_part(parts=("a/b", "a_b"))
    given = {"clip_update": 1.0, "clip_steps": math.inf, "noise_multiplier": 1.0}
    with pytest.raises(ValueError, match="finite clip_steps"):
        per_part(parts=PARTS).check(Hyperparameters(**given))


def _added(mechanism, parts):
    messages = message_of(np.zeros((M, 5), np.float32))
    one = jax.tree.map(lambda leaf: leaf[0], messages)
    values = {r.name: 1.0 for r in _records_of(parts)}
    hparams = Hyperparameters(noise_multiplier=1.0, **values).as_arrays()
    mask, ids = jnp.ones(M, bool), jnp.arange(M)
    return mechanism.add(mechanism.zero(one, M), Messages(messages), mask, ids, (), hparams)


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares",
    [
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ((1.0, 1.0), (3.0, 1.0))),
        (0.1, 7.0),
    ],
)
def test_releases_of_one_round_cost_what_dp_accounting_says_of_them_together(shares):
    mechanism = per_part(parts=PARTS)
    hparams = HPARAMS.replace(share_update=shares[0], share_steps=shares[1])
    one = {"update": jnp.zeros(1), "steps": jnp.zeros(1)}
    scales = mechanism_scales(mechanism, hparams, one)
    z = scales["update"] / C, scales["steps"] / 5.0
    # By hand: z √(Σs/s_g).
    np.testing.assert_allclose(z, [Z * math.sqrt(sum(shares) / s) for s in shares], rtol=1e-6)
    rate, rounds, delta = 0.1, 50, 1e-5
    together = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(each) for each in z])
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_event.PoissonSampledDpEvent(rate, together), rounds)
    scheme = SamplingScheme("poisson", 1000, 1000)
    spend = PrivacySpend(scheme, mechanism.event, (Entry(Z, rate, rounds),))
    ours = fjs.privacy.report([spend], delta).find("zero_out").epsilon
    assert ours is not None
    single = dp_accounting.pld.PLDAccountant()
    effective = sum(each**-2 for each in z) ** -0.5
    single.compose(
        dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(effective)), rounds
    )
    assert single.get_epsilon(delta) <= ours * (1 + 1e-3)
    assert 0.7 * accountant.get_epsilon(delta) < ours < accountant.get_epsilon(delta)


def mechanism_scales(mechanism, hparams, one):
    key = jax.random.key(1)

    @jax.jit
    def drawn():
        release = mechanism.release(mechanism.zero(one, M), 1.0, key, (), hparams, jnp.int32(0))
        return release, noise_like(key, one, jnp.float32(1))

    release, unit = jax.device_get(drawn())
    assert float(release.noise_multiplier) == Z
    return jax.tree.map(lambda a, u: float(a[0] / u[0]), release.value, unit)


@pytest.mark.thorough
def test_the_noise_of_parts_has_a_derivative():
    mechanism, key = per_part(parts=PARTS), jax.random.key(7)
    zero = mechanism.zero({"update": jnp.zeros(2), "steps": jnp.zeros(())}, M)

    def value(z, share):
        hparams = HPARAMS.replace(noise_multiplier=z, share_steps=share)
        return mechanism.release(zero, 1.0, key, (), hparams, jnp.int32(0)).value["steps"]

    unit = noise_like(key, {"update": jnp.zeros(2), "steps": jnp.zeros(())}, jnp.float32(1))
    # 5 z √((3 + s)/s) at s = 1: by z it is 10, by s −(5 z/2) (3/s²)/√((3 + s)/s) = −15 z/4.
    slopes = np.array(jax.grad(value, (0, 1))(Z, 1.0)) / unit["steps"]
    np.testing.assert_allclose(slopes, [10.0, -15 * Z / 4], rtol=1e-5)
    check_names(["noise_multiplier"], HPARAMS)
    without = {name: HPARAMS.get(name) for name in HPARAMS if name != "clip"}
    check_names(["noise_multiplier"], Hyperparameters(**without))


@pytest.mark.thorough
def test_adaptive_clipping_sums_exactly():
    mechanism = adaptive_clipping(exact_sums=True)
    plain = adaptive_clipping()
    v = jnp.array([[3.0, 4.0], [0.3, 0.0], [0.0, 0.0]])
    found = []
    for each in (mechanism, plain):
        state, mask = each.init(HPARAMS), jnp.ones(M, bool)
        accumulator = each.add(each.zero(v[0], M), Messages(v), mask, jnp.arange(M), state, HPARAMS)
        found.append(each.release(accumulator, 3.0, jax.random.key(2), state, HPARAMS, 0))
    np.testing.assert_allclose(found[0].value, found[1].value, rtol=1e-5)
    np.testing.assert_array_equal(found[0].state, found[1].state)
    assert mechanism.event == plain.event
    assert any("as integers" in sentence for sentence in mechanism.public)
    assert make(MECHANISMS["adaptive"], exact_sums=True).public == mechanism.public


# --- on every placement ---------------------------------------------------------------------------


PLACED = {
    "per layer": per_layer(),
    "per part": per_part(parts=("kernel", "bias")),
    "per part, exact": per_part(parts=("kernel", "bias"), exact_sums=True),
    "projected": fjs.privacy.transformed(
        adaptive_clipping(exact_sums=True), fjs.privacy.random_projection(10)
    ),
}
PLACEMENTS: dict[str, Any] = {
    "in a batch": {"chunk_map": "vmap"},
    "on two devices": {"devices": jax.devices()[:2]},
    "streamed": {"streamed": True},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLACED)
def test_a_run_is_the_same_on_another_placement_and_in_a_sweep(name):
    population, task = classification([6, 9, 4, 8, 5, 7])

    def simulation(**placement):
        batches = fjs.Minibatches(3, steps=2)
        return fjs.Simulation(
            fjs.fedavg(task), population, fjs.poisson(0.5), batches, PLACED[name], **placement
        )

    sim = simulation(chunk_map="scan")
    values = {n: 0.3 for n in sim.records if n.startswith("clip") and "learning" not in n}
    values |= {"count_noise": 2.0} if "count_noise" in sim.records else {}
    hparams = sim.hyperparameters(noise_multiplier=0.5, learning_rate=0.2, **values)
    state, _ = sim.run(sim.init(3, hparams), hparams, 3)
    expected = numbers(state.shared)
    cost = sim.guarantee(state, 1e-3).find("replace")
    assert cost.status != "none"
    other = simulation(**[*PLACEMENTS.values()][[*PLACED].index(name) % len(PLACEMENTS)])
    placed, _ = other.run(other.init(3, hparams), hparams, 3)
    np.testing.assert_allclose(numbers(placed.shared), expected, rtol=1e-4, atol=1e-5)
    assert other.guarantee(placed, 1e-3).find("replace") == cost
    settings = [hparams, hparams.replace(noise_multiplier=1.0)]
    runs = fjs.SimulationBatch(sim, settings)
    both, _ = runs.run(runs.init(3), 3)
    np.testing.assert_allclose(numbers(state_of(both, 0).shared), expected, rtol=1e-4, atol=1e-5)
    assert sim.guarantee(state_of(both, 0), 1e-3).find("replace").epsilon == cost.epsilon
    check_billboard(sim, hparams, rounds=2)
