"""Tuning hyperparameters by gradient descent through whole private runs."""

from fedjaxsim.tune.descent import ObjectiveValue, Step, TuningTrace, descend
from fedjaxsim.tune.objective import Grid, PairedTest, SeedGradient, grid_around, paired_test

__all__ = [
    "Grid",
    "ObjectiveValue",
    "PairedTest",
    "SeedGradient",
    "Step",
    "TuningTrace",
    "descend",
    "grid_around",
    "paired_test",
]
