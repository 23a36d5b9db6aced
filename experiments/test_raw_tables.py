"""What the script of raw tables adds: censored times, and models of statsmodels on their rows."""

from pathlib import Path

import numpy as np
import pytest

from fedjaxsim.data.population import Population

SCRIPTS = Path(__file__).parent / "tables"


@pytest.fixture(scope="module")
def raw(script):
    return script("raw")


def test_the_share_of_right_pairs_is_harrells(raw):
    # Comparable: 1 before 2 (censored) and 3; 3 before nobody; a tie of scores counts one half.
    times, hazards = np.array([1.0, -2.0, 3.0]), np.array([2.0, 2.0, 1.0])
    assert raw.concordance(hazards, times) == 0.75
    assert np.isnan(raw.concordance(hazards, -np.abs(times)))


def test_counts_are_fitted_with_their_exposure(raw, monkeypatch):
    pytest.importorskip("statsmodels")
    exposure = np.tile([1.0, 2.0, 4.0, 8.0], 4).astype(np.float32)
    x = np.repeat([[0.0], [1.0]], 8, axis=0).astype(np.float32)
    y = exposure * np.where(x[:, 0] > 0, 3, 5)  # rates of 5 and 3, exactly
    fields = {"x": x, "y": y, "exposure": exposure}
    population = Population.from_flat(fields, counts=[[6, 0, 2], [6, 0, 2]])
    errors = raw.fitted("Fatalities", population)
    np.testing.assert_allclose([errors["pooled"], errors["GEE"]], 0, atol=1e-6)
