# The public names of `fedjaxsim.gradients`, for type checkers and `lazy_loader`.
from .modes import Forward as Forward
from .modes import Reverse as Reverse
from .whole_run import hypergradient as hypergradient
from .whole_run import mean_metric as mean_metric

__all__: list[str]
