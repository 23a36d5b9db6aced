# The public names of `fedjaxsim.privacy`, for type checkers and `lazy_loader`.
from . import selection as selection
from .assumptions import default_delta as default_delta
from .calibration import noise_multiplier as noise_multiplier
from .events import PrivacyEvent as PrivacyEvent
from .events import SamplingScheme as SamplingScheme
from .guarantee import Guarantee as Guarantee
from .guarantee import Report as Report
from .guarantee import compose_reports as compose_reports
from .guarantee import report as report
from .mechanisms import Mechanism as Mechanism
from .mechanisms import gaussian as gaussian
from .mechanisms import no_release as no_release
from .mechanisms.adaptive import adaptive_clipping as adaptive_clipping
from .mechanisms.client_noise import client_noise as client_noise
from .mechanisms.client_noise import plain_mean as plain_mean
from .mechanisms.correlated import correlated as correlated
from .mechanisms.every_row import every_row as every_row
from .mechanisms.gram import gaussian_gram as gaussian_gram
from .mechanisms.pure import pure as pure
from .mechanisms.pure import pure_gram as pure_gram
from .mechanisms.wishart import wishart as wishart
from .messages import Messages as Messages
from .samplers import Availability as Availability
from .samplers import Sampler as Sampler
from .samplers import Sampling as Sampling
from .samplers import available as available
from .samplers import full_participation as full_participation
from .samplers import intermittent as intermittent
from .samplers import poisson as poisson
from .samplers import recorded as recorded
from .samplers.fixed import fixed_size as fixed_size
from .samplers.fixed_groups import fixed_groups as fixed_groups
from .samplers.passes import passes as passes

__all__: list[str]
