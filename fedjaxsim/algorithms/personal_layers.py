"""FedPer, FedRep and FedBN: DPFedMTL with fixed personal layers and orders of local steps.

The parameters of all three are PFLlib's step by step.
"""

import jax

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.dpfedmtl import dpfedmtl
from fedjaxsim.algorithms.layers import Selection, paths_of
from fedjaxsim.hyperparameters import reads
from fedjaxsim.models.model import STATISTICS
from fedjaxsim.tasks.task import Task


@reads(optimizers.local_records, optimizers.server_records)
def fedper(
    task: Task, *, head: Selection = None, local_optimizer: optimizers.LocalChoice = "sgd"
) -> Algorithm:
    """FedPer (Arivazhagan et al. 2019): `dpfedmtl` whose head and trunk step together.

    Args:
      task: model and loss.
      head: Layers or parameters that stay with their client, as in `dpfedmtl`.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
    """
    return dpfedmtl(task, head=head, local_optimizer=local_optimizer)


@reads(optimizers.local_records, optimizers.server_records)
def fedrep(
    task: Task,
    *,
    head: Selection = None,
    head_epochs: int | None = None,
    local_optimizer: optimizers.LocalChoice = "sgd",
) -> Algorithm:
    """FedRep (Collins et al. 2021): `dpfedmtl` whose head steps first, then the trunk.

    Args:
      task: model and loss.
      head: Layers or parameters that stay with their client, as in `dpfedmtl`.
      head_epochs: τ, epochs of the head's steps; by default as many steps as of the trunk.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
    """
    return dpfedmtl(
        task,
        head=head,
        order="head-first",
        head_epochs=head_epochs,
        local_optimizer=local_optimizer,
    )


@reads(optimizers.local_records, optimizers.server_records)
def fedbn(
    task: Task, *, head: Selection = None, local_optimizer: optimizers.LocalChoice = "sgd"
) -> Algorithm:
    """FedBN (Li et al. 2021): `dpfedmtl` whose normalization layers are personal.

    All parameters step together. Clients keep scales and offsets, and the running statistics of
    BatchNorm, which local steps update (see `models.from_flax`).

    Args:
      task: model and loss.
      head: Layers or parameters that stay with their client; by default all whose path contains
        "norm", and layers with running statistics.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.

    Raises:
      ValueError: if no head is given and the model has no normalization layers.
    """
    paths = paths_of(jax.eval_shape(task.init, jax.random.key(0)))
    tracked = {_layer(path.removeprefix(STATISTICS)[1:]) for path in paths if _tracked(path)}
    normal = [path for path in paths if "norm" in path.lower() or _layer(path) in tracked]
    if head is None and not normal:
        raise ValueError(
            "fedbn needs a model with normalization layers, such as mlp with layer_norm, or head; "
            f"the parameters are {', '.join(paths)}"
        )
    return dpfedmtl(task, head=normal if head is None else head, local_optimizer=local_optimizer)


def _tracked(path: str) -> bool:
    return path.startswith(f"{STATISTICS}/")


def _layer(path: str) -> str:
    return path.rpartition("/")[0]
