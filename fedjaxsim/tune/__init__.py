"""Tuning hyperparameters by gradient descent through whole private runs."""

from fedjaxsim.tune.descent import Measured, Path, Step, descend
from fedjaxsim.tune.objective import Grid, SeedGradient, grid_around, measure_grid, mode_for
from fedjaxsim.tune.rules import Optax, Place, Quadratic, Rule

__all__ = [
    "Grid",
    "Measured",
    "Optax",
    "Path",
    "Place",
    "Quadratic",
    "Rule",
    "SeedGradient",
    "Step",
    "descend",
    "grid_around",
    "measure_grid",
    "mode_for",
]
