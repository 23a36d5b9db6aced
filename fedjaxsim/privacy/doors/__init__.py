"""Mechanisms besides the plain Gaussian one, one per file."""

from fedjaxsim.privacy.doors.adaptive import adaptive_clipping
from fedjaxsim.privacy.doors.client_noise import client_noise, plain_mean
from fedjaxsim.privacy.doors.every_row import every_row
from fedjaxsim.privacy.doors.gram import gaussian_gram
from fedjaxsim.privacy.doors.gram_of_clients import gaussian_gram_of_clients
from fedjaxsim.privacy.doors.pure import pure, pure_gram
from fedjaxsim.privacy.doors.wishart import wishart

__all__ = [
    "adaptive_clipping",
    "client_noise",
    "every_row",
    "gaussian_gram",
    "gaussian_gram_of_clients",
    "plain_mean",
    "pure",
    "pure_gram",
    "wishart",
]
