# The public names of `fedjaxsim.tasks`, for type checkers and `lazy_loader`.
from .named_metrics import with_metrics as with_metrics
from .named_metrics import with_own_metric as with_own_metric
from .regressions import cox as cox
from .regressions import gamma as gamma
from .regressions import negative_binomial as negative_binomial
from .regressions import ordinal as ordinal
from .regressions import poisson as poisson
from .regressions import quantile as quantile
from .several_targets import multilabel as multilabel
from .several_targets import squared_targets as squared_targets
from .streaming_metrics import StreamingMetric as StreamingMetric
from .task import Metric as Metric
from .task import Task as Task
from .task import augmented as augmented
from .task import known_regression as known_regression
from .task import logistic as logistic
from .task import one_vs_all as one_vs_all
from .task import softmax as softmax
from .task import softmax_sequence as softmax_sequence
from .task import squared as squared

__all__: list[str]
