"""The handwritten digits that come with scikit-learn: real images without a download."""

import importlib.util
from pathlib import Path

import numpy as np


def digits() -> dict[str, np.ndarray]:
    """Return the 1,797 images of 8x8 pixels, scaled from 0–16 to [0, 1], as flat fields.

    Source: E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits" (UCI, 1998).

    Returns:
      x: (1797, 64) float32; y: the digit, (1797,) int32.
    """
    table = _table()
    return {"x": (table[:, :64] / 16).astype(np.float32), "y": table[:, 64].astype(np.int32)}


def _table() -> np.ndarray:
    """Return pixels and, in the last column, the digit, (1797, 65)."""
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        # Importing scikit-learn takes as long as importing JAX; reading its file takes no time.
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return np.column_stack([np.asarray(x), np.asarray(y)])
