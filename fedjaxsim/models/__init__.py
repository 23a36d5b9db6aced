"""Models as pairs of pure functions, and the tasks they learn."""

from fedjaxsim.models.model import Model, cnn, from_flax, linear, mlp
from fedjaxsim.models.task import Task, logistic, softmax, squared

__all__ = ["Model", "Task", "cnn", "from_flax", "linear", "logistic", "mlp", "softmax", "squared"]
