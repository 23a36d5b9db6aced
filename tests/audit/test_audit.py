"""Audits of real runs: sound mechanisms are not accused, mechanisms broken on purpose are.

The broken mechanisms are those of benchmarks/audit.py; the table of docs/results/audit.md has all.
"""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from problems import classification, read_by, script

from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.audit.attacks import Attack, Evidence, likelihood_ratio
from fedjaxsim.audit.canaries import DELTAS, audit, lower_bounds
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine import program
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.accounting import gaussian as gdp
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend
from fedjaxsim.privacy.mechanisms import gaussian, no_release
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram, wishart
from fedjaxsim.privacy.messages import Messages
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench():
    return script(ROOT / "benchmarks" / "audit.py")


def small(mechanism, algorithm):
    population, task = classification([5] * 20, features=10, classes=5)
    minibatches = Minibatches(4, steps=2)
    sampling = full_participation() if mechanism.event.kind == "no_release" else poisson(1.0)
    return Simulation(algorithm(task), population, sampling, minibatches, mechanism, chunk_size=3)


PRIVATE = {"lam": 0.1, "clip": 0.5, "noise_multiplier": 2.0}


# --- the statistics -------------------------------------------------------------------------------


def test_perfect_scores_give_the_bound_of_clopper_and_pearson():
    # 100 of each kind test the threshold and none errs. An error rate is then at most
    # u = 1 − (α/2)^(1/100), where α is shared between two values of δ, and ε ≥ ln((1 − u − δ)/u).
    found = lower_bounds(np.ones(200), np.zeros(200), [0.01, 0.2], 0.99, seed=3)
    u = 1 - (0.01 / 2 / 2) ** (1 / 100)
    expected = [math.log((1 - u - delta) / u) for delta in (0.01, 0.2)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_test_that_errs_on_the_other_side_counts_as_well():
    rng = np.random.default_rng(0)
    high, low = rng.normal(size=300) + 3, rng.normal(size=300)
    [forward] = lower_bounds(high, low, [0.05], 0.99, seed=0)
    [mirrored] = lower_bounds(-low, -high, [0.05], 0.99, seed=0)
    assert forward > 1
    assert mirrored > 1


def test_the_confidence_holds_where_the_truth_is_known():
    # Scores N(0, 1) and N(μ, 1): ε(δ) is known exactly. At confidence 0.9, at most one audit in ten
    # may have any bound above it; that 48 or more of 200 do has then probability below 1e-7.
    mu, rng = 0.5, np.random.default_rng(0)
    truth = [gdp.epsilon(delta, mu) for delta in DELTAS]
    wrong = 0
    for seed in range(200):
        bounds = lower_bounds(rng.normal(size=400) + mu, rng.normal(size=400), DELTAS, 0.9, seed)
        wrong += any(bound > epsilon for bound, epsilon in zip(bounds, truth, strict=True))
    assert scipy.stats.binom.sf(47, 200, 0.1) < 1e-7
    assert wrong < 48


# --- canaries in the loop -------------------------------------------------------------------------


def test_an_adversary_sees_its_canaries_clipped_message_and_nothing_of_the_others():
    # ⟨release, d⟩ p m/C is 1 in the rounds in which a sender took part and 0 otherwise, up to noise
    # of standard deviation z, although the other clients train and send what they learned.
    seen, done = [], []
    attack = likelihood_ratio()

    def score(evidence):
        seen.append(evidence)
        return attack.score(evidence)

    z = 1e-3
    sim = small(gaussian(), pmtl)
    result = audit(
        sim,
        sim.hyperparameters(**PRIVATE | {"noise_multiplier": z, "sampling_rate": 0.4}),
        5,
        canaries=14,
        runs=4,
        attack=Attack(attack.observe, score),
        reported=lambda delta: None,
        on_run=lambda *progress: done.append(progress),
    )
    sent = never = 0
    for evidence in seen:
        basis = evidence.directions
        np.testing.assert_allclose(basis @ basis.T, np.eye(14), atol=1e-12)
        x = evidence.observed * 0.4 * 20 / 0.5  # (T, n)
        took_part = evidence.took_part[evidence.ids].T
        assert 0 < evidence.took_part.mean() < 1
        senders = np.any(x > 0.5, axis=0)
        # The largest of 280 normals is below 6.5 with probability 1 − 3e-8.
        assert np.max(np.abs(x - senders * took_part)) < 6.5 * z + 1e-5
        sent += senders.sum()
        never += np.sum(~took_part.any(axis=0))
    assert sent <= result.sent <= sent + never
    assert 0 < result.sent < 56
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [bound.delta for bound in result.bounds] == [1 / 200, *DELTAS]  # 1/(10 m)
    assert not result.violated
    assert "56 canaries" in str(result)
    assert "nothing to refute" in str(result)
    record = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert record["bounds"][0]["reported"] is None


def test_the_score_is_the_log_likelihood_ratio():
    # Two rounds, two canaries; p = 1/4, z = (2, 1), m = 10, C = 1/2, so that x = observed · 5.
    observed = np.array([[0.4, -0.2], [0.0, 0.6]])
    hparams = Hyperparameters(clip=0.5, noise_multiplier=[2.0, 1.0, 9.0])
    evidence = Evidence(
        observed, np.ones((10, 2), bool), np.arange(2), np.eye(2), hparams, 0.25, 10
    )
    found = likelihood_ratio().score(evidence)
    normal = scipy.stats.norm

    def ratio(x, z):
        return 0.75 + 0.25 * normal.pdf(x, 1, z) / normal.pdf(x, 0, z)

    expected = [
        math.log(ratio(2.0, 2) * ratio(0.0, 1)),
        math.log(ratio(-1.0, 2) * ratio(3.0, 1)),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9)

    # Without noise, and so without a clip norm, the messages themselves are added up.
    without = likelihood_ratio().score(evidence._replace(hparams=Hyperparameters()))
    np.testing.assert_allclose(without, [1.0, 1.0])


# --- sound and broken mechanisms ------------------------------------------------------------------

# A sound mechanism is accused with probability at most 1e-6. A broken one goes on stating the
# guarantee of the mechanism it wraps: μ = √T/z = 1 for full participation.


@pytest.fixture(scope="module")
def stated_by_poisson():
    scheme = poisson(0.1).for_clients(100).scheme
    charges = [PrivacySpend(scheme, GAUSSIAN, (Entry(0.6, 0.1, 20),))]
    return composition.profile(charges, "zero_out").epsilon


@pytest.mark.thorough
def test_a_sound_mechanism_is_not_accused_at_full_participation(bench):
    result = bench.with_everyone(gaussian(), runs=5)
    assert not result.violated
    assert "no proof" in str(result)
    assert result.confidence == 1 - 1e-6
    assert result.bounds[0].epsilon > 0  # nor is the audit blind
    assert len(result.noise) == 4  # 20 rounds of all runs are too few for 400 directions
    assert not result.cross_talk
    for bound in result.bounds:
        np.testing.assert_allclose(bound.reported, gdp.epsilon(bound.delta, 1.0), rtol=1e-6)


@pytest.mark.thorough
def test_a_sound_mechanism_is_not_accused_with_poisson_sampling(bench, stated_by_poisson):
    result = bench.with_poisson(gaussian(), runs=25, reported=stated_by_poisson)
    assert not result.violated
    assert result.bounds[0].epsilon > 0


def few(bench, mechanism):
    """Audit 50 canaries among 60 clients, 20 times; bounds on ε see little of so few."""
    return bench.run(
        60, full_participation(), mechanism, bench.quiet,
        bench.FULL | {"noise_multiplier": 1.0}, 4, 50, 20,
    )  # fmt: skip


def test_less_noise_than_bounds_can_see_is_caught_by_the_noise_itself(bench):
    result = few(bench, bench.half_the_noise(gaussian(), 0.7))
    assert result.violated
    assert not any(bound.violated for bound in result.bounds)
    assert not result.cross_talk
    assert all(0.7 < test.found_below < 1 for test in result.noise[:3])
    assert result.noise[0].factor == pytest.approx(0.7, abs=0.04)  # five standard deviations
    assert "noise in all rounds: 0." in str(result)
    # An attack without errors could have shown more than this one did.
    assert all(bound.epsilon < bound.most for bound in result.bounds)


def test_data_of_canaries_that_reach_other_messages_are_caught(bench, monkeypatch):
    def leaking(*given, filled, work=program.work):
        worked, rows = work(*given, filled=filled), given[-1]
        leak = 1e-3 * jnp.max(rows.fields["x"])
        total = jax.tree.map(lambda leaf: leaf + leak, worked.accumulator.total)
        return worked._replace(accumulator=worked.accumulator._replace(total=total))

    monkeypatch.setattr(program, "work", leaking)
    result = few(bench, gaussian())
    assert result.cross_talk
    assert result.violated
    assert not any(test.violated for test in (*result.bounds, *result.noise))
    assert "changed what the server published" in str(result)
    assert json.loads(json.dumps(result.to_json()))["cross_talk"]


@pytest.mark.thorough
def test_noise_with_each_chunk_is_caught(bench, stated_by_poisson):
    mechanism = bench.noise_per_chunk(gaussian(), bench.poisson_chunks())
    assert bench.with_poisson(
        mechanism, runs=25, algorithm=bench.quiet, reported=stated_by_poisson
    ).violated


def noise_per_shard(patch, share):
    """Each of two devices adds noise of so much of the whole deviation to its own sum."""

    told = {}

    def remembered(self, state, hparams, rows, drawn, work=program.Program.work):
        told.update(key=drawn.noise, deviation=hparams.noise_multiplier * hparams.clip)
        return work(self, state, hparams, rows, drawn)

    def noised(*given, filled, work=program.work):
        worked = work(*given, filled=filled)
        total = worked.accumulator.total
        key = jax.random.fold_in(told["key"], jax.lax.axis_index("clients"))
        noise = share * told["deviation"] * jax.random.normal(key, total.shape)
        return worked._replace(accumulator=worked.accumulator._replace(total=total + noise))

    patch.setattr(program.Program, "work", remembered)
    patch.setattr(program, "work", noised)


def without_noise(mechanism):
    """The mechanism that leaves noise to the shards, and charges it."""

    def release(accumulator, denominator, key, state, hparams, round_):
        none = hparams.replace(noise_multiplier=0.0)
        out = mechanism.release(accumulator, denominator, key, state, none, round_)
        return out._replace(noise_multiplier=hparams.noise_multiplier)

    return mechanism._replace(release=release)


@pytest.mark.thorough
def test_mechanisms_are_judged_alike_on_shards(bench, monkeypatch):
    settings = {
        "runs": 5,
        "algorithm": bench.quiet,
        "devices": jax.devices()[:2],
        "reported": lambda delta: gdp.epsilon(delta, 1.0),
    }
    sound = bench.with_everyone(gaussian(), **settings)
    assert not sound.violated
    assert sound.bounds[0].epsilon > 0
    assert bench.with_everyone(bench.half_the_noise(gaussian()), **settings).violated
    free = bench.unclipped(gaussian(), range(0, 420, 2))
    assert bench.with_everyone(free, **settings).violated
    for share, wrong in ((math.sqrt(1 / 2), False), (1 / 2, True)):  # variances add up
        with monkeypatch.context() as patch:
            noise_per_shard(patch, share)
            mechanism = without_noise(gaussian())
            assert bench.with_everyone(mechanism, **settings | {"runs": 40}).violated == wrong


@pytest.mark.thorough
def test_a_realised_denominator_is_caught_by_one_who_reads_it(bench, stated_by_poisson):
    assert bench.with_poisson(
        bench.realised_denominator(gaussian()),
        runs=40,
        algorithm=bench.quiet,
        attack=bench.reads_the_cohort_size(),
        reported=stated_by_poisson,
    ).violated


def test_the_published_epsilon_of_the_wishart_mechanism_is_refuted(bench):
    # One release of 5 × 5 matrices at ε = 1, with one canary: the mechanism alone, in a batch.
    mechanism, size, n = wishart(), 5, 800
    hparams = Hyperparameters(clip=2.0, noise_multiplier=1.0).as_arrays()
    sends = np.random.default_rng(0).random(n) < 0.5
    w = np.zeros((1, size))
    w[0, 2] = 1.0

    @jax.vmap
    def release(key, send):
        message = send * 2.0 * w
        total = mechanism.add(
            mechanism.zero(message[0], 1),
            Messages(message),
            jnp.ones(1, bool),
            jnp.zeros(1, jnp.int32),
            (),
            hparams,
        )
        return mechanism.release(total, 1.0, key, (), hparams, 0).value

    releases = release(jax.random.split(jax.random.key(0), n), sends.astype(np.float32))

    observed = np.asarray(releases, np.float64)[:, None]
    score = np.array(
        [
            bench.support().score(Evidence(one, np.ones((1, 1)), np.zeros(1), w, hparams, 1.0, 1))
            for one in observed
        ]
    ).ravel()
    # A release that no sender can produce happens to the others with probability 1 − 1/e.
    assert np.all(score[sends] > -1)
    impossible = int(np.sum(score[~sends] < -1))
    low, high = scipy.stats.binom.ppf([5e-7, 1 - 5e-7], np.sum(~sends), 1 - math.exp(-1))
    assert low <= impossible <= high
    [bound] = lower_bounds(score[sends], score[~sends], [0.01], 1 - 1e-6, seed=0)
    assert bound > 1.0


def test_numbers_in_the_documentation_are_those_of_the_results(bench):
    rows = json.loads(bench.RESULTS.read_text())
    printed = [line.split(" | ") for line in bench.table(rows).splitlines()[2:]]
    measured = {(cells[5], cells[6], cells[7] == "refuted") for cells in printed}
    page = (ROOT / "docs" / "results" / "audit.md").read_text()
    shown = re.findall(r"\| ([\d.]+), (\**)([\d.]+)\**(?:: not refuted)? \|", page)
    assert len(shown) == 10
    assert {(reported, found, bool(bold)) for reported, bold, found in shown} <= measured
    assert all(row["sound"] for row in rows if not row["result"]["violated"] and not row["tests"])
    assert not any(row["result"]["violated"] for row in rows if row["sound"])
    for name in {row["mechanism"] for row in rows if not row["sound"]}:
        assert any(row["result"]["violated"] for row in rows if row["mechanism"] == name)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"confidence": 1.0}, "confidence"),
        ({"delta": 0.0}, "delta"),
        ({"runs": 0}, "runs"),
        ({"rounds": 0}, "rounds"),
        ({"canaries": 21}, "canaries"),
        ({"canaries": 0}, "canaries"),
        ({"canaries": [3, 20]}, r"client ids.*\[3, 20\]"),
        ({"canaries": [3, 3]}, r"client ids.*\[3, 3\]"),
        ({"canaries": 5, "runs": 7}, "5 times 7"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    sim = small(gaussian(), pmtl)
    with pytest.raises(ValueError, match=message):
        audit(sim, sim.hyperparameters(**PRIVATE), **{"rounds": 2, **settings})


def test_mechanisms_that_the_attack_cannot_read_are_refused(bench):
    closed = small(no_release(), local)
    with pytest.raises(ValueError, match="sends nothing"):
        audit(closed, closed.hyperparameters(), 2)
    gram = small(gaussian_gram(), lambda task: bench.silent(task, 6))
    with pytest.raises(ValueError, match="attack"):
        audit(gram, read_by(gram, **PRIVATE), 2)
