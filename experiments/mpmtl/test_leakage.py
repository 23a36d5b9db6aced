"""What one release shows of a large model, without noise and with it."""

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
