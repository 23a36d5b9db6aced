"""Mechanisms that bound, sum and release clients' messages, one per file."""

from fedjaxsim.privacy.mechanisms.adaptive import adaptive_clipping
from fedjaxsim.privacy.mechanisms.base import (
    CLIP_NORM,
    NOISE_MULTIPLIER,
    Accumulator,
    Mechanism,
    Release,
    check_noise,
    gaussian,
    no_release,
    noise_like,
    noise_scale,
    round_value,
    zeros,
)
from fedjaxsim.privacy.mechanisms.client_noise import client_noise, plain_mean
from fedjaxsim.privacy.mechanisms.every_row import every_row
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram
from fedjaxsim.privacy.mechanisms.pure import pure, pure_gram
from fedjaxsim.privacy.mechanisms.wishart import wishart

__all__ = [
    "CLIP_NORM",
    "NOISE_MULTIPLIER",
    "Accumulator",
    "Mechanism",
    "Release",
    "adaptive_clipping",
    "check_noise",
    "client_noise",
    "every_row",
    "gaussian",
    "gaussian_gram",
    "no_release",
    "noise_like",
    "noise_scale",
    "plain_mean",
    "pure",
    "pure_gram",
    "round_value",
    "wishart",
    "zeros",
]
