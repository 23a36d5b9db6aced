"""Tuning hyperparameters by gradient descent through whole private runs."""

from fedjaxsim.tune.descent import Measured, Path, Step, descend
from fedjaxsim.tune.objective import Grid, SeedGradient, grid_around, measure_grid, mode_for

__all__ = [
    "Grid",
    "Measured",
    "Path",
    "SeedGradient",
    "Step",
    "descend",
    "grid_around",
    "measure_grid",
    "mode_for",
]
