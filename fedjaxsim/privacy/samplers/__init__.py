"""Samplers of cohorts, one per file."""

from fedjaxsim.privacy.samplers.availability import Availability as Availability
from fedjaxsim.privacy.samplers.availability import intermittent as intermittent
from fedjaxsim.privacy.samplers.availability import recorded as recorded
from fedjaxsim.privacy.samplers.availability import work_of as work_of
from fedjaxsim.privacy.samplers.base import Cohort as Cohort
from fedjaxsim.privacy.samplers.base import Sampler as Sampler
from fedjaxsim.privacy.samplers.base import Sampling as Sampling
from fedjaxsim.privacy.samplers.base import available as available
from fedjaxsim.privacy.samplers.base import full_participation as full_participation
from fedjaxsim.privacy.samplers.poisson import SAMPLING_RATE as SAMPLING_RATE
from fedjaxsim.privacy.samplers.poisson import default_capacity as default_capacity
from fedjaxsim.privacy.samplers.poisson import poisson as poisson
