"""Tuning hyperparameters by gradient descent through whole private runs."""

from fedjaxsim.tune.descent import Measured, Path, Step, descend
from fedjaxsim.tune.objective import (
    Grid,
    PairedTest,
    SeedGradient,
    grid_around,
    paired_test,
)

__all__ = [
    "Grid",
    "Measured",
    "PairedTest",
    "Path",
    "SeedGradient",
    "Step",
    "descend",
    "grid_around",
    "paired_test",
]
