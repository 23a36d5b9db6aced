# The public names of `fedjaxsim.gradients`, for type checkers and `lazy_loader`.
from .modes import Forward as Forward
from .modes import Reverse as Reverse
from .whole_run import Estimate as Estimate
from .whole_run import hypergradient as hypergradient
from .whole_run import mean_metric as mean_metric
from .whole_run import over_seeds as over_seeds
from .whole_run import price_of_privacy as price_of_privacy

__all__: list[str]
