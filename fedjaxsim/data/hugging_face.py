"""Data sets of Hugging Face's `datasets` library."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjaxsim.data.images import pixels_of, stacked
from fedjaxsim.data.npz import assemble
from fedjaxsim.data.population import Population
from fedjaxsim.data.ranges import SPLITS
from fedjaxsim.data.table import Columns, arrays_of
from fedjaxsim.extras import importing, require

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


def from_hf(
    dataset: "Dataset | DatasetDict",
    *,
    client: str,
    target: str,
    x: str | None = None,
    one_hot: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> Population:
    """Make a population of a data set of the `datasets` library.

    See `from_dataframe` for the columns. Classes (`ClassLabel`) keep their names and
    numbers.

    Args:
      dataset: "train", "validation" and "test" of a `DatasetDict` become the splits.
      client: column with the client of each row.
      target: column to predict.
      x: the only column of features: images (x is then (N, height, width, channels) float32 in
        [0, 1]), lists of one length, or numbers. By default every other column is a feature.
      one_hot: columns to replace by one column of 0 and 1 per value that occurs.
      drop: columns that are no features.

    Raises:
      TypeError: the argument is no data set, or a streamed one.
      ValueError: names the column or the split that is refused.
    """
    with importing("hf"):
        import datasets

    splits = None
    if isinstance(dataset, Mapping):
        unknown = set(dataset) - set(SPLITS)
        if unknown:
            raise ValueError(f"splits must be {', '.join(SPLITS)}, got {sorted(map(str, unknown))}")
        splits = np.repeat(
            [SPLITS.index(str(name)) for name in dataset], [*map(len, dataset.values())]
        )
        dataset = datasets.concatenate_datasets(list(dataset.values()))
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"from_hf needs a datasets.Dataset or DatasetDict, not streamed, got {type(dataset)}"
        )
    if x is not None:
        absent = [name for name in (x, client, target) if name not in dataset.column_names]
        if absent:
            raise ValueError(f"there is no column {absent[0]!r}, only {dataset.column_names}")
        dataset = dataset.select_columns([x, client, target])
    arrays = _arrays(dataset, Columns(client, target, None, one_hot, drop))
    if splits is not None:
        arrays["split"] = splits
    return assemble(arrays)


def _arrays(dataset: "Dataset", columns: Columns) -> dict[str, np.ndarray]:
    """Return the arrays of the .npz format."""
    import datasets

    with importing("tables"):
        import pyarrow

    kinds = dataset.features
    others = (columns.client, columns.target, *columns.drop)
    features = [name for name in dataset.column_names if name not in others]
    images = [name for name in features if isinstance(kinds[name], datasets.Image)]
    pixels = None
    if images:
        require("images")
        if len(features) > 1:
            raise ValueError(
                f"column {images[0]!r} holds images, so no other may be a feature: name it as x, "
                f"of the columns {', '.join(features)}"
            )
        pixels = stacked(
            (f"row {k}", pixels_of(image)) for k, image in enumerate(dataset[images[0]])
        )
        dataset = dataset.remove_columns(images)
    table: Any = dataset.with_format("arrow")[:]
    # Other classes than the target become text again, such as the names of clients.
    for place, name in enumerate(table.column_names):
        if isinstance(kinds[name], datasets.ClassLabel) and name != columns.target:
            names = np.array([*kinds[name].names, None], object)  # -1 is no class
            column = pyarrow.array(names[table[name].to_numpy()])
            table = table.set_column(place, name, column)
    arrays = arrays_of(table, columns, pixels)
    label = kinds[columns.target]
    if isinstance(label, datasets.ClassLabel):
        missing = int((arrays["y"] < 0).sum())
        if missing:
            raise ValueError(
                f"the target {columns.target!r} has {missing} rows without a class (-1)"
            )
        arrays["categories.y"] = np.array(label.names)
    return arrays
