"""The mechanisms and samplers that a run takes by name. A new one is a file, and an entry here.

JAX is not imported, so that the command line knows the names at once.
"""

_DOORS = "fedjaxsim.privacy.mechanisms"

MECHANISMS = {
    "gaussian": "fedjaxsim.privacy.mechanisms:gaussian",
    "adaptive": f"{_DOORS}.adaptive:adaptive_clipping",
    "pure": f"{_DOORS}.pure:pure",
    "client-noise": f"{_DOORS}.client_noise:client_noise",
    "plain-mean": f"{_DOORS}.client_noise:plain_mean",
    "every-row": f"{_DOORS}.every_row:every_row",
    "gaussian-gram": f"{_DOORS}.gram:gaussian_gram",
    "pure-gram": f"{_DOORS}.pure:pure_gram",
    "wishart": f"{_DOORS}.wishart:wishart",
    "closed": "fedjaxsim.privacy.mechanisms:no_release",
}
"""Factories of mechanisms, as "module:function"; those of a Gram matrix take one vector or matrix
as a message."""
SAMPLERS = {
    "poisson": "fedjaxsim.privacy.sampling:poisson",
    "full": "fedjaxsim.privacy.sampling:full_participation",
    "fixed": "fedjaxsim.privacy.samplers.fixed:fixed_size",
    "passes": "fedjaxsim.privacy.samplers.passes:passes",
}
"""Factories of samplers, as "module:function"."""
