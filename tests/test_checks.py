"""Range checks: what passes, and the message of what does not."""

import math
import re

import numpy as np
import pytest

from fedjaxsim import checks

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (checks.positive, [1e-30, 1, np.float32(2)], [0, -1, INF, NAN, "1", None]),
        (checks.non_negative, [0, 0.0, 5], [-1e-30, INF, NAN, [1], None]),
        (lambda **x: checks.in_range("[0, inf]", **x), [0, 1, INF], [-1, NAN, "a"]),
        (
            lambda **x: checks.in_range("[0, 1]", **x),
            [0, 1, np.array([0.5, 1])],
            [2, np.array([0, 2])],
        ),
        (lambda **x: checks.in_range("(0, 1)", **x), [0.5, 5e-324], [0, 1, NAN, None]),
        (checks.count, [1, np.int64(7)], [0, -1, 1.0, True, "1", None, INF, np.array([1, 2])]),
        (lambda **x: checks.count(0, **x), [0, 10**12], [-1, False]),
        (lambda **x: checks.count(1, 3, **x), [1, 3], [0, 4]),
        (lambda **x: checks.one_of(("a", "b"), **x), ["a", "b"], ["c", "", None, ["a"], 1]),
        (lambda **x: checks.one_of((1, 2), **x), [1, 2], [3, 1.0, "1"]),
    ],
)
def test_a_check_passes_what_is_allowed_and_names_what_is_not(check, good, bad):
    check(**{f"x{number}": value for number, value in enumerate(good)})
    for value in bad:
        with pytest.raises(ValueError, match=r"^the_name must .*, got "):
            check(fine=good[0], the_name=value)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: checks.positive(lr=-1), "lr must be positive and finite, got -1"),
        (lambda: checks.in_range("(0, 1]", p=1.5), "p must lie in (0, 1], got 1.5"),
        (lambda: checks.in_range("(0, 1)", delta=1), "delta must lie in (0, 1), got 1"),
        (lambda: checks.count(rounds=0), "rounds must be an integer of at least 1, got 0"),
        (lambda: checks.count(1, 9, size=10), "size must be an integer in [1, 9], got 10"),
        (
            lambda: checks.one_of(("forward", "reverse"), mode="revers"),
            "mode must be one of forward, reverse, got 'revers' (did you mean 'reverse'?)",
        ),
    ],
)
def test_the_message_says_name_range_and_value(check, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.ones((2, 3), np.float32), "an array float32[2, 3]"),
        (np.float32, "the class float32"),
        (np.ndarray, "the class ndarray"),
        (None, "None"),
        ([1], "a list"),
    ],
)
def test_values_are_described_in_a_few_words(value, words):
    assert checks.described(value) == words
