"""fedjaxsim: private, personalized federated learning, simulated on one accelerator.

Start with `Simulation`; `algorithm.py` says what an algorithm is, `privacy/mechanisms.py` what the
door is through which everything private must pass.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedjaxsim.algorithms.systems import SYSTEMS

if TYPE_CHECKING:
    from fedjaxsim import data, models, testing
    from fedjaxsim.algorithm import Algorithm, Context
    from fedjaxsim.algorithms import optimizers
    from fedjaxsim.algorithms.ditto import ditto
    from fedjaxsim.algorithms.dp_mtrl import dp_mtrl
    from fedjaxsim.algorithms.dpfedmtl import dpfedmtl, dpfedmtl_as_published
    from fedjaxsim.algorithms.fedavg import fedavg
    from fedjaxsim.algorithms.fedprox import fedprox
    from fedjaxsim.algorithms.finetune import finetune
    from fedjaxsim.algorithms.local import local
    from fedjaxsim.algorithms.mpmtl import mpmtl
    from fedjaxsim.algorithms.naive import naive_dp
    from fedjaxsim.algorithms.pmtl import pmtl
    from fedjaxsim.algorithms.ppsgd import ppsgd
    from fedjaxsim.algorithms.stl import stl
    from fedjaxsim.data.minibatches import Batch, ClientData, Minibatches
    from fedjaxsim.data.population import Population, split
    from fedjaxsim.engine.evaluation import Evaluation
    from fedjaxsim.hparams import Hyperparameters
    from fedjaxsim.models.model import Model
    from fedjaxsim.models.task import Task
    from fedjaxsim.privacy.mechanisms import Mechanism, closed, gaussian
    from fedjaxsim.privacy.messages import Messages
    from fedjaxsim.privacy.sampling import Sampling, everyone, poisson
    from fedjaxsim.simulation import Segment, Simulation, SimulationState

__version__ = "0.1.0"

__all__ = [
    "SYSTEMS",
    "Algorithm",
    "Batch",
    "ClientData",
    "Context",
    "Evaluation",
    "Hyperparameters",
    "Mechanism",
    "Messages",
    "Minibatches",
    "Model",
    "Population",
    "Sampling",
    "Segment",
    "Simulation",
    "SimulationState",
    "Task",
    "closed",
    "data",
    "ditto",
    "dp_mtrl",
    "dpfedmtl",
    "dpfedmtl_as_published",
    "everyone",
    "fedavg",
    "fedprox",
    "finetune",
    "gaussian",
    "local",
    "models",
    "mpmtl",
    "naive_dp",
    "optimizers",
    "pmtl",
    "poisson",
    "ppsgd",
    "split",
    "stl",
    "testing",
]

_MODULES = {
    "data": "data",
    "models": "models",
    "optimizers": "algorithms.optimizers",
    "testing": "testing",
}
_HOMES = {
    "algorithm": ("Algorithm", "Context"),
    "algorithms.ditto": ("ditto",),
    "algorithms.dp_mtrl": ("dp_mtrl",),
    "algorithms.dpfedmtl": ("dpfedmtl", "dpfedmtl_as_published"),
    "algorithms.fedavg": ("fedavg",),
    "algorithms.fedprox": ("fedprox",),
    "algorithms.finetune": ("finetune",),
    "algorithms.local": ("local",),
    "algorithms.mpmtl": ("mpmtl",),
    "algorithms.naive": ("naive_dp",),
    "algorithms.pmtl": ("pmtl",),
    "algorithms.ppsgd": ("ppsgd",),
    "algorithms.stl": ("stl",),
    "data.minibatches": ("Batch", "ClientData", "Minibatches"),
    "data.population": ("Population", "split"),
    "engine.evaluation": ("Evaluation",),
    "hparams": ("Hyperparameters",),
    "models.model": ("Model",),
    "models.task": ("Task",),
    "privacy.mechanisms": ("Mechanism", "closed", "gaussian"),
    "privacy.messages": ("Messages",),
    "privacy.sampling": ("Sampling", "everyone", "poisson"),
    "simulation": ("Segment", "Simulation", "SimulationState"),
}

if not TYPE_CHECKING:
    # With JAX behind it, nothing is imported before it is used: help must not wait for it.
    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{_MODULES[name]}")
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
