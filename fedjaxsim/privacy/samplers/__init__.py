"""Samplers of cohorts, one per file."""

from fedjaxsim.privacy.samplers.availability import Availability, intermittent, recorded, work_of
from fedjaxsim.privacy.samplers.base import (
    Cohort,
    Sampler,
    Sampling,
    available,
    full_participation,
)
from fedjaxsim.privacy.samplers.poisson import SAMPLING_RATE, default_capacity, poisson

__all__ = [
    "SAMPLING_RATE",
    "Availability",
    "Cohort",
    "Sampler",
    "Sampling",
    "available",
    "default_capacity",
    "full_participation",
    "intermittent",
    "poisson",
    "recorded",
    "work_of",
]
