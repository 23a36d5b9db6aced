# The public names of `fedjaxsim.data`, for type checkers and `lazy_loader`.
from .arrays import Ranges as Ranges
from .columns import Columns as Columns
from .npz import load_folder as load_folder
from .npz import load_npz as load_npz
from .npz import save_folder as save_folder
from .npz import save_npz as save_npz
from .partition import dirichlet as dirichlet
from .partition import iid as iid
from .partition import pathological as pathological
from .partition import quantity as quantity
from .population import Population as Population
from .splitting import limit_training_rows as limit_training_rows
from .splitting import split as split
from .synthetic import group_sparse_regression as group_sparse_regression
from .synthetic import low_rank_regression as low_rank_regression
from .synthetic import regression_stream as regression_stream
from .synthetic import synthetic_regression as synthetic_regression
from .tables.handwritten_digits import digits as digits
from .tables.hugging_face import from_hf as from_hf
from .tables.images import from_sequence as from_sequence
from .tables.leaf import load_leaf as load_leaf
from .tables.load import load as load
from .tables.matlab import load_matlab as load_matlab
from .tables.table import from_dataframe as from_dataframe
from .transforms import as_classes as as_classes
from .transforms import drop_constant_columns as drop_constant_columns
from .transforms import invert as invert
from .transforms import scale as scale
from .transforms import scale_by_rows as scale_by_rows
from .transforms import unit_rows as unit_rows
from .variance_components import variance_ratios as variance_ratios

__all__: list[str]
