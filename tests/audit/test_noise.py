"""Tests of the noise in an audit: what they accuse, what they spare, and what they promise."""

import numpy as np
import pytest
import scipy.stats

from fedjaxsim.audit.attacks import noise_tests

RUNS, ROUNDS, N, Z = 60, 8, 20, 4.0
CONFIDENCE = 1 - 1e-6


def of_parts(noise, scale=1.0):
    """The tests of releases with this noise over its charged deviation, by part."""
    present = np.random.default_rng(1).random((RUNS, ROUNDS, N)) < 0.5
    signal = scale * (present + Z * noise)
    return {
        test.part: test for test in noise_tests(signal, present, np.full(ROUNDS, Z), CONFIDENCE)
    }


def normal(seed, shape=(RUNS, ROUNDS, N)):
    return np.random.default_rng(seed).normal(size=shape)


BROKEN = {
    "noise × 0.7": (lambda g: 0.7 * g, "all rounds"),
    "one noise for all rounds": (lambda g: g[:, :1] + 0 * g, "a combination of rounds"),
    "one noise for all runs": (lambda g: g[:1] + 0 * g, "differences of runs"),
    "no noise in one round": (lambda g: g * (np.arange(ROUNDS) != 5)[:, None], "one round"),
    "noise that the next round takes back": (
        lambda g: g - np.roll(g, 1, axis=1) * (np.arange(ROUNDS) > 0)[:, None],
        "a combination of rounds",
    ),
    "one number of noise for all coordinates": (
        lambda g: g[..., :1] * np.random.default_rng(2).normal(size=N),
        "a combination of directions",
    ),
}


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_sound_noise_passes_at_any_scale_and_broken_noise_does_not(scale):
    found = of_parts(normal(0), scale)
    assert not any(test.violated for test in found.values())
    # The deviation is found up to the errors of 9,600 squares and of the mean message.
    assert found["all rounds"].factor == pytest.approx(1, abs=0.15)
    assert {part for _, part in BROKEN.values()} == found.keys()
    for name, (broken, part) in BROKEN.items():
        assert of_parts(broken(normal(0)), scale)[part].violated, name


def test_more_noise_than_charged_is_no_violation():
    assert not any(test.violated for test in of_parts(1.5 * normal(0)).values())


def test_a_missing_clip_is_missing_noise():
    # A message of norm 2C, behind the noise that is charged for C.
    rng = np.random.default_rng(3)
    present = rng.random((RUNS, ROUNDS, N)) < 0.5
    signal = 2 * present + Z * normal(0)
    found = noise_tests(signal, present, np.full(ROUNDS, Z), CONFIDENCE)
    assert found[0].violated


def test_without_messages_nothing_is_known():
    none = np.zeros((RUNS, ROUNDS, N), bool)
    assert noise_tests(normal(0), none, np.full(ROUNDS, Z), CONFIDENCE) == ()


def test_sound_noise_is_accused_as_rarely_as_stated_and_weak_noise_found_as_often():
    # Of 100 audits at confidence 0.9 at most 10 may accuse, 29 with probability below 1e-7; noise
    # of the stated factor is found in 95 of 100, in fewer than 82 with probability below 1e-5.
    assert scipy.stats.binom.sf(28, 100, 0.1) < 1e-7
    assert scipy.stats.binom.cdf(81, 100, 0.95) < 1e-5
    accused = found = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        noise, present = rng.normal(size=(4, 5, 40)), rng.random((4, 5, 40)) < 0.5
        sound, *_ = tests = noise_tests(present + noise, present, np.ones(5), 0.9)
        accused += any(test.violated for test in tests)
        weak, *_ = noise_tests(present + sound.found_below * noise, present, np.ones(5), 0.9)
        found += weak.violated
    assert accused < 29
    assert found >= 82
