"""Mechanisms that bound, sum and release clients' messages, one per file."""

from fedjaxsim.privacy.mechanisms.adaptive import adaptive_clipping as adaptive_clipping
from fedjaxsim.privacy.mechanisms.base import CLIP_NORM as CLIP_NORM
from fedjaxsim.privacy.mechanisms.base import NOISE_MULTIPLIER as NOISE_MULTIPLIER
from fedjaxsim.privacy.mechanisms.base import Accumulator as Accumulator
from fedjaxsim.privacy.mechanisms.base import Mechanism as Mechanism
from fedjaxsim.privacy.mechanisms.base import Release as Release
from fedjaxsim.privacy.mechanisms.base import accumulate as accumulate
from fedjaxsim.privacy.mechanisms.base import check_noise as check_noise
from fedjaxsim.privacy.mechanisms.base import check_statistics as check_statistics
from fedjaxsim.privacy.mechanisms.base import gaussian as gaussian
from fedjaxsim.privacy.mechanisms.base import no_release as no_release
from fedjaxsim.privacy.mechanisms.base import noise_like as noise_like
from fedjaxsim.privacy.mechanisms.base import noise_scale as noise_scale
from fedjaxsim.privacy.mechanisms.base import noised_mean as noised_mean
from fedjaxsim.privacy.mechanisms.base import release_once as release_once
from fedjaxsim.privacy.mechanisms.base import round_value as round_value
from fedjaxsim.privacy.mechanisms.base import zeros as zeros
from fedjaxsim.privacy.mechanisms.client_noise import client_noise as client_noise
from fedjaxsim.privacy.mechanisms.client_noise import plain_mean as plain_mean
from fedjaxsim.privacy.mechanisms.every_row import every_row as every_row
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram as gaussian_gram
from fedjaxsim.privacy.mechanisms.pure import pure as pure
from fedjaxsim.privacy.mechanisms.pure import pure_gram as pure_gram
from fedjaxsim.privacy.mechanisms.wishart import wishart as wishart
