"""DP-MTRL: multi-task relationship learning of models that are all published with noise."""

import jax

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms.mpmtl import LAM, mpmtl
from fedjaxsim.algorithms.optimizers import COMMON_LEARNING_RATE
from fedjaxsim.algorithms.proximal import RIDGE, Acceleration
from fedjaxsim.algorithms.server_maps import relationship_of_rows
from fedjaxsim.hyperparameters import reads
from fedjaxsim.privacy.mechanisms import CLIP_NORM
from fedjaxsim.tasks.task import Task


@reads(COMMON_LEARNING_RATE, LAM, RIDGE, CLIP_NORM)
def dp_mtrl(task: Task, *, num_clients: int, acceleration: Acceleration = "none") -> Algorithm:
    """DP-MTRL (Gupta, Rana, Phung, Venkatesh 2016), as MP-MTL compares itself with it.

    Objective and descent equal `mpmtl(task, penalty="relationship")`. But the
    mechanism releases every client's model, one row each, clipped and noised; the relationship of
    the tasks is computed from the noised models, and clients continue from them and predict with
    them. Without noise both algorithms are the same.

    The paper adds noise of density ∝ exp(−‖b‖ ε/Δ) to each model, where one example moves the model
    by at most Δ = 2G/(n_i μ), for gradients of norm G and strong convexity μ, and protects a client
    by group privacy at (ε/n, δ/(n e^ε)) for n = max n_i: that is noise for a movement of
    2Gn/(n_i μ). Here `every_row` bounds the movement by a clip to C, whatever the solver did;
    C = Gn/(n_min μ) gives the paper's noise.

    Args:
      task: a linear model with its loss.
      num_clients: m.
      acceleration: Momentum, see `mpmtl`.

    Raises:
      ValueError: see `mpmtl`; when a run starts, if the mechanism does not release a model for each
        client.
    """
    outputs = 1
    if task.linear is not None:
        outputs = jax.eval_shape(task.init, jax.random.key(0))["kernel"].shape[0]
    server_map = relationship_of_rows(num_clients, outputs)
    return mpmtl(task, penalty="relationship", acceleration=acceleration, server_map=server_map)
