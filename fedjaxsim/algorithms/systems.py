"""The list of systems. A new one is a file beside this one and an entry here, at the end.

For the Python API its name also stands in `fedjaxsim/__init__.pyi` and `docs/reference/api.md`.

The command line, sweeps, tuning, the bench and the tests for all systems read it. JAX is not
imported, so that the command line knows the names at once.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from fedjaxsim.factories import make

if TYPE_CHECKING:
    from fedjaxsim.algorithm import Algorithm


@dataclasses.dataclass(frozen=True)
class System:
    """A system of the papers, or a baseline.

    Attributes:
      factory: `(task, **settings) -> Algorithm`, as "module:function".
      title: display name.
      paper: reference.
      mechanism: its default mechanism, from `privacy.choices.MECHANISMS`; "no-release" where
        nothing is sent.
      one_minibatch: whether a round is one minibatch instead of local steps or epochs.
      local_passes: number of passes over the minibatches of a round.
      whole_pass: whether a round is one exact pass over a client's rows instead.
      linear: whether it needs a linear model.
      full_participation: whether all clients take part in every round by default.
    """

    factory: str
    title: str
    paper: str
    mechanism: str = "gaussian"
    one_minibatch: bool = False
    local_passes: int = 1
    whole_pass: bool = False
    linear: bool = False
    full_participation: bool = False

    @property
    def sends(self) -> bool:
        """Return whether clients send messages."""
        return self.mechanism != "no-release"

    def make(self, task: Any, num_clients: int, **settings: Any) -> "Algorithm":
        """Make the algorithm for a task.

        Args:
          task: model and loss.
          num_clients: m, for the systems that take it.
          **settings: other arguments of the factory.
        """
        return make(self.factory, task, supplied={"num_clients": num_clients}, **settings)


SYSTEMS = {
    "pmtl": System("fedjaxsim.algorithms.pmtl:pmtl", "PMTL", "Hu, Wu, Smith; TMLR 2023"),
    "ditto": System(
        "fedjaxsim.algorithms.ditto:ditto",
        "Ditto",
        "Li, Hu, Beirami, Smith; ICML 2021",
        local_passes=2,
    ),
    "ppsgd": System(
        "fedjaxsim.algorithms.ppsgd:ppsgd",
        "PP-SGD",
        "Bietti, Wei, Dudík, Langford, Wu; ICML 2022",
        one_minibatch=True,
    ),
    "dpfedmtl": System(
        "fedjaxsim.algorithms.dpfedmtl:dpfedmtl", "DPFedMTL", "Wu, Chen, Wang; 2020"
    ),
    "dpfedmtl-as-published": System(
        "fedjaxsim.algorithms.dpfedmtl:dpfedmtl_as_published",
        "DPFedMTL as published",
        "Wu, Chen, Wang; 2020, Algorithm 1",
        mechanism="plain-mean",
    ),
    "fedavg": System(
        "fedjaxsim.algorithms.fedavg:fedavg",
        "FedAvg",
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas; AISTATS 2017",
    ),
    "fedprox": System(
        "fedjaxsim.algorithms.fedprox:fedprox",
        "FedProx",
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith; MLSys 2020",
    ),
    "mpmtl": System(
        "fedjaxsim.algorithms.mpmtl:mpmtl",
        "MP-MTL",
        "Liang, Liu, Zhou, Jiang, Zhang, Wang; TPAMI 2020",
        mechanism="gaussian-gram",
        whole_pass=True,
        linear=True,
        full_participation=True,
    ),
    "dp-mtrl": System(
        "fedjaxsim.algorithms.dp_mtrl:dp_mtrl",
        "DP-MTRL",
        "Gupta, Rana, Phung, Venkatesh; SDM 2016",
        mechanism="every-row",
        whole_pass=True,
        linear=True,
        full_participation=True,
    ),
    "stl": System(
        "fedjaxsim.algorithms.stl:stl",
        "STL",
        "the baseline of MP-MTL; TPAMI 2020",
        mechanism="no-release",
        whole_pass=True,
        linear=True,
        full_participation=True,
    ),
    "naive-dp": System(
        "fedjaxsim.algorithms.naive:naive_dp",
        "Naive DP",
        "Hu, Wu, Smith; TMLR 2023, Figure 1",
        mechanism="every-row",
    ),
    "local": System(
        "fedjaxsim.algorithms.local:local",
        "Local",
        "the baseline without communication",
        mechanism="no-release",
    ),
    "finetune": System(
        "fedjaxsim.algorithms.finetune:finetune",
        "Fine-tuning",
        "Hu, Wu, Smith; TMLR 2023, section 5.3",
        mechanism="no-release",
    ),
}
"""All systems by name, in the order in which they are listed."""
