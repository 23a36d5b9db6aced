"""The handwritten digits that come with scikit-learn: real images without a download."""

import numpy as np


def digits() -> dict[str, np.ndarray]:
    """All 1,797 images of 8x8 pixels, scaled from 0–16 to [0, 1], as flat fields to partition.

    Source: E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits" (UCI, 1998).

    Returns:
        x: (1797, 64) float32; y: the digit, (1797,) int32.
    """
    from sklearn.datasets import load_digits  # a second of imports that nothing else needs

    x, y = load_digits(return_X_y=True)
    return {"x": (np.asarray(x) / 16).astype(np.float32), "y": np.asarray(y).astype(np.int32)}
