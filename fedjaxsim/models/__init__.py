"""Models as pairs of pure functions, and the tasks they learn."""

from fedjaxsim.models.known import known_regression
from fedjaxsim.models.model import Model, cnn, from_flax, linear, mlp
from fedjaxsim.models.task import Task, logistic, one_vs_all, softmax, squared

__all__ = [
    "Model",
    "Task",
    "cnn",
    "from_flax",
    "known_regression",
    "linear",
    "logistic",
    "mlp",
    "one_vs_all",
    "softmax",
    "squared",
]
