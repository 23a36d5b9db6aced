# The public names of `fedjaxsim.privacy`, for type checkers and `lazy_loader`.
from .calibration import noise_multiplier as noise_multiplier
from .events import PrivacyEvent as PrivacyEvent
from .events import SamplingScheme as SamplingScheme
from .guarantee import Guarantee as Guarantee
from .guarantee import Report as Report
from .guarantee import default_delta as default_delta
from .guarantee import report as report
from .guarantee import together_published as together_published
from .mechanisms import Mechanism as Mechanism
from .mechanisms import gaussian as gaussian
from .mechanisms import no_release as no_release
from .mechanisms.adaptive import adaptive_clipping as adaptive_clipping
from .mechanisms.client_noise import client_noise as client_noise
from .mechanisms.client_noise import plain_mean as plain_mean
from .mechanisms.every_row import every_row as every_row
from .mechanisms.gram import gaussian_gram as gaussian_gram
from .mechanisms.gram_of_clients import gaussian_gram_of_clients as gaussian_gram_of_clients
from .mechanisms.pure import pure as pure
from .mechanisms.pure import pure_gram as pure_gram
from .mechanisms.wishart import wishart as wishart
from .messages import Messages as Messages
from .samplers.fixed import fixed_size as fixed_size
from .samplers.passes import passes as passes
from .sampling import Sampler as Sampler
from .sampling import Sampling as Sampling
from .sampling import full_participation as full_participation
from .sampling import poisson as poisson

__all__: list[str]
