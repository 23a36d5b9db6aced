"""Divergence of runs, from their training losses."""

from fedjaxsim.runs.divergence import diverged


def test_a_loss_that_grows_tenfold_or_breaks_is_a_divergence():
    def found(*losses):
        return list(diverged([{"train_loss": loss} for loss in losses]))

    assert found(None) == [False]
    assert found(None, 2.0, 0.5, 19.9) == [False] * 4
    assert found(None, 2.0, 0.5, 20.1) == [False, False, False, True]
    assert found(2.0, float("nan"), 2.0) == [False, True, True]
