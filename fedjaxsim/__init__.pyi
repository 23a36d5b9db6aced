# The public names of the package: for type checkers, and for `lazy_loader`, which imports each
# from here when it is first used.
from . import audit as audit
from . import callbacks as callbacks
from . import data as data
from . import gradients as gradients
from . import models as models
from . import privacy as privacy
from . import sweep as sweep
from . import tasks as tasks
from . import testing as testing
from .algorithm import Algorithm as Algorithm
from .algorithm import Context as Context
from .algorithm import WarmStart as WarmStart
from .algorithms import optimizers as optimizers
from .algorithms.ditto import ditto as ditto
from .algorithms.dp_mtrl import dp_mtrl as dp_mtrl
from .algorithms.dpfedmtl import dpfedmtl as dpfedmtl
from .algorithms.dpfedmtl import dpfedmtl_as_published as dpfedmtl_as_published
from .algorithms.fedavg import fedavg as fedavg
from .algorithms.fedprox import fedprox as fedprox
from .algorithms.finetune import finetune as finetune
from .algorithms.local import local as local
from .algorithms.mpmtl import mpmtl as mpmtl
from .algorithms.naive import naive_dp as naive_dp
from .algorithms.pmtl import pmtl as pmtl
from .algorithms.ppsgd import ppsgd as ppsgd
from .algorithms.stl import stl as stl
from .algorithms.systems import SYSTEMS as SYSTEMS
from .data.minibatches import Batch as Batch
from .data.minibatches import ClientData as ClientData
from .data.minibatches import Minibatches as Minibatches
from .data.population import Population as Population
from .engine.batch import batch as batch
from .engine.devices import use_all_cores as use_all_cores
from .engine.evaluation import Evaluation as Evaluation
from .engine.program import Program as Program
from .engine.segments import History as History
from .engine.segments import Segment as Segment
from .engine.shard import shard as shard
from .engine.stream import stream as stream
from .hyperparameters import Hyperparameter as Hyperparameter
from .hyperparameters import Hyperparameters as Hyperparameters
from .hyperparameters import reads as reads
from .models.model import Model as Model
from .privacy.mechanisms import Mechanism as Mechanism
from .privacy.mechanisms import gaussian as gaussian
from .privacy.mechanisms import no_release as no_release
from .privacy.messages import Messages as Messages
from .privacy.samplers import Sampling as Sampling
from .privacy.samplers import full_participation as full_participation
from .privacy.samplers import poisson as poisson
from .simulation import Simulation as Simulation
from .simulation import SimulationState as SimulationState
from .tasks.task import Task as Task

__all__: list[str]
__version__: str
