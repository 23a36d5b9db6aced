"""Tuning hyperparameters by gradient descent through whole private runs."""

from fedjaxsim.tuning.descent import ObjectiveValue, SeedGradient, Step, TuningTrace, descend

__all__ = ["ObjectiveValue", "SeedGradient", "Step", "TuningTrace", "descend"]
