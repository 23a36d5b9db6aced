"""Models as pairs of pure functions, and the tasks they learn."""

from fedjaxsim.models.convolution import conv2d, max_pool2d
from fedjaxsim.models.known_risk import known_regression
from fedjaxsim.models.model import Model, in_bfloat16, linear
from fedjaxsim.models.modules import from_equinox, from_flax, from_nnx
from fedjaxsim.models.network import cnn, mlp
from fedjaxsim.models.sequences import gru, transformer
from fedjaxsim.models.task import Task, logistic, one_vs_all, softmax, softmax_sequence, squared

__all__ = [
    "Model",
    "Task",
    "cnn",
    "conv2d",
    "from_equinox",
    "from_flax",
    "from_nnx",
    "gru",
    "in_bfloat16",
    "known_regression",
    "linear",
    "logistic",
    "max_pool2d",
    "mlp",
    "one_vs_all",
    "softmax",
    "softmax_sequence",
    "squared",
    "transformer",
]
