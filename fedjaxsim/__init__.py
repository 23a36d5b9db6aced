"""fedjaxsim: private, personalized federated learning, simulated on one accelerator.

Start with `Simulation`; `algorithm.py` says what an algorithm is, `privacy/mechanisms.py` what the
door is through which everything private must pass.
"""

from fedjaxsim import data, models, optimizers
from fedjaxsim.algorithm import Algorithm, Context
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.fedprox import fedprox
from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.ppsgd import ppsgd
from fedjaxsim.data.minibatches import Batch, ClientData, Minibatches
from fedjaxsim.data.population import Population, split
from fedjaxsim.evaluation import Evaluation
from fedjaxsim.hparams import Hyperparameters
from fedjaxsim.models.model import Model
from fedjaxsim.models.task import Task
from fedjaxsim.privacy.mechanisms import Mechanism, closed, gaussian
from fedjaxsim.privacy.sampling import Sampling, everyone, poisson
from fedjaxsim.simulation import Segment, Simulation, SimulationState

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Batch",
    "ClientData",
    "Context",
    "Evaluation",
    "Hyperparameters",
    "Mechanism",
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
    "everyone",
    "fedavg",
    "fedprox",
    "gaussian",
    "local",
    "models",
    "optimizers",
    "pmtl",
    "poisson",
    "ppsgd",
    "split",
]
