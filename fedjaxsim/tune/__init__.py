"""Tuning hyperparameters by gradient descent through whole private runs."""

from fedjaxsim.tune.descent import ObjectiveValue, Step, TuningTrace, descend
from fedjaxsim.tune.objective import SeedGradient

__all__ = [
    "ObjectiveValue",
    "SeedGradient",
    "Step",
    "TuningTrace",
    "descend",
]
