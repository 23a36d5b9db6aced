"""The list of systems. A new one is a file beside this one, and an entry here.

The command line, its checks, sweeps, tuning, the bench and the tests of what holds for all systems
are derived from it. JAX is not imported, so that the command line knows the systems at once.
"""

import dataclasses
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjaxsim.algorithm import Algorithm

_OPTIMIZERS = ("local_optimizer", "server_optimizer")


@dataclasses.dataclass(frozen=True)
class System:
    """What is known of a system.

    Attributes:
      factory: `(task, **arguments) -> Algorithm`, as "module:function".
      title: its name for people.
      paper: where it is described.
      reads: the hyperparameters that the algorithm reads, besides those of mechanism and sampler.
      arguments: what the factory takes besides the task: settings of a run, or what is made of them
        in `runs.build`.
      door: the mechanism that it has by default, from `privacy.choices.MECHANISMS`; "closed" where
        nothing is sent.
      one_minibatch: whether a round is one minibatch instead of local steps or epochs.
      folds: how often a client goes over the minibatches of a round.
      whole_pass: whether a round is instead one exact pass over a client's rows.
      linear: whether it is for linear models alone.
      everyone: whether all clients take part in every round, unless told otherwise.
      penalties: the choices of its argument "penalty", the default first, and the settings that
        each of them reads; `reads` has those of the default.
      noised_by_clients: whether clients clip and add noise themselves, by the clip norm and the
        noise multiplier that are a mechanism's otherwise.
    """

    factory: str
    title: str
    paper: str
    reads: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    door: str = "gaussian"
    one_minibatch: bool = False
    folds: int = 1
    whole_pass: bool = False
    linear: bool = False
    everyone: bool = False
    penalties: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    noised_by_clients: bool = False

    @property
    def sends(self) -> bool:
        """Whether clients send anything."""
        return self.door != "closed"

    def make(self, task: Any, num_clients: int, **arguments: Any) -> "Algorithm":
        """The algorithm for a task.

        Args:
          task: model and loss.
          num_clients: m, for the systems with it among their arguments.
          **arguments: others of its arguments; the factory's defaults stand in for the rest.
        """
        if "num_clients" in self.arguments:
            arguments["num_clients"] = num_clients
        return pkgutil.resolve_name(self.factory)(task, **arguments)


SYSTEMS = {
    "pmtl": System(
        "fedjaxsim.algorithms.pmtl:pmtl",
        "PMTL",
        "Hu, Wu, Smith; TMLR 2023",
        reads=("learning_rate", "server_learning_rate", "lam"),
        arguments=(*_OPTIMIZERS, "message"),
    ),
    "ditto": System(
        "fedjaxsim.algorithms.ditto:ditto",
        "Ditto",
        "Li, Hu, Beirami, Smith; ICML 2021",
        reads=("learning_rate", "server_learning_rate", "lam"),
        arguments=_OPTIMIZERS,
        folds=2,
    ),
    "ppsgd": System(
        "fedjaxsim.algorithms.ppsgd:ppsgd",
        "PP-SGD",
        "Bietti, Wei, Dudík, Langford, Wu; ICML 2022",
        reads=("learning_rate", "personalization"),
        arguments=("parametrization", "objective", "averaged"),
        one_minibatch=True,
    ),
    "dpfedmtl": System(
        "fedjaxsim.algorithms.dpfedmtl:dpfedmtl",
        "DPFedMTL",
        "Wu, Chen, Wang; 2020",
        reads=("learning_rate", "server_learning_rate"),
        arguments=("head", "order", *_OPTIMIZERS),
    ),
    "dpfedmtl-as-published": System(
        "fedjaxsim.algorithms.dpfedmtl:dpfedmtl_as_published",
        "DPFedMTL as published",
        "Wu, Chen, Wang; 2020, Algorithm 1",
        reads=("learning_rate", "server_learning_rate"),
        arguments=("head", "order", *_OPTIMIZERS),
        door="plain-mean",
        noised_by_clients=True,
    ),
    "fedavg": System(
        "fedjaxsim.algorithms.fedavg:fedavg",
        "FedAvg",
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas; AISTATS 2017",
        reads=("learning_rate", "server_learning_rate"),
        arguments=_OPTIMIZERS,
    ),
    "fedprox": System(
        "fedjaxsim.algorithms.fedprox:fedprox",
        "FedProx",
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith; MLSys 2020",
        reads=("learning_rate", "server_learning_rate", "mu"),
        arguments=_OPTIMIZERS,
    ),
    "mpmtl": System(
        "fedjaxsim.algorithms.mpmtl:mpmtl",
        "MP-MTL",
        "Liang, Liu, Zhou, Jiang, Zhang, Wang; TPAMI 2020",
        reads=("learning_rate", "lam", "ridge"),
        arguments=("penalty", "outliers", "acceleration", "protect_examples"),
        door="gaussian-gram",
        whole_pass=True,
        linear=True,
        everyone=True,
        penalties={
            "low-rank": ("lam",),
            "group-sparse": ("lam",),
            "relationship": ("lam",),
            "decomposed": ("lam", "lam2", "outliers"),
            "decomposed-group-sparse": ("lam", "lam2", "outliers"),
        },
    ),
    "dp-mtrl": System(
        "fedjaxsim.algorithms.dp_mtrl:dp_mtrl",
        "DP-MTRL",
        "Gupta, Rana, Phung, Venkatesh; SDM 2016",
        reads=("learning_rate", "lam", "ridge"),
        arguments=("num_clients", "acceleration"),
        door="every-row",
        whole_pass=True,
        linear=True,
        everyone=True,
    ),
    "stl": System(
        "fedjaxsim.algorithms.stl:stl",
        "STL",
        "the baseline of MP-MTL; TPAMI 2020",
        reads=("learning_rate", "lam", "ridge"),
        arguments=("acceleration",),
        door="closed",
        whole_pass=True,
        linear=True,
        everyone=True,
    ),
    "naive-dp": System(
        "fedjaxsim.algorithms.naive:naive_dp",
        "Naive DP",
        "Hu, Wu, Smith; TMLR 2023, Figure 1",
        reads=("learning_rate", "lam"),
        arguments=("local_optimizer", "num_clients"),
        door="every-row",
    ),
    "local": System(
        "fedjaxsim.algorithms.local:local",
        "Local",
        "the baseline without communication",
        reads=("learning_rate",),
        arguments=("local_optimizer",),
        door="closed",
    ),
    "finetune": System(
        "fedjaxsim.algorithms.finetune:finetune",
        "Fine-tuning",
        "Hu, Wu, Smith; TMLR 2023, section 5.3",
        reads=("learning_rate", "lam"),
        arguments=("penalty", "origin", "local_optimizer"),
        door="closed",
        penalties={"mean": ("lam",), "kl": ("lam",), "ewc": ("lam",), "vanilla": ()},
    ),
}
"""All systems by name, in the order in which they are listed."""
