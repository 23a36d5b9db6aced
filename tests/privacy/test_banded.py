"""Banded noise under cyclic sampling: brute force, jax_privacy's cost, and what is refused."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy.accounting import accountants, analysis
from support.plans import charged
from support.problems import classification, copied, read_by, untrained

import fedjaxsim as fjs
from fedjaxsim.privacy import banded, cyclic, fixed_groups, random_allocation
from fedjaxsim.privacy.accounting.composition import profile
from fedjaxsim.privacy.accounting.gaussian import inverse_series, square_root
from fedjaxsim.privacy.entries import ADJACENCIES, SamplingScheme, excess
from fedjaxsim.privacy.events import GAUSSIAN, Banded, event_from
from fedjaxsim.privacy.guarantee import rdp_epsilon, tight_epsilon
from fedjaxsim.privacy.mechanisms import zeros
from fedjaxsim.privacy.noise import normal
from fedjaxsim.privacy.samplers.law import check_law

pytestmark = pytest.mark.exact_keys
M, G, Q, Z, DELTA = 12, 3, 0.1, 2.0, 1e-3
TWO = tuple(square_root(2).tolist())
CYCLIC = SamplingScheme("cyclic", 1000, 250, groups=4)


def matrix(coefficients, rounds):
    """The matrix C."""
    padded = np.zeros(rounds)
    padded[: len(coefficients)] = coefficients[:rounds]
    return sum(np.diag(np.full(rounds - j, padded[j]), -j) for j in range(rounds))


# --- the cost -------------------------------------------------------------------------------------


def brute_force(coefficients, groups, rounds, z, p, adjacency, epsilons):
    """Integrate over the joint releases of all rounds: δ of both directions, the larger one.

    The noise has the covariance z² (CᵀC)⁻¹. A client of group 0 sends 1, or −1 if replaced, in each
    turn that its coins choose. Likelihood ratios follow from one number for each turn, whose law is
    a normal one: two turns are integrated on a grid.
    """
    inverse = np.linalg.inv(matrix(coefficients, rounds))
    precision = np.linalg.inv(z**2 * inverse @ inverse.T)
    turns = np.eye(rounds)[:, ::groups]
    assert turns.shape[1] == 2
    gram = turns.T @ precision @ turns
    scale = np.sqrt(np.diag(gram))
    x = np.linspace(-9 - scale.max(), 9 + scale.max(), 1201)
    points = np.stack(np.meshgrid(x, x, indexing="ij"), axis=-1)
    correlation = gram / np.outer(scale, scale)
    exponent = np.einsum("abi,ij,abj->ab", points, np.linalg.inv(correlation), points) / 2
    density = np.exp(-exponent) / (2 * math.pi * math.sqrt(np.linalg.det(correlation)))

    def ratio(sign):
        """Return the density of a client's releases over those of a silent one."""
        total = np.zeros_like(density)
        for coins in itertools.product((0, 1), repeat=2):
            sent = sign * np.array(coins)
            likely = np.prod([p if coin else 1 - p for coin in coins])
            total += likely * np.exp(points @ (scale * sent) - sent @ gram @ sent / 2)
        return total

    present, other = ratio(1), 1.0 if adjacency == "zero_out" else ratio(-1)
    area = (x[1] - x[0]) ** 2
    return [
        max(
            np.sum(density * np.maximum(one - math.exp(epsilon) * two, 0)) * area
            for one, two in ((present, other), (other, present))
        )
        for epsilon in epsilons
    ]


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_the_cost_is_that_of_the_joint_releases_of_all_rounds(adjacency):
    epsilons = 0.1, 0.5, 1.0
    scheme = SamplingScheme("cyclic", 1000, 500, groups=2)
    plan = charged(scheme, Banded(coefficients=TWO), (1.5, 0.2, 4))
    reported = profile([plan], adjacency)
    true = brute_force(TWO, 2, 4, 1.5, 0.4, adjacency, epsilons)
    for epsilon, delta in zip(epsilons, true, strict=True):
        assert delta * (1 - 1e-5) <= reported.delta(epsilon) <= 1.005 * delta  # of the grid


def test_turns_nearer_than_the_bands_cost_more_and_are_refused():
    # Every round of one group, with two bands: the coins of turns no longer separate.
    reported = profile([charged(CYCLIC, Banded(coefficients=TWO), (1.5, 0.1, 8))], "zero_out")
    [true] = brute_force(TWO, 1, 2, 1.5, 0.4, "zero_out", [1.0])
    assert true > 1.2 * reported.delta(1.0)
    event = Banded(coefficients=TWO)
    for scheme in (
        SamplingScheme("cyclic", M, M, groups=1),
        SamplingScheme("groups", M, M, groups=1),
        SamplingScheme("full", M, M),
        SamplingScheme("poisson", M, M),
        SamplingScheme("fixed", M, 4),
        SamplingScheme("allocation", M, M, period=4),
    ):
        with pytest.raises(ValueError, match=r"no known cost .* cyclic or groups, with at least 2"):
            event.check_scheme(scheme)
    everyone = charged(SamplingScheme("full", M, M), event, (1.0, 1.0, 2))
    with pytest.raises(ValueError, match="no known cost"):
        tight_epsilon([everyone], DELTA)


def test_the_cost_is_that_of_jax_privacy():
    coarse = accountants.PldAccountantConfig(value_discretization_interval=1e-3)
    accountant = analysis.DpsgdTrainingAccountant(coarse)
    params = analysis.DpParams(
        noise_multipliers=0.8, num_samples=1000, delta=1e-5, batch_size=20, cycle_length=4
    )
    reference = accountant.compute_epsilon(101, params)
    for event in (GAUSSIAN, Banded(coefficients=tuple(square_root(4).tolist()))):
        found = tight_epsilon([charged(CYCLIC, event, (0.8, 0.02, 101))], 1e-5)
        assert found == pytest.approx(reference, rel=2e-3)


def test_without_coins_a_turn_is_one_gaussian_release():
    groups = SamplingScheme("groups", M, 4, groups=G)
    banded_turns = charged(groups, Banded(coefficients=(3.0, 4.0)), (10.0, 1 / G, 7))
    independent = charged(groups, GAUSSIAN, (2.0, 1 / G, 7))  # 10/‖c‖
    always = charged(SamplingScheme("cyclic", M, 4, groups=G), GAUSSIAN, (2.0, 1 / G, 7))
    expected = tight_epsilon([independent], DELTA)
    for plan in (banded_turns, always):
        assert tight_epsilon([plan], DELTA) == pytest.approx(expected, rel=1e-9)
    event = Banded(coefficients=(3.0, 4.0))
    assert event_from(event.to_dict() | {"coefficients": [3.0, 4.0]}) == event


def test_rounds_of_the_largest_rate_may_all_be_one_clients():
    changed = charged(CYCLIC, GAUSSIAN, (1.0, 0.02, 40), (1.0, 0.1, 4))
    often = charged(CYCLIC, GAUSSIAN, (1.0, 0.1, 44))
    assert tight_epsilon([changed], DELTA) == tight_epsilon([often], DELTA)
    assert rdp_epsilon([changed], DELTA) == rdp_epsilon([often], DELTA)


def test_a_full_cohort_of_a_turn_counts_as_known():
    scheme = SamplingScheme("cyclic", 1000, 60, groups=4)
    p = scheme.in_turn(0.05)
    assert p == pytest.approx(0.2)
    (most, chance), (full, known) = scheme.inclusions(0.05)
    assert full == excess(59, 249, p) > 0.05
    assert (most + full, chance, known) == (1, p, 1)
    assert scheme.overflow(0.05) == excess(60, 250, p)
    # In jit by Chernoff's bound, e^(−n KL).
    in_jit = jax.jit(lambda rate: scheme.inclusions_in_jit(rate, jnp))
    for rate in (0.02, 0.04, 0.05, 0.07):
        (_, usual), (bound, _) = in_jit(np.float32(rate))
        true = scheme.inclusions(rate)[1][0]
        assert float(usual) == pytest.approx(4 * rate, rel=1e-6)
        assert true <= float(bound) <= min(1.0, 20 * true)


# --- the noise ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mechanism", "c", "rounds"),
    [
        # C(2j, j)/4^j at j = 0, 1, 2
        (banded(bands=3), np.array([1, 1 / 2, 3 / 8]) / math.hypot(1, 1 / 2, 3 / 8), range(6)),
        (banded(coefficients=(4.0, 3.0)), np.array([0.8, 0.6]), range(900, 903)),
    ],
)
def test_the_banded_matrix_turns_the_noise_into_independent_normals(mechanism, c, rounds):
    message = {"a": jnp.zeros(3), "b": jnp.zeros(())}
    hparams = fjs.Hyperparameters(clip=2.0, noise_multiplier=1.5).as_arrays()
    key = jax.random.key(7, impl="threefry2x32")
    release = jax.jit(lambda t: mechanism.release(zeros(message), 4.0, key, (), hparams, t))
    noise = [release(jnp.int32(t)) for t in rounds]
    assert {float(each.noise_multiplier) for each in noise} == {1.5}
    flat = np.array([[*each.value["a"], each.value["b"]] for each in noise])
    assert mechanism.event.coefficients == pytest.approx(c)
    start = 0 if rounds[0] == 0 else len(c) - 1
    recovered = (matrix(c, len(flat)) @ flat)[start:]
    of_round = jax.jit(lambda t: normal(jax.random.fold_in(key, t), (4,)))
    fresh = [of_round(t) for t in rounds[start:]]
    np.testing.assert_allclose(recovered, 1.5 * 2.0 / 4.0 * np.array(fresh), atol=2e-6)


def test_coefficients_are_those_of_the_square_root_and_any_that_decay():
    c = square_root(64)
    squared = np.convolve(c, c)[:64] / c[0] ** 2  # of 1/(1 − x)
    np.testing.assert_allclose(squared, 1, rtol=1e-12)
    # `toeplitz.optimize_banded_toeplitz(40, 8)` of jax_privacy.
    best = [0.711114, 0.397743, 0.31409, 0.268273, 0.236482, 0.211471, 0.189959, 0.169607]
    event: Any = banded(bands=8, coefficients=best).event
    found = event.coefficients
    np.testing.assert_allclose(found, np.array(best) / np.linalg.norm(best), rtol=1e-6)
    np.testing.assert_allclose(
        np.convolve(inverse_series(found), found)[:30], np.eye(30)[0], atol=1e-12
    )
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"coefficients": (1.0, 1.0)}, "decays"),
        ({"coefficients": (1.0, -2.0)}, "decays"),
        ({"coefficients": (0.0, 1.0)}, "the first positive"),
        ({"coefficients": (1.0, math.nan)}, "finite"),
        ({"coefficients": (1.0, 0.5), "bands": 3}, "bands must be 2"),
        ({"bands": 0}, "bands"),
    )
    for wrong, words in refused:
        with pytest.raises(ValueError, match=words):
            banded(**wrong)
    with pytest.raises(ValueError, match="first one positive"):
        Banded(coefficients=(-1.0,))


# --- the sampler ----------------------------------------------------------------------------------


def test_a_client_has_one_turn_in_each_cycle_and_a_coin_in_it():
    sampler = cyclic(0.1, groups=4).for_clients(42)
    hparams = fjs.Hyperparameters(sampling_rate=0.1).as_arrays()
    assert sampler.scheme.capacity == 11
    assert float(sampler.rate(hparams)) == pytest.approx(0.1)
    check_law(sampler, hparams)
    lying = sampler._replace(rate=lambda hparams: jnp.float32(0.08))
    with pytest.raises(ValueError, match="does not draw as its scheme 'cyclic'"):
        check_law(lying, hparams)
    with pytest.raises(ValueError, match="not a multiple of 4 apart"):
        check_law(sampler._replace(draw=fjs.poisson(0.1).for_clients(42).draw), hparams)


def test_rates_beyond_a_turn_and_the_room_of_a_cohort_are_refused():
    for settings in ({"sampling_rate": 0.26}, {"sampling_rate": 0.1, "max_rate": 0.3}):
        with pytest.raises(ValueError, match="at most 1/4"):
            cyclic(groups=4, **settings)
    with pytest.raises(ValueError, match="max_rate must be at least"):
        cyclic(0.2, groups=4, max_rate=0.1)
    with pytest.raises(ValueError, match="groups"):
        cyclic(groups=5).for_clients(4)
    roomy, usual = (cyclic(0.01, groups=4, max_rate=r).for_clients(2000) for r in (0.1, 0.01))
    assert usual.scheme.capacity < roomy.scheme.capacity < 500
    more = fjs.Hyperparameters(sampling_rate=0.1)
    roomy.check(more)
    with pytest.raises(ValueError, match=r"max_rate must be at least 0\.1"):
        usual.check(more)
    with pytest.raises(ValueError, match="groups in turn"):
        roomy.check(fjs.Hyperparameters(sampling_rate=0.3))


# --- runs -----------------------------------------------------------------------------------------


def simulation(sampling=None, mechanism=None, algorithm=untrained, **settings):
    population, task = classification([4] * M)
    return fjs.Simulation(
        algorithm(task),
        population,
        cyclic(Q, groups=G) if sampling is None else sampling,
        fjs.Minibatches(2, steps=1),
        banded(bands=G) if mechanism is None else mechanism,
        **settings,
    )


@pytest.fixture(scope="module")
def sim():
    return simulation()


def given(sim, **changes):
    values = {"clip": 1.0, "noise_multiplier": Z, "sampling_rate": Q, "learning_rate": 0.1}
    return read_by(sim, **(values | changes))


def run(sim, state, rounds, **changes):
    hparams = given(sim, **changes)
    for _ in range(rounds):
        state, _ = sim.round(state, hparams)
    return state


def epsilon(sim, state):
    return sim.guarantee(state, DELTA).find("zero_out").epsilon


def of_turns(*turns):
    """ε of Poisson rounds at the rate of a turn, the client's chance in its own."""
    scheme = SamplingScheme("poisson", M, M)
    return tight_epsilon([charged(scheme, GAUSSIAN, (Z, G * Q, sum(turns)))], DELTA)


def test_a_run_and_its_stages_cost_the_turns_of_one_client(sim):
    state = run(sim, sim.init(0, given(sim)), 4)
    assert epsilon(sim, state) == pytest.approx(of_turns(2), rel=1e-5)
    assert float(sim.epsilon(state, DELTA)) > of_turns(2)
    other = run(sim, copied(state), 1, noise_multiplier=Z + 1)
    assert epsilon(sim, other) is None
    skipped = dataclasses.replace(state, round=state.round + 1)
    assert epsilon(sim, run(sim, skipped, 1)) is None
    stage = run(sim, sim.start_from(state, given(sim)), 1, clip=0.5)
    assert epsilon(sim, stage) == pytest.approx(of_turns(2, 1), rel=1e-5)


def test_unfit_samplers_are_refused_before_a_run():
    for sampling in (
        fjs.poisson(0.2),
        random_allocation(every=G),
        fixed_groups(groups=G - 1),
        cyclic(groups=G - 1),
        fjs.full_participation(),
    ):
        with pytest.raises(ValueError, match="cyclic or groups, with at least 3 groups"):
            simulation(sampling)


@pytest.mark.thorough
def test_placements_and_batches_of_seeds_draw_the_same():
    """On two devices, streamed, and as a batch of seeds."""
    sim, *others = (
        simulation(algorithm=fjs.fedavg, **settings)
        for settings in ({}, {"streamed": True}, {"devices": jax.devices()[:2]})
    )
    hparams = given(sim)
    state, _ = sim.run(sim.init(3, hparams), hparams, rounds=5)
    for other in others:
        same, _ = other.run(other.init(3, hparams), hparams, rounds=5)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5),
            *(jax.device_get(each.shared) for each in (state, same)),
        )
    batch = fjs.SimulationBatch(sim, [hparams, given(sim, clip=0.5)])
    several, _ = batch.run(batch.init(3), 5)
    first = jax.tree.map(lambda leaf: leaf[0], several.shared)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), first, state.shared)


@pytest.mark.thorough
def test_noise_has_a_derivative_in_both_modes(sim):
    mechanism = banded(bands=2)
    key = jax.random.key(1, impl="threefry2x32")

    def last(z):
        hparams = fjs.Hyperparameters(clip=1.0, noise_multiplier=z)
        out = mechanism.release(zeros(jnp.zeros(3)), 1.0, key, (), hparams, jnp.int32(4))
        return jnp.sum(out.value)

    # The release is z times a number.
    wanted = float(last(jnp.float32(1.0)))
    for derivative in (jax.grad(last), jax.jacfwd(last)):
        assert float(derivative(jnp.float32(2.0))) == pytest.approx(wanted, rel=1e-5)
