"""Divergence of runs, from their training losses."""

from fedjaxsim.runs.divergence import diverged, diverging_from


def test_a_loss_that_grows_tenfold_or_breaks_is_a_divergence():
    def found(*losses):
        return list(diverged([{"train_loss": loss} for loss in losses]))

    assert found(None) == [False]
    assert found(None, 2.0, 0.5, 19.9) == [False] * 4
    assert found(None, 2.0, 0.5, 20.1) == [False, False, False, True]
    assert found(2.0, float("nan"), 2.0) == [False, True, True]


def test_a_run_that_ends_diverging_says_since_which_round():
    def since(*losses):
        return diverging_from([{"round": 5 * k, "train_loss": v} for k, v in enumerate(losses)])

    assert since(None, 2.0, 1.0) is since(None, 2.0, 50.0, 1.0) is None
    assert since(None, 2.0, 50.0, 1.0, 50.0, 60.0) == 20
    assert since(None, 2.0, float("inf"), 1.0) == 10
