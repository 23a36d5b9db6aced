"""Populations of clients: readers, partitions and transformations of their data."""

from fedjaxsim.data.digits import digits
from fedjaxsim.data.folder import check_folder, load_folder, save_folder
from fedjaxsim.data.hugging_face import from_hf
from fedjaxsim.data.images import load_images
from fedjaxsim.data.leaf import load_leaf
from fedjaxsim.data.load import load
from fedjaxsim.data.matlab import load_matlab
from fedjaxsim.data.npz import load_npz, save_npz
from fedjaxsim.data.partition import by_column, dirichlet, feature_noise, iid, quantity, shards
from fedjaxsim.data.population import Population, Ranges, split
from fedjaxsim.data.synthetic import regression_stream, related_regression, synthetic_regression
from fedjaxsim.data.table import load_csv, load_parquet
from fedjaxsim.data.transforms import drop_constant_columns, unit_rows

__all__ = [
    "Population",
    "Ranges",
    "by_column",
    "check_folder",
    "digits",
    "dirichlet",
    "drop_constant_columns",
    "feature_noise",
    "from_hf",
    "iid",
    "load",
    "load_csv",
    "load_folder",
    "load_images",
    "load_leaf",
    "load_matlab",
    "load_npz",
    "load_parquet",
    "quantity",
    "regression_stream",
    "related_regression",
    "save_folder",
    "save_npz",
    "shards",
    "split",
    "synthetic_regression",
    "unit_rows",
]
