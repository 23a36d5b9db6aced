import numpy as np
from sklearn.datasets import load_digits

from fedjaxsim.data import digits


def test_digits_are_the_scaled_images_of_scikit_learn():
    pixels, labels = load_digits(return_X_y=True)
    assert (digits()["x"].dtype, digits()["y"].dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(digits()["x"] * 16, pixels)
    np.testing.assert_array_equal(digits()["y"], labels)
