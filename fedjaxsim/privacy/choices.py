"""The mechanisms and samplers that a run takes by name. A new one is a file, and an entry here.

JAX is not imported, so that the command line knows them at once.
"""

import pkgutil
from typing import Any, NamedTuple

NOISE = ("clip", "noise_multiplier")
"""The settings of whoever clips and adds noise: a mechanism, or the clients of some systems."""
_REPORT = ("delta", "accountant")


class Choice(NamedTuple):
    """What is known of a mechanism or a sampler.

    Attributes:
      factory: what makes it, as "module:function".
      reads: the settings of a run that it reads and that not every run does; a mechanism that reads
        "epsilon" is one whose noise can be calibrated.
      takes_clients: whether the factory takes the number of clients.
    """

    factory: str
    reads: tuple[str, ...] = ()
    takes_clients: bool = False

    def make(self, num_clients: int, *arguments: Any) -> Any:
        """What the factory makes of the number of clients, where it takes that, and of others."""
        clients = (num_clients,) if self.takes_clients else ()
        return pkgutil.resolve_name(self.factory)(*clients, *arguments)


MECHANISMS = {
    "gaussian": Choice("fedjaxsim.privacy.mechanisms:gaussian", (*NOISE, "epsilon", *_REPORT)),
    "adaptive": Choice(
        "fedjaxsim.privacy.doors.adaptive:adaptive_clipping",
        (*NOISE, "epsilon", *_REPORT, "target_quantile", "clip_learning_rate", "count_noise"),
    ),
    "pure": Choice("fedjaxsim.privacy.doors.pure:pure", (*NOISE, *_REPORT)),
    "client-noise": Choice("fedjaxsim.privacy.doors.client_noise:client_noise", NOISE),
    "plain-mean": Choice("fedjaxsim.privacy.doors.client_noise:plain_mean"),
    "every-row": Choice(
        "fedjaxsim.privacy.doors.every_row:every_row", (*NOISE, "epsilon", *_REPORT), True
    ),
    "closed": Choice("fedjaxsim.privacy.mechanisms:closed"),
}
"""For messages of any shape; factories that take the number of clients at most."""
SAMPLERS = {
    "poisson": Choice("fedjaxsim.privacy.sampling:poisson", ("sampling_rate",), True),
    "everyone": Choice("fedjaxsim.privacy.sampling:everyone", (), True),
    "fixed": Choice("fedjaxsim.privacy.samplers.fixed:fixed_size", ("cohort",), True),
    "passes": Choice(
        "fedjaxsim.privacy.samplers.passes:passes", ("cohort", "max_participations"), True
    ),
}
"""Factories that take, after the number of clients, what they read, in this order."""
