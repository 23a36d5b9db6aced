from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from fedjaxsim.data import digits


def test_digits_are_scaled_images():
    fields = digits()
    assert fields["x"].shape == (1797, 64)
    assert fields["x"].dtype == np.float32
    assert (fields["x"].min(), fields["x"].max()) == (0, 1)
    assert set(fields["y"]) == set(range(10))
    assert fields["y"].dtype == np.int32


def test_digits_are_those_of_scikit_learn(monkeypatch):
    pixels, labels = load_digits(return_X_y=True)
    np.testing.assert_array_equal(digits()["x"] * 16, pixels)
    np.testing.assert_array_equal(digits()["y"], labels)
    # Where its file lies elsewhere, scikit-learn itself is asked for it.
    read = digits()
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    for name, values in digits().items():
        np.testing.assert_array_equal(values, read[name], strict=True)
