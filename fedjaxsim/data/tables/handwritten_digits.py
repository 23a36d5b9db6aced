"""Handwritten digits, which come with the package."""

from pathlib import Path

import numpy as np


def digits() -> dict[str, np.ndarray]:
    """Return the 1,797 images of 8x8 pixels, scaled from 0–16 to [0, 1], as flat fields.

    Source: E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits" (UCI, 1998,
    CC BY 4.0), in the order of `sklearn.datasets.load_digits`.

    Returns:
      x: (1797, 64) float32; y: the digit, (1797,) int32.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        return {"x": (file["x"] / 16).astype(np.float32), "y": file["y"].astype(np.int32)}
