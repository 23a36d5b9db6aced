"""Laws of the ledger: exact counts under jit, scan and vmap, and derivatives of what it holds."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedjaxsim.data.columns import Preparation
from fedjaxsim.privacy import ledger as ledgers
from fedjaxsim.privacy.entries import MOST_ROUNDS, Entry, SamplingScheme
from fedjaxsim.privacy.events import Gaussian, PrivacySpend
from fedjaxsim.privacy.ledger import charge, entries, no_charges

POISSON, GAUSSIAN = SamplingScheme("poisson", 100, 100), Gaussian()


def empty(places, scheme=POISSON):
    return no_charges(scheme, GAUSSIAN, places)


compiled = jax.jit(charge)


def charged(pairs, places):
    account = empty(places)
    for round_, (z, p) in enumerate(pairs):
        account = compiled(account, z, p, round_)
    return account


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.25, 1.0])), max_size=12)
)
def test_counts_are_those_of_a_dictionary_in_order_of_arrival(pairs):
    counts = {}
    for pair in pairs:
        counts[pair] = counts.get(pair, 0) + 1
    ledger = charged(pairs, 6)
    assert entries(ledger) == [Entry(z, p, n) for (z, p), n in counts.items()]
    assert not ledger.overflowed


def test_a_full_ledger_says_so_and_keeps_what_it_had():
    ledger = charged([(1.0, 0.5), (2.0, 0.5), (1.0, 0.5), (3.0, 0.5)], 2)
    assert ledger.overflowed
    assert entries(ledger) == [Entry(1.0, 0.5, 2), Entry(2.0, 0.5, 1)]
    assert compiled(ledger, 1.0, 0.5, 4).overflowed


def test_a_count_that_would_leave_int32_overflows():
    most = np.iinfo(np.int32).max
    full = dataclasses.replace(charged([(1.0, 1.0)], 1), rounds=jnp.full(1, most))
    ledger = compiled(full, 1.0, 1.0, 1)
    assert ledger.overflowed
    assert entries(ledger) == [Entry(1.0, 1.0, most)]


def test_not_a_number_joins_its_like_alone():
    # However many such rounds: they have no ε, and the ledger says why instead of overflowing.
    nan = float("nan")
    ledger = charged([(nan, 1.0), (1.0, 1.0), (nan, 1.0), (nan, 0.5), (1.0, 1.0)], 3)
    found = [(str(z), p, rounds) for z, p, rounds in entries(ledger)]
    assert found == [("nan", 1.0, 2), ("1.0", 1.0, 2), ("nan", 0.5, 1)]
    assert not ledger.overflowed


def test_scan_counts_exactly_where_float32_sums_stop():
    before = 2**24 - 50  # float32 cannot count beyond 2²⁴.
    first = compiled(empty(1), 0.7, 0.1, 0)
    ledger = dataclasses.replace(first, rounds=jnp.full(1, before))
    ledger, _ = jax.lax.scan(lambda c, _: (charge(c, 0.7, 0.1, 0), None), ledger, length=101)
    assert entries(ledger) == [Entry(float(np.float32(0.7)), float(np.float32(0.1)), before + 101)]


def test_vmap_keeps_the_runs_apart_and_entries_wants_one_run():
    z = jnp.array([0.5, 1.0, 2.0])

    def run(z):
        return jax.lax.scan(lambda c, _: (charge(c, z, 1.0, 0), None), empty(2), length=3)[0]

    batched = jax.jit(jax.vmap(run))(z)
    with pytest.raises(ValueError, match=r"shape \(L,\), got \(3, 2\)"):
        entries(batched)
    for index, value in enumerate([0.5, 1.0, 2.0]):
        one = jax.tree.map(lambda leaf, i=index: leaf[i], batched)
        assert entries(one) == [Entry(value, 1.0, 3)]


def test_every_round_has_its_own_derivative_even_in_a_shared_entry():
    # Σ rounds · z³ over entries is Σ_t z_t³, whose derivative in z_t is 3 z_t².
    def total(z):
        ledger, _ = jax.lax.scan(lambda c, z: (charge(c, z, 1.0, 0), None), empty(3), z)
        return jnp.sum(ledger.rounds * ledger.noise_multiplier**3)

    z = jnp.array([1.0, 2.0, 1.0, 1.0])
    np.testing.assert_allclose(jax.jit(jax.grad(total))(z), [3.0, 12.0, 3.0, 3.0], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(total))(z), [3.0, 12.0, 3.0, 3.0], rtol=1e-6)


def test_values_are_exactly_those_that_were_charged():
    rates = [float(np.float32(rate)) for rate in (1e-7, 0.3, 1.0)]
    z = float(np.float32(0.1))
    assert entries(charged([(z, rate) for rate in rates], 3)) == [Entry(z, p, 1) for p in rates]


def test_places_are_validated():
    with pytest.raises(ValueError, match="places"):
        empty(0)


def test_groups_take_rounds_in_their_order_each_once():
    groups = SamplingScheme("groups", 100, 10, groups=10)

    def overflowed(rounds):
        account = empty(1, groups)
        for round_ in rounds:
            account = compiled(account, 1.0, 0.1, round_)
        return bool(account.overflowed)

    assert not overflowed([0, 1, 2])
    assert overflowed([0, 1, 2, 7])
    assert overflowed([0, 1, 1])
    assert overflowed([0, 1, 0])  # another state with the same account


def test_a_ledger_keeps_an_account_for_every_sampler_and_mechanism():
    fixed = SamplingScheme("fixed", 100, 10)
    ledger = ledgers.Ledger((empty(1),))
    once = ledgers.update(ledger, POISSON, GAUSSIAN, lambda c: compiled(c, 2.0, 0.5, 0))
    assert len(ledgers.announce(once, [PrivacySpend(POISSON, GAUSSIAN, ())]).charges) == 1
    with pytest.raises(ValueError, match=r"'gaussian'.*'fixed'"):
        ledgers.update(once, fixed, GAUSSIAN, lambda c: c)
    both = ledgers.announce(once, [PrivacySpend(fixed, GAUSSIAN, ())], places=2)
    both = ledgers.update(both, fixed, GAUSSIAN, lambda c: compiled(c, 1.0, 0.1, 1))

    @jax.jit
    def twice(ledger, key):
        first = ledgers.drew(ledgers.with_key(ledger, key), key, jnp.int32(0))
        return ledgers.drew(first, key, jnp.int32(1))

    assert ledgers.charged(twice(both, jax.random.key(0))) == [
        (POISSON, GAUSSIAN, (Entry(2.0, 0.5, 1),), False, False),
        (fixed, GAUSSIAN, (Entry(1.0, float(np.float32(0.1)), 1),), False, False),
    ]
    # More rounds were charged than are known to have been drawn.
    assert all(charged.redrawn for charged in ledgers.charged(both))


def test_room_is_made_for_noise_that_is_to_come_and_has_no_place_yet():
    ledger = ledgers.Ledger((charged([(1.0, 0.5), (2.0, 0.5)], 3),))

    def places(noise, rate):
        planned = tuple(Entry(z, rate, 1) for z in noise)
        wide = ledgers.announce(ledger, [PrivacySpend(POISSON, GAUSSIAN, planned)])
        assert entries(wide.charges[0]) == entries(ledger.charges[0])
        return len(wide.charges[0].rounds)

    assert places([1.0, 2.0, 2.0, 1.0], 0.5) == 3
    assert places([3.0], 0.5) == 3
    assert places([1.0, 3.0, 4.0, 5.0], 0.5) == 5
    assert places([1.0, 2.0], 0.25) == 4  # at another rate they are other entries


GROUPS = SamplingScheme("groups", 100, 10, groups=10)
PREPARED = ledgers.spend_of(Preparation("a digest", 100, 2.0))
KEYS = jax.random.split(jax.random.key(0), 12)
ANNOUNCED = st.one_of(
    st.tuples(st.sampled_from([POISSON, GROUPS]), st.sampled_from([1.0, 2.0])),
    st.sampled_from(["a sentence", "another", "stage", 10, 11]),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(ANNOUNCED, max_size=8))
@example([(GROUPS, 1.0), "stage", (GROUPS, 1.0)])
def test_no_charge_sentence_key_or_stage_is_lost_whatever_is_announced(steps):
    ledger = ledgers.announce(ledgers.with_key(ledgers.Ledger(()), KEYS[0]), [PREPARED])
    expected, sentences, keys = Counter({(PREPARED[0], 2.0): 1}), set(), [0]
    stage = in_stage = 0
    for step in steps:
        if step == "stage":
            stage, in_stage = stage + 1, 0
            kinds = [PrivacySpend(scheme, GAUSSIAN, ()) for scheme in (POISSON, GROUPS)]
            ledger = ledgers.announce(ledger, [PREPARED, *kinds], stage=KEYS[stage])
            keys.append(stage)
        elif isinstance(step, str):
            ledger = ledgers.announce(ledger, sentences=[step])
            sentences.add(step)
        elif isinstance(step, int):
            ledger = ledgers.announce(ledger, stream=KEYS[step])
            keys += [] if step in keys else [step]
        else:
            scheme, z = step
            spend = PrivacySpend(scheme, GAUSSIAN, (Entry(z, 0.5, 1),))
            ledger = ledgers.announce(ledger, [PREPARED, spend])
            enter = functools.partial(
                compiled, noise_multiplier=z, sampling_rate=0.5, round_=in_stage
            )
            ledger = ledgers.update(ledger, scheme, GAUSSIAN, enter)
            in_stage += scheme is GROUPS  # whose rounds come in order
            expected[scheme, z] += 1
    counts = Counter[Any]()
    for account in ledger.charges:
        assert not account.overflowed
        for z, _, rounds in entries(account):
            counts[account.scheme, z] += rounds
    assert counts == expected
    in_order = [int(a.next_round) for a in ledger.charges if a.next_round is not None]
    assert {*in_order[:-1]} <= {MOST_ROUNDS}  # a stage closes those before it
    assert {*ledger.public} == sentences
    digests = [ledgers.hex_digest(draws.digest) for draws in ledger.draws]
    assert sorted(digests) == sorted(ledgers.hex_digest(ledgers.key_digest(KEYS[k])) for k in keys)
    assert digests[-1] == ledgers.hex_digest(ledgers.key_digest(KEYS[stage]))
    assert not any(bool(draws.repeated) for draws in ledger.draws)
