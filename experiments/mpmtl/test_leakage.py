"""What one release shows of a large model, and what DP-MTRL's noise leaves of all models."""

from pathlib import Path

import numpy as np
import pytest

from fedjaxsim.privacy.mechanisms.gram import gaussian_gram

SCRIPTS = Path(__file__).parent


@pytest.mark.thorough
def test_a_large_model_shows_in_all_others_unless_there_is_noise(script):
    leakage = script("leakage")
    w = leakage.models()
    large = w[:, -1] / np.linalg.norm(w[:, -1])
    for z, shown in ((0.0, True), (leakage.sound(0.1), False)):
        found = leakage.published(w, gaussian_gram(), z)[:, :-1]
        cosines = large @ (found / np.linalg.norm(found, axis=0))
        assert (cosines.min() > 0.999) == shown


def test_the_noise_of_dp_mtrl_has_its_length_and_vanishes(script):
    dp_mtrl = script("dp_mtrl_noise")
    rng = np.random.default_rng(0)
    w, x, y = rng.normal(size=(4000, 3)), np.zeros((4000, 5, 3)), np.full((4000, 5), 2.0)
    # Residuals are 2 and n = 5: nΔ = 2·2/μ = 8, and a length has mean 3·8/ε and sd √3·8/ε.
    lengths = np.linalg.norm(dp_mtrl.noise(w, x, y, 0.5, 4.0, seed=0), axis=1)
    assert abs(lengths.mean() - 6) < 4 * (3**0.5 * 2) / 4000**0.5
    assert not dp_mtrl.noise(w, x, y, 0.5, np.inf, seed=0).any()
