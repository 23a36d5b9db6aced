"""The readers and partitions that `--data` and `--partition` take by name.

A new one is a file, and an entry here. Nothing heavy is imported, so that the command line knows
the names at once.
"""

_DATA = "fedjaxsim.data"

GENERATED = {
    "digits": f"{_DATA}.handwritten_digits:digits",
    "random": f"{_DATA}.synthetic:random_rows",
    "synthetic": f"{_DATA}.synthetic:synthetic_regression",
    "synthetic-low-rank": f"{_DATA}.synthetic:low_rank_regression",
    "synthetic-group-sparse": f"{_DATA}.synthetic:group_sparse_regression",
    "synthetic-stream": f"{_DATA}.synthetic:regression_stream",
}
"""Factories of data without a path, as "module:function"."""
IN_FILES = {
    "csv": f"{_DATA}.table:read_file",
    "folder": f"{_DATA}.npz:load_folder",
    "hf": f"{_DATA}.hugging_face:read_name",
    "images": f"{_DATA}.images:read_images",
    "leaf": f"{_DATA}.leaf:load_leaf",
    "mat": f"{_DATA}.matlab:load_matlab",
    "npz": f"{_DATA}.npz:read_npz",
    "parquet": f"{_DATA}.table:read_file",
}
"""Factories of data at a path, or by a name (hf), their first argument."""
READERS = GENERATED | IN_FILES
PARTITIONS = {
    "dirichlet": f"{_DATA}.partition:dirichlet",
    "iid": f"{_DATA}.partition:iid",
    "pathological": f"{_DATA}.partition:pathological",
    "quantity": f"{_DATA}.partition:quantity",
}
"""Factories of populations from rows without clients."""
