"""The loop of runs: when checkpoints are due, and what counts as divergence."""

import pytest

from fedjaxsim.runs.loop import Cadence, diverged


@pytest.mark.parametrize(
    ("text", "cadence"),
    [
        (None, Cadence()),
        ("10", Cadence(rounds=10)),
        ("10 rounds", Cadence(rounds=10)),
        ("30s", Cadence(seconds=30.0)),
        ("5min", Cadence(seconds=300.0)),
        ("1.5 h", Cadence(seconds=5400.0)),
    ],
)
def test_rounds_and_times_are_told_apart(text, cadence):
    assert Cadence.parse(text) == cadence


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "5 days", "min", "0min"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="checkpoint-every must be rounds, as in 10, or time"):
        Cadence.parse(text)


def test_writing_takes_at_most_a_twentieth_of_the_time_unless_told_otherwise():
    assert [Cadence().is_due(10**6, seconds, 2.0) for seconds in (59, 61)] == [False, True]
    assert [Cadence().is_due(1, seconds, 10.0) for seconds in (199, 201)] == [False, True]
    assert [Cadence(seconds=5.0).is_due(1, seconds, 10.0) for seconds in (4, 6)] == [False, True]
    assert [Cadence(rounds=3).is_due(rounds, 1e9, 0.0) for rounds in (2, 3)] == [False, True]


def test_a_loss_that_grows_tenfold_or_breaks_is_a_divergence():
    def found(*losses):
        return list(diverged([{"train_loss": loss} for loss in losses]))

    assert found(None) == [False]
    assert found(None, 2.0, 0.5, 19.9) == [False] * 4
    assert found(None, 2.0, 0.5, 20.1) == [False, False, False, True]
    assert found(2.0, float("nan"), 2.0) == [False, True, True]
