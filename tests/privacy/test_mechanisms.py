"""Laws of all mechanisms, and each one on messages that can be checked by hand."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.problems import least_squares

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram, pure_gram, wishart
from fedjaxsim.privacy.mechanisms.sums import (
    adaptive_clipping,
    client_noise,
    every_row,
    plain_mean,
    pure,
)
from fedjaxsim.privacy.messages import Messages
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation

C, Z, SIGMA = 2.0, 1.5, 2.0
HPARAMS = Hyperparameters(
    clip=C,
    noise_multiplier=Z,
    count_noise=SIGMA,
    target_quantile=0.5,
    clip_learning_rate=0.2,
).as_arrays()
IDS = jnp.arange(5)
WEIGHTS = [1.0, 2.0, 4.0, 8.0, 3.0]

MECHANISMS = {
    "gaussian": gaussian(),
    "weighted": gaussian(WEIGHTS),
    "adaptive": adaptive_clipping(),
    "every row": every_row(),
    "gram": gaussian_gram(),
    "gram diagonal": gaussian_gram(diagonal=True),
    "pure": pure(),
    "pure gram": pure_gram(),
    "pure gram diagonal": pure_gram(diagonal=True),
    "client noise": client_noise(),
    "plain mean": plain_mean(),
    "wishart": wishart(),
    "wishart diagonal": wishart(diagonal=True),
}
EACH = [
    pytest.param(
        name,
        marks=[] if name in ("weighted", "adaptive", "gram") else [pytest.mark.thorough],
    )
    for name in MECHANISMS
]
PROTECTED = [
    pytest.param(name, marks=[pytest.mark.thorough] if name.startswith("pure") else [])
    for name, mechanism in MECHANISMS.items()
    if mechanism.event.kind != "no_known_cost"
]


def add_all(mechanism, messages, mask, hparams):
    state = mechanism.init(hparams)
    return mechanism.add(
        mechanism.zero(messages[0], len(messages)), Messages(messages), mask, IDS, state, hparams
    ).total


ADD = {
    name: jax.jit(lambda *args, mechanism=mechanism: add_all(mechanism, *args))
    for name, mechanism in MECHANISMS.items()
}


def loss_scale(name, before, after):
    """Return the distance between two statistics, in units of the sensitivities."""
    move = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), after, before)
    if name == "adaptive":
        z_sum = (Z**-2 - (2 * SIGMA) ** -2) ** -0.5
        return Z * math.hypot(np.linalg.norm(move[0]) / C / z_sum, move[1] / SIGMA)
    unit = C**2 if "gram" in name else C
    return np.linalg.norm(move) / unit


any_float = st.floats(width=32, allow_nan=True, allow_infinity=True)
vectors = hnp.arrays(np.float32, (5, 3), elements=any_float | st.floats(-4, 4, width=32))
vector = hnp.arrays(np.float32, 3, elements=any_float | st.floats(-4, 4, width=32))


@pytest.mark.parametrize("name", PROTECTED)
@settings(deadline=None, max_examples=60)
@given(messages=vectors, other=vector, client=st.integers(0, 4))
def test_no_client_moves_the_statistic_by_more_than_the_event_says(name, messages, other, client):
    event, add = MECHANISMS[name].event, ADD[name]
    present = np.ones(5, bool)
    full = add(messages, present, HPARAMS)
    absent = add(messages, present & (np.arange(5) != client), HPARAMS)
    assert loss_scale(name, full, absent) <= event.sensitivity("zero_out") * (
        1 + 1e-5
    )  # float32 sums
    zeroed, replaced = messages.copy(), messages.copy()
    zeroed[client], replaced[client] = 0, other
    assert loss_scale(name, full, add(zeroed, present, HPARAMS)) <= event.sensitivity(
        "zero_out"
    ) * (1 + 1e-5)
    assert loss_scale(name, full, add(replaced, present, HPARAMS)) <= event.replace * (1 + 1e-5)


# The pairs of messages that move each statistic furthest: no sensitivity is larger than it must be.
FAR, NEAR = [9.0, 0, 0], [-1.9999, 0, 0]  # clipped to 2; just inside
WORST = {
    "gaussian": (FAR, NEAR),
    "weighted": (FAR, NEAR),
    "adaptive": (FAR, NEAR),
    "every row": (FAR, NEAR),
    "gram": (FAR, [0, 9.0, 0]),
    "gram diagonal": (FAR, [0, 9.0, 0]),
    "pure": (FAR, NEAR),
    "pure gram": (FAR, [0, 9.0, 0]),
    "pure gram diagonal": (FAR, [0, 9.0, 0]),
}


@pytest.mark.parametrize("name", PROTECTED)
def test_the_sensitivities_are_reached(name):
    event, add = MECHANISMS[name].event, ADD[name]
    first, second = (np.zeros((5, 3), np.float32) for _ in range(2))
    first[3], second[3] = WORST[name]  # client 3 has the largest weight
    mask = np.ones(5, bool)
    zero = add(np.zeros((5, 3), np.float32), mask, HPARAMS)
    full = add(first, mask, HPARAMS)
    assert loss_scale(name, zero, full) > 1 - 1e-3
    assert loss_scale(name, full, add(second, mask, HPARAMS)) > event.replace * (1 - 1e-3)


@pytest.mark.parametrize("name", MECHANISMS)
def test_chunks_and_order_change_nothing(name):
    mechanism = MECHANISMS[name]
    messages = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    mask = np.array([True, True, False, True, True])
    whole = ADD[name](messages, mask, HPARAMS)
    state = mechanism.init(HPARAMS)
    one_by_one = mechanism.zero(messages[0], len(messages))

    @jax.jit
    def add(accumulator, messages, mask, ids):
        return mechanism.add(accumulator, Messages(messages), mask, ids, state, HPARAMS)

    for k in (4, 2, 0, 3, 1):
        one = slice(k, k + 1)
        one_by_one = add(one_by_one, messages[one], mask[one], IDS[one])
    chex.assert_trees_all_close(one_by_one.total, whole, rtol=1e-5, atol=1e-6)


MESSAGES = np.array([[3.0, 4, 0], [1, 0, 2], [0, 0, 1], [2, 2, 2], [0, 1, 0]], np.float32)
GRAM = MESSAGES.T @ MESSAGES
PLAIN = {
    "every row": MESSAGES,
    "weighted": np.array(WEIGHTS) @ MESSAGES / sum(WEIGHTS),
    "gram": GRAM,
    "pure gram": GRAM,
    "wishart": GRAM,
    "gram diagonal": np.diag(GRAM),
    "pure gram diagonal": np.diag(GRAM),
    "wishart diagonal": np.diag(GRAM),
}


def run(mechanism, clip_norm, z):
    """A round at these settings with full participation, denominator 5."""
    hparams = HPARAMS.replace(clip=clip_norm, noise_multiplier=z)
    state = mechanism.init(hparams)
    accumulator = mechanism.zero(MESSAGES[0], 5)
    accumulator = mechanism.add(
        accumulator, Messages(MESSAGES), jnp.ones(5, bool), IDS, state, hparams
    )
    release = mechanism.release(accumulator, 5.0, jax.random.key(0), state, hparams, jnp.int32(0))
    return jnp.sum(release.value), release


SETTINGS = jnp.array([jnp.inf, 2.0, 2.0, 2.0, 2.0]), jnp.array([0.0, 0.0, 0.75, 1.5, 4.0])


@functools.cache
def runs(name):
    """The gradients and releases of all SETTINGS, mapped over in one program."""
    gradient = jax.grad(functools.partial(run, MECHANISMS[name]), argnums=(0, 1), has_aux=True)
    return jax.jit(jax.vmap(gradient))(*SETTINGS)


@pytest.mark.parametrize("name", EACH)
def test_without_noise_and_clipping_the_release_is_exact(name):
    expected = PLAIN.get(name, MESSAGES.mean(axis=0))
    np.testing.assert_allclose(runs(name)[1].value[0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", EACH)
def test_settings_can_be_mapped_over_and_differentiated(name):
    gradients, release = runs(name)
    assert np.all(np.isfinite(np.array(gradients)[:, :4]))
    noise = np.asarray(release.value, np.float64) - np.asarray(release.value[1])
    if name == "plain mean":
        np.testing.assert_array_equal(noise[2:], 0)
        return
    ratio = 2.0
    if name == "adaptive":  # (0.75⁻² − 4⁻²) / (1.5⁻² − 4⁻²) = (1.777… − 0.0625) / (0.444… − 0.0625)
        ratio = math.sqrt((16 / 9 - 1 / 16) / (4 / 9 - 1 / 16))
    np.testing.assert_allclose(noise[3], ratio * noise[2], rtol=1e-4, atol=1e-4)
    assert np.all(np.abs(noise[2]) > 0)


@pytest.mark.parametrize("bound", [None, 4.0])
def test_weights_give_a_weighted_mean_of_clipped_messages(bound):
    # Shares of 1, 2, 4 are 1/4, 1/2, 1; (9, 0) is clipped to (2, 0). Their sum divides, or with
    # a public bound, which cuts 9 to 4, the number of clients.
    mechanism = gaussian([1.0, 2.0, 4.0 if bound is None else 9.0], max_weight=bound)
    hparams = Hyperparameters(clip=2.0, noise_multiplier=0.0).as_arrays()
    messages = np.array([[1.0, 1], [0, 2], [9, 0]], np.float32)

    @jax.jit
    def weighted(messages):
        accumulator = mechanism.zero(messages[0], len(messages))
        accumulator = mechanism.add(
            accumulator, Messages(messages), jnp.ones(3, bool), jnp.arange(3), (), hparams
        )
        key = jax.random.key(0)
        return accumulator, mechanism.release(accumulator, 3.0, key, (), hparams, jnp.int32(0))

    accumulator, out = weighted(messages)
    divisor = 1.75 if bound is None else 3.0
    np.testing.assert_allclose(accumulator.total, [2.25, 1.25], rtol=3e-5)
    np.testing.assert_allclose(out.value, [2.25 / divisor, 1.25 / divisor], rtol=3e-5)
    mechanism.check(hparams)
    assert mechanism.num_clients == 3
    assert len(mechanism.public) == (bound is None)
    refused_for(mechanism, 4, "the mechanism is for 3 clients, but the population has 4")


def test_with_a_public_bound_a_weight_moves_only_its_clients_own_message():
    """The attack: numbers of rows of one client, read off a release that others' messages fill."""
    hparams = Hyperparameters(clip=2.0, noise_multiplier=0.0).as_arrays()
    messages = Messages(np.array([[1.0, 1], [0, 0]], np.float32))  # the victim sends nothing
    found = []
    for rows in (3.0, 900.0):
        mechanism = gaussian([5.0, rows], max_weight=100.0)

        def released(mechanism=mechanism):
            total = mechanism.add(
                mechanism.zero(np.zeros(2, np.float32), 2), messages, jnp.ones(2, bool),
                jnp.arange(2), (), hparams,
            )  # fmt: skip
            return mechanism.release(total, 2.0, jax.random.key(0), (), hparams, jnp.int32(0))

        found.append(jax.jit(released)().value)
    np.testing.assert_array_equal(*found)


def test_bad_weights_are_refused():
    with pytest.raises(ValueError, match=r"0\.0 to 1\.0"):
        gaussian([0.0, 1.0])
    with pytest.raises(ValueError, match="per client"):
        gaussian(2.0)
    with pytest.raises(ValueError, match="max_weight"):
        gaussian([1.0], max_weight=0.0)


def test_the_clip_norm_steps_towards_the_quantile():
    # Norms 5, 1, 2.2, 3.5 and 0 against C = 4: one is clipped, three are not, and zero counts half.
    # b̃ = 1/2 + (3 − 1)/2/5 = 0.7, so C ← 4 exp(−0.3 (0.7 − 0.4)).
    rows = [[3.0, 4, 0], [1, 0, 0], [2.2, 0, 0], [0, 3.5, 0], [0, 0, 0]]
    hparams = HPARAMS.replace(
        clip=4.0,
        noise_multiplier=0.0,
        count_noise=0.0,
        target_quantile=0.4,
        clip_learning_rate=0.3,
    ).as_arrays()
    mechanism = MECHANISMS["adaptive"]

    @jax.jit
    def adapted(messages, c):
        accumulator = mechanism.zero(messages[0], len(messages))
        accumulator = mechanism.add(
            accumulator, Messages(messages), jnp.ones(5, bool), IDS, c, hparams
        )
        key = jax.random.key(0)
        return accumulator.clipped, mechanism.release(
            accumulator, 5.0, key, c, hparams, jnp.int32(0)
        )

    clipped, out = adapted(np.array(rows, np.float32), np.float32(4))
    np.testing.assert_allclose(out.state, 4 * math.exp(-0.09), rtol=1e-6)
    assert int(clipped) == 1


@pytest.mark.thorough
def test_the_clip_norm_finds_the_quantile():
    norms = np.exp(np.random.default_rng(0).normal(size=500)).astype(np.float32)
    hparams = HPARAMS.replace(
        clip=0.01, noise_multiplier=1.0, count_noise=25.0, target_quantile=0.8
    ).as_arrays()
    mechanism = MECHANISMS["adaptive"]

    def step(c, key):
        accumulator = mechanism.zero(jnp.zeros(1), 500)
        mask = jnp.ones(500, bool)
        accumulator = mechanism.add(accumulator, Messages(norms[:, None]), mask, mask, c, hparams)
        return mechanism.release(accumulator, 500.0, key, c, hparams, jnp.int32(0)).state, c

    _, path = jax.lax.scan(step, mechanism.init(hparams), jax.random.split(jax.random.key(0), 300))
    # Noise of 0.05 on b̃, times 0.2, moves log C by 0.01 a round: it stays well within 0.2.
    assert abs(math.log(np.median(path[200:]) / np.quantile(norms, 0.8))) < 0.2


def test_count_noise_that_cannot_cover_z_is_refused_or_voids_the_guarantee():
    mechanism = MECHANISMS["adaptive"]
    with pytest.raises(ValueError, match="noise_multiplier"):
        mechanism.check(HPARAMS.replace(noise_multiplier=4.0))
    charged = runs("adaptive")[1].noise_multiplier
    np.testing.assert_array_equal(charged, [0, 0, 0.75, 1.5, np.nan])
    with pytest.raises(ValueError, match="clip"):
        mechanism.check(HPARAMS.replace(clip=np.inf))
    mechanism.check(HPARAMS)


@pytest.mark.thorough
def test_the_shift_has_the_size_of_the_noise():
    # d = 8, t = 4, z = 1.5, K = 2: s = 6 and c = 6 (√16 + 4) = 48; on a diagonal 6 (√(2 ln 8) + 4).
    zero = jnp.zeros((1, 8))
    for diagonal, expected in (
        (False, 48 * np.eye(8)),
        (True, 6 * (math.sqrt(2 * math.log(8)) + 4)),
    ):
        values = []
        for t in (4.0, None):
            mechanism = gaussian_gram(diagonal, psd_deviations=t)
            release = jax.jit(functools.partial(mechanism.release, mechanism.zero(zero[0], 1)))
            out = release(1.0, jax.random.key(0), (), HPARAMS, jnp.int32(0))
            values.append(np.asarray(out.value))
        np.testing.assert_allclose(values[0] - values[1], expected, atol=1e-4)
        np.testing.assert_allclose(values[0], values[0].T, rtol=1e-6, atol=1e-6)


def test_the_columns_of_matrices_count_alike():
    # Two clients with two columns each: the Gram matrix of the four columns, or its diagonal.
    columns = np.array([[3.0, 4, 0], [1, 0, 2], [0, 0, 1], [2, 2, 2]], np.float32)
    messages = np.stack([columns[:2].T, columns[2:].T])
    hparams = HPARAMS.replace(clip=jnp.inf)
    for name, expected in (("gram", columns.T @ columns), ("gram diagonal", [14.0, 20, 9])):
        mechanism = MECHANISMS[name]
        total = jax.jit(
            lambda v, mechanism=mechanism: (
                mechanism.add(
                    mechanism.zero(v[0], 2), Messages(v), jnp.ones(2, bool), IDS[:2], (), hparams
                ).total
            )
        )(messages)
        np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_a_gram_matrix_needs_vectors_or_matrices():
    for message in (jnp.zeros((2, 3, 4)), (jnp.zeros(2), jnp.zeros(2))):
        with pytest.raises(ValueError, match="one vector"):
            gaussian_gram().zero(message, 5)
    with pytest.raises(ValueError, match="psd_deviations"):
        pure_gram(psd_deviations=-1.0)


def test_a_mean_over_the_realised_cohort():
    @functools.partial(jax.jit, static_argnums=0)
    def mean(mechanism, mask):
        accumulator = mechanism.add(
            mechanism.zero(MESSAGES[0], 5), Messages(MESSAGES), mask, IDS, (), HPARAMS
        )
        return mechanism.release(
            accumulator, 5.0, jax.random.key(0), (), HPARAMS, jnp.int32(0)
        ).value

    mask = np.array([True, False, True, False, False])
    np.testing.assert_allclose(mean(plain_mean(), mask), [1.5, 2, 0.5])
    for mechanism in (plain_mean(), client_noise()):
        np.testing.assert_array_equal(mean(mechanism, np.zeros(5, bool)), np.zeros(3))


@pytest.mark.thorough
def test_every_row_gets_the_same_noise_for_any_cohort():
    # Clients 1 and 3 send, one of them clipped from a norm of 5 to 2.
    mechanism, draws = MECHANISMS["every row"], 4000
    empty = mechanism.zero(MESSAGES[0], 5)
    senders, ids = Messages(MESSAGES[np.array([0, 2])]), jnp.array([3, 1])
    two = mechanism.add(empty, senders, jnp.ones(2, bool), ids, (), HPARAMS)
    expected = np.zeros((5, 3))
    expected[3], expected[1] = MESSAGES[0] * 2 / 5, MESSAGES[2]
    np.testing.assert_allclose(two.total, expected, rtol=3e-5)  # clipping rounds down

    @jax.jit
    @jax.vmap
    def released(key):
        return [
            mechanism.release(a, 5.0, key, (), HPARAMS, jnp.int32(0)).value for a in (empty, two)
        ]

    without, with_two = (
        np.asarray(v, float) for v in released(jax.random.split(jax.random.key(0), draws))
    )
    added = np.broadcast_to(two.total, (draws, 5, 3))
    np.testing.assert_allclose(with_two - without, added, atol=1e-5)  # float32 sums
    # All 15 numbers are independent with variance (zC)² = 9, within five standard errors.
    noise = without.reshape(draws, 15) / (Z * C)
    covariance = noise.T @ noise / draws
    assert np.abs(np.diag(covariance) - 1).max() < 5 * math.sqrt(2 / draws)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 5 / math.sqrt(draws)
    assert np.abs(noise.mean(axis=0)).max() < 5 / math.sqrt(draws)


def refused_for(mechanism, num_clients, message):
    """Check that a simulation of `num_clients` clients refuses the mechanism."""
    population, task = least_squares([2] * num_clients)
    with pytest.raises(ValueError, match=message):
        Simulation(fedavg(task), population, full_participation(), mechanism=mechanism)


def test_every_row_is_of_the_clients_of_the_run():
    for m in (1, 6):
        assert every_row().zero(jnp.zeros((2, 3)), m).total.shape == (m, 2, 3)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_declares_what_it_reads_and_reads_nothing_else(name):
    mechanism = MECHANISMS[name]
    given = {record.name: getattr(HPARAMS, record.name) for record in mechanism.hyperparameters}
    hparams, messages = Hyperparameters(**given), Messages(MESSAGES)
    mechanism.check(hparams)

    def reads():
        state = mechanism.init(hparams)
        total = mechanism.add(
            mechanism.zero(MESSAGES[0], 5), messages, jnp.ones(5, bool), IDS, state, hparams
        )
        return mechanism.release(total, 5.0, jax.random.key(0), state, hparams, jnp.int32(0))

    jax.eval_shape(reads)
