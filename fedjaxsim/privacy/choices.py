"""The mechanisms and samplers that a run takes by name. A new one is a file, and an entry here.

JAX is not imported, so that the command line knows them at once.
"""

import pkgutil
from typing import Any, NamedTuple

NOISE = ("clip", "noise_multiplier", "budget")
"""The settings of whoever clips and adds noise: a mechanism, or the clients of some systems."""
_REPORT = ("delta", "accountant")


class Choice(NamedTuple):
    """What is known of a mechanism or a sampler.

    Attributes:
      factory: what makes it, as "module:function".
      reads: the settings of a run that it reads and that not every run does; a mechanism that reads
        "epsilon" is one whose noise can be calibrated.
      takes_clients: whether the factory takes the number of clients.
      options: what else it takes, by name: properties of a run's settings.
    """

    factory: str
    reads: tuple[str, ...] = ()
    takes_clients: bool = False
    options: tuple[str, ...] = ()

    def make(self, num_clients: int, *arguments: Any, **options: Any) -> Any:
        """What the factory makes of the number of clients, where it takes that, and of others."""
        clients = (num_clients,) if self.takes_clients else ()
        return pkgutil.resolve_name(self.factory)(*clients, *arguments, **options)


def _gram(factory: str, *reads: str) -> Choice:
    """One for the Gram matrices of MP-MTL, of which some penalties need the diagonal only."""
    return Choice(f"fedjaxsim.privacy.doors.{factory}", (*NOISE, *reads), options=("diagonal",))


MECHANISMS = {
    "gaussian": Choice("fedjaxsim.privacy.mechanisms:gaussian", (*NOISE, "epsilon", *_REPORT)),
    "adaptive": Choice(
        "fedjaxsim.privacy.doors.adaptive:adaptive_clipping",
        (*NOISE, "epsilon", *_REPORT, "target_quantile", "clip_learning_rate", "count_noise"),
    ),
    "pure": Choice("fedjaxsim.privacy.doors.pure:pure", (*NOISE, "epsilon", *_REPORT)),
    "client-noise": Choice("fedjaxsim.privacy.doors.client_noise:client_noise", NOISE),
    "plain-mean": Choice("fedjaxsim.privacy.doors.client_noise:plain_mean"),
    "every-row": Choice(
        "fedjaxsim.privacy.doors.every_row:every_row", (*NOISE, "epsilon", *_REPORT), True
    ),
    "gaussian-gram": _gram("gram:gaussian_gram", "epsilon", *_REPORT),
    "pure-gram": _gram("pure:pure_gram", "epsilon", *_REPORT),
    "wishart": _gram("wishart:wishart"),
    "closed": Choice("fedjaxsim.privacy.mechanisms:closed"),
}
"""For messages of any shape; those of a Gram matrix for one vector or matrix."""
SAMPLERS = {
    "poisson": Choice("fedjaxsim.privacy.sampling:poisson", ("sampling_rate",), True),
    "everyone": Choice("fedjaxsim.privacy.sampling:everyone", (), True),
    "fixed": Choice("fedjaxsim.privacy.samplers.fixed:fixed_size", ("cohort",), True),
    "passes": Choice(
        "fedjaxsim.privacy.samplers.passes:passes", ("cohort", "max_participations"), True
    ),
}
"""Factories that take, after the number of clients, what they read, in this order."""
