"""The list of systems. A new one is a file in this folder and an entry here, at the end.

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

    `function` is in this folder, as "module:function", and `mechanism` the default one,
    "no-release" if nothing is sent. A round makes `local_passes` over its minibatches, takes
    `one_minibatch`, or makes a `whole_pass` over all rows, exactly. Some need a `linear` model or a
    `softmax` classification, or have `full_participation` by default. `fixed_steps` says why local
    steps take no optimizer and no schedule; "" if they do. Tests of all systems leave out variants,
    which are `variant_of` another with other settings.
    """

    function: str
    title: str
    mechanism: str = "gaussian"
    one_minibatch: bool = False
    local_passes: int = 1
    whole_pass: bool = False
    linear: bool = False
    softmax: bool = False
    full_participation: bool = False
    fixed_steps: str = ""
    variant_of: str = ""

    @property
    def factory(self) -> str:
        """The function, as "module:function"."""
        return f"{__package__}.{self.function}"

    @property
    def sends(self) -> bool:
        """Return whether clients send messages."""
        return self.mechanism != "no-release"

    def make(self, task: Any, num_clients: int, **settings: Any) -> "Algorithm":
        """Make the algorithm for a task, with m for the systems that take it."""
        return make(self.factory, task, supplied={"num_clients": num_clients}, **settings)


_OF_MATRICES: dict[str, Any] = {
    "whole_pass": True, "linear": True, "full_participation": True, "fixed_steps":
    "proximal steps of one η, by which the server's penalty is scaled, have their own momentum"
}  # fmt: skip
SYSTEMS = {
    "pmtl": System("pmtl:pmtl", "PMTL"),
    "ditto": System("ditto:ditto", "Ditto", local_passes=2),
    "ppsgd": System(
        "ppsgd:ppsgd",
        "PP-SGD",
        one_minibatch=True,
        fixed_steps="w and θ_i move by one gradient; the ratio of their steps is the level",
    ),
    "dpfedmtl": System("dpfedmtl:dpfedmtl", "DPFedMTL"),
    "dpfedmtl-as-published": System(
        "dpfedmtl:dpfedmtl_as_published", "DPFedMTL as published", "plain-mean"
    ),
    "fedavg": System("fedavg:fedavg", "FedAvg"),
    "fedprox": System("fedavg:fedprox", "FedProx"),
    "mpmtl": System("mpmtl:mpmtl", "MP-MTL", "gaussian-gram", **_OF_MATRICES),
    "dp-mtrl": System("mpmtl:dp_mtrl", "DP-MTRL", "every-row", **_OF_MATRICES),
    "stl": System("mpmtl:stl", "STL", "no-release", **_OF_MATRICES),
    "naive-dp": System("pmtl:naive_dp", "Naive DP", "every-row"),
    "local": System("local:local", "Local", "no-release"),
    "finetune": System("local:finetune", "Fine-tuning", "no-release", full_participation=True),
    "scaffold": System(
        "scaffold:scaffold",
        "SCAFFOLD",
        fixed_steps="control variates (x − y)/(Kη) are mean gradients for SGD with one η alone",
    ),
    "feddyn": System("feddyn:feddyn", "FedDyn"),
    "qffl": System("fedavg:qffl", "q-FFL"),
    "apfl": System("apfl:apfl", "APFL", local_passes=2),
    "pfedme": System("pfedme:pfedme", "pFedMe"),
    "per-fedavg": System("perfedavg:perfedavg", "Per-FedAvg", local_passes=2),
    "ifca": System("ifca:ifca", "IFCA", local_passes=2),
    "fedala": System("fedala:fedala", "FedALA", local_passes=2),
    "knn-per": System("knnper:knnper", "kNN-Per", softmax=True),
    "fedavgm": System("fedavg:fedavgm", "FedAvgM", variant_of="fedavg"),
    "fedadam": System("fedavg:fedadam", "FedAdam", variant_of="fedavg"),
    "fedyogi": System("fedavg:fedyogi", "FedYogi", variant_of="fedavg"),
    "fedper": System("dpfedmtl:fedper", "FedPer", variant_of="dpfedmtl"),
    "fedrep": System("dpfedmtl:fedrep", "FedRep", local_passes=2, variant_of="dpfedmtl"),
    "fedbn": System("dpfedmtl:fedbn", "FedBN", variant_of="dpfedmtl"),
}
"""A dict of all systems, in the order in which they are listed."""
