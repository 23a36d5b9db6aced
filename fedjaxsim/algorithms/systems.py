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

_HERE = "fedjaxsim.algorithms"


@dataclasses.dataclass(frozen=True)
class System:
    """A system of the papers, or a baseline.

    Attributes:
      factory: `(task, **settings) -> Algorithm`, as "module:function".
      mechanism: the default, from `privacy.choices.MECHANISMS`; "no-release" if nothing is sent.
      one_minibatch: whether a round is one minibatch instead of local steps or epochs.
      local_passes: number of passes over the minibatches of a round.
      whole_pass: whether a round is one exact pass over a client's rows instead.
      linear: whether it needs a linear model.
      softmax: whether it needs a softmax classification.
      full_participation: whether all clients take part in every round by default.
      variant_of: the system that this one is with other settings; tests of all systems leave
        variants out.
    """

    factory: str
    title: str
    paper: str
    mechanism: str = "gaussian"
    one_minibatch: bool = False
    local_passes: int = 1
    whole_pass: bool = False
    linear: bool = False
    softmax: bool = False
    full_participation: bool = False
    variant_of: str = ""

    @property
    def sends(self) -> bool:
        """Return whether clients send messages."""
        return self.mechanism != "no-release"

    def make(self, task: Any, num_clients: int, **settings: Any) -> "Algorithm":
        """Make the algorithm for a task, with m for the systems that take it."""
        return make(self.factory, task, supplied={"num_clients": num_clients}, **settings)


SYSTEMS = {
    "pmtl": System(f"{_HERE}.pmtl:pmtl", "PMTL", "Hu, Wu, Smith; TMLR 2023"),
    "ditto": System(
        f"{_HERE}.ditto:ditto",
        "Ditto",
        "Li, Hu, Beirami, Smith; ICML 2021",
        local_passes=2,
    ),
    "ppsgd": System(
        f"{_HERE}.ppsgd:ppsgd",
        "PP-SGD",
        "Bietti, Wei, Dudík, Langford, Wu; ICML 2022",
        one_minibatch=True,
    ),
    "dpfedmtl": System(f"{_HERE}.dpfedmtl:dpfedmtl", "DPFedMTL", "Wu, Chen, Wang; 2020"),
    "dpfedmtl-as-published": System(
        f"{_HERE}.dpfedmtl:dpfedmtl_as_published",
        "DPFedMTL as published",
        "Wu, Chen, Wang; 2020, Algorithm 1",
        mechanism="plain-mean",
    ),
    "fedavg": System(
        f"{_HERE}.fedavg:fedavg",
        "FedAvg",
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas; AISTATS 2017",
    ),
    "fedprox": System(
        f"{_HERE}.fedavg:fedprox",
        "FedProx",
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith; MLSys 2020",
    ),
    "mpmtl": System(
        f"{_HERE}.mpmtl:mpmtl",
        "MP-MTL",
        "Liang, Liu, Zhou, Jiang, Zhang, Wang; TPAMI 2020",
        mechanism="gaussian-gram",
        whole_pass=True,
        linear=True,
        full_participation=True,
    ),
    "dp-mtrl": System(
        f"{_HERE}.mpmtl:dp_mtrl",
        "DP-MTRL",
        "Gupta, Rana, Phung, Venkatesh; SDM 2016",
        mechanism="every-row",
        whole_pass=True,
        linear=True,
        full_participation=True,
    ),
    "stl": System(
        f"{_HERE}.mpmtl:stl",
        "STL",
        "the baseline of MP-MTL; TPAMI 2020",
        mechanism="no-release",
        whole_pass=True,
        linear=True,
        full_participation=True,
    ),
    "naive-dp": System(
        f"{_HERE}.pmtl:naive_dp",
        "Naive DP",
        "Hu, Wu, Smith; TMLR 2023, Figure 1",
        mechanism="every-row",
    ),
    "local": System(
        f"{_HERE}.local:local",
        "Local",
        "the baseline without communication",
        mechanism="no-release",
    ),
    "finetune": System(
        f"{_HERE}.local:finetune",
        "Fine-tuning",
        "Hu, Wu, Smith; TMLR 2023, section 5.3",
        mechanism="no-release",
        full_participation=True,
    ),
    "scaffold": System(f"{_HERE}.scaffold:scaffold", "SCAFFOLD", "Karimireddy et al.; ICML 2020"),
    "feddyn": System(f"{_HERE}.feddyn:feddyn", "FedDyn", "Acar et al.; ICLR 2021"),
    "qffl": System(f"{_HERE}.fedavg:qffl", "q-FFL", "Li, Sanjabi, Beirami, Smith; ICLR 2020"),
    "apfl": System(f"{_HERE}.apfl:apfl", "APFL", "Deng, Kamani, Mahdavi; 2020", local_passes=2),
    "pfedme": System(f"{_HERE}.pfedme:pfedme", "pFedMe", "Dinh, Tran, Nguyen; NeurIPS 2020"),
    "per-fedavg": System(
        f"{_HERE}.perfedavg:perfedavg",
        "Per-FedAvg",
        "Fallah, Mokhtari, Ozdaglar; NeurIPS 2020",
        local_passes=2,
    ),
    "ifca": System(f"{_HERE}.ifca:ifca", "IFCA", "Ghosh et al.; NeurIPS 2020", local_passes=2),
    "fedala": System(f"{_HERE}.fedala:fedala", "FedALA", "Zhang et al.; AAAI 2023", local_passes=2),
    "knn-per": System(
        f"{_HERE}.knnper:knnper", "kNN-Per", "Marfoq et al.; ICML 2022", softmax=True
    ),
    "fedavgm": System(
        f"{_HERE}.fedavg:fedavgm", "FedAvgM", "Hsu, Qi, Brown; 2019", variant_of="fedavg"
    ),
    "fedadam": System(
        f"{_HERE}.fedavg:fedadam", "FedAdam", "Reddi et al.; ICLR 2021", variant_of="fedavg"
    ),
    "fedyogi": System(
        f"{_HERE}.fedavg:fedyogi", "FedYogi", "Reddi et al.; ICLR 2021", variant_of="fedavg"
    ),
    "fedper": System(
        f"{_HERE}.dpfedmtl:fedper",
        "FedPer",
        "Arivazhagan et al.; 2019",
        variant_of="dpfedmtl",
    ),
    "fedrep": System(
        f"{_HERE}.dpfedmtl:fedrep",
        "FedRep",
        "Collins et al.; ICML 2021",
        local_passes=2,
        variant_of="dpfedmtl",
    ),
    "fedbn": System(
        f"{_HERE}.dpfedmtl:fedbn", "FedBN", "Li et al.; ICLR 2021", variant_of="dpfedmtl"
    ),
}
"""All systems by name, in the order in which they are listed."""
