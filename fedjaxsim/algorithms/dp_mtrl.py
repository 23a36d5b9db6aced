"""DP-MTRL: multi-task relationship learning of models that are all published with noise."""

import jax

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms.mpmtl import LAM, mpmtl
from fedjaxsim.algorithms.optimizers import LEARNING_RATE
from fedjaxsim.algorithms.proximal import RIDGE, Acceleration
from fedjaxsim.algorithms.server_maps import relationship_of_rows
from fedjaxsim.hyperparameters import reads
from fedjaxsim.privacy.mechanisms import CLIP_NORM
from fedjaxsim.tasks.task import Task


@reads(LEARNING_RATE, LAM, RIDGE, CLIP_NORM)
def dp_mtrl(task: Task, *, num_clients: int, acceleration: Acceleration = "none") -> Algorithm:
    """DP-MTRL (Gupta, Rana, Phung, Venkatesh 2016), as MP-MTL compares itself with it.

    The objective is that of `mpmtl(task, "relationship")`, and so is the proximal gradient descent.
    But what is released is every client's whole model, one row each, clipped and noised; from the
    noised models follow the relationship of the tasks, and what clients go on from and predict
    with. Without noise both are one algorithm.

    The paper adds noise of density ∝ exp(−‖b‖ ε/Δ) to each model, Δ being how far one example can
    move it: 2G/(n_i μ) for gradients of at most G and a strong convexity μ. It protects a client
    through group privacy, at (ε/n, δ/(n e^ε)) for n = max n_i. That is noise for a client that
    moves its model by 2Gn/(n_i μ). Here `every_row` bounds that by a clip to C, which holds
    whatever the solver did, and nothing has to be estimated: C = Gn/(n_min μ) is the paper's noise.

    Args:
      task: a linear model with its loss.
      num_clients: m.
      acceleration: Momentum, as for `mpmtl`.

    Raises:
      ValueError: as `mpmtl`; when a run starts, if the mechanism does not release a model for each
        client.
    """
    outputs = 1
    if task.linear is not None:
        outputs = jax.eval_shape(task.init, jax.random.key(0))["kernel"].shape[0]
    server_map = relationship_of_rows(num_clients, outputs)
    return mpmtl(task, penalty="relationship", acceleration=acceleration, server_map=server_map)
