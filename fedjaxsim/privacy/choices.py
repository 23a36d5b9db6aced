"""Mechanisms, samplers and their availabilities: names of "module:function".

A new one is a file and an entry. JAX is not imported, so the command line knows the names at once.
"""

_MECHANISMS = "fedjaxsim.privacy.mechanisms"
_SAMPLERS = "fedjaxsim.privacy.samplers"

MECHANISMS = {
    "gaussian": f"{_MECHANISMS}:gaussian",
    "adaptive": f"{_MECHANISMS}.sums:adaptive_clipping",
    "per-layer": f"{_MECHANISMS}.sums:per_layer",
    "per-part": f"{_MECHANISMS}.sums:per_part",
    "correlated": f"{_MECHANISMS}.sums:correlated",
    "banded": f"{_MECHANISMS}.sums:banded",
    "pure": f"{_MECHANISMS}.sums:pure",
    "client-noise": f"{_MECHANISMS}.sums:client_noise",
    "plain-mean": f"{_MECHANISMS}.sums:plain_mean",
    "every-row": f"{_MECHANISMS}.sums:every_row",
    "gaussian-gram": f"{_MECHANISMS}.gram:gaussian_gram",
    "pure-gram": f"{_MECHANISMS}.gram:pure_gram",
    "wishart": f"{_MECHANISMS}.gram:wishart",
    "no-release": f"{_MECHANISMS}:no_release",
}
"""Mechanisms of a Gram matrix take one vector or matrix per message."""
SAMPLERS = {
    "poisson": f"{_SAMPLERS}:poisson",
    "full": f"{_SAMPLERS}:full_participation",
    "fixed": f"{_SAMPLERS}:fixed_size",
    "groups": f"{_SAMPLERS}:fixed_groups",
    "cyclic": f"{_SAMPLERS}:cyclic",
    "allocation": f"{_SAMPLERS}:random_allocation",
}
AVAILABILITIES = {"intermittent": f"{_SAMPLERS}:intermittent"}
