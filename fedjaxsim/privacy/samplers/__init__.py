"""Samplers of cohorts, one per file."""

from fedjaxsim.privacy.samplers.base import Cohort, Sampler, Sampling, full_participation
from fedjaxsim.privacy.samplers.poisson import SAMPLING_RATE, default_capacity, poisson

__all__ = [
    "SAMPLING_RATE",
    "Cohort",
    "Sampler",
    "Sampling",
    "default_capacity",
    "full_participation",
    "poisson",
]
