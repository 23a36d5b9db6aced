"""Data sets of Hugging Face's `datasets` library, in memory or from the hub."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from fedjaxsim.data.arrays import SPLITS, split_called
from fedjaxsim.data.files import in_file, reading
from fedjaxsim.data.source import Source
from fedjaxsim.data.tables.images import CenterCrop, Resize, images_below, stack_images
from fedjaxsim.data.tables.table import (
    Client,
    Drop,
    OneHot,
    OnlyFeature,
    Roles,
    Target,
    check_names,
    source_of,
)
from fedjaxsim.extras import importing, require

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


def from_hf(
    dataset: "Dataset | DatasetDict",
    *,
    client: str | None = None,
    target: str,
    **others: Any,
) -> Any:
    """Make a `Population` of a data set of the `datasets` library, or fields to partition.

    Classes (`ClassLabel`) keep their names and numbers.

    Args:
      dataset: "train", "validation" and "test" of a `DatasetDict` become the splits.
      client: column with the client of each row; without it, the result is the fields x and y,
        for `dirichlet` and other partitions, and the data set must be one split.
      target: column to predict.
      **others: see `from_dataframe`; `x` may also hold images, which become (N, height, width,
        channels) float32 in [0, 1].

    Raises:
      TypeError: the argument is no data set, or a streamed one.
      ValueError: names the column or the split that is refused.
    """
    source = _source_of(dataset, Roles(target, client, **others))
    return source.fields if client is None else source.population()


def read_name(
    path: str,
    *,
    target: Target,
    client: Client = None,
    x: OnlyFeature = None,
    one_hot: OneHot = (),
    drop: Drop = (),
    subset: Annotated[str | None, "Subset of a data set that has several."] = None,
    split: Annotated[
        str | None, "Rows, as in train+test or train[:5000]; with --partition train if left out."
    ] = None,
    resize: Resize = None,
    center_crop: CenterCrop = None,
) -> Source:
    """Read a data set of Hugging Face by its name on the hub, or a folder of its layout."""
    with importing("hf"):
        import datasets

    if split is None and client is None:
        split = "train"
    with in_file(path):
        with reading("Hugging Face data set"):
            loaded = datasets.load_dataset(path, subset, split=split)
        splits = loaded.values() if isinstance(loaded, Mapping) else [loaded]
        columns = {name for split_rows in splits for name in split_rows.column_names}
        absent = [name for name in (client, target) if name not in (None, *columns)]
        if absent and columns == {"image", "label"} and images_below(Path(path)):
            raise ValueError(
                f"there is no column {absent[0]!r}, only 'image' and 'label': read folders such as "
                f"client/class of images as images:{path}"
            )
        roles = Roles(target, client, one_hot=one_hot, drop=drop, x=x)
        return _source_of(loaded, roles, resize, center_crop)


def _source_of(
    dataset: Any, roles: Roles, resize: int | None = None, center_crop: int | None = None
) -> Source:
    """Return the rows of a data set, or of its splits."""
    with importing("hf"):
        import datasets

    split = None
    if isinstance(dataset, Mapping):
        if roles.client is None or roles.split is not None:
            raise ValueError("rows without clients, or with a column of splits, need one split")
        unknown = sorted(str(name) for name in dataset if split_called(name) is None)
        if unknown:
            raise ValueError(
                f"splits must be {', '.join(SPLITS)}, got {unknown}: choose some, as in train+test"
            )
        places = np.array([split_called(name) for name in dataset], int)
        split = np.repeat(places, [*map(len, dataset.values())])
        alone = {split_called(name) for name in dataset} == {0}
        dataset = datasets.concatenate_datasets(list(dataset.values()))
        if alone:  # a folder of images is one split, whatever its table says
            split = None
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"from_hf needs a datasets.Dataset or DatasetDict, not streamed, got {type(dataset)}"
        )
    kinds, names = dataset.features, dataset.column_names
    if split is None:
        roles = roles.with_split(names, lambda name: np.array(dataset[name], object))
    check_names(names, len(dataset), roles)
    if roles.x is not None:  # no other column is read from disk
        names = [roles.x, *roles.taken]
        dataset = dataset.select_columns(names)
    excluded = (*roles.taken, *roles.drop)
    features = [name for name in names if name not in excluded]
    images = [name for name in features if isinstance(kinds[name], datasets.Image)]
    pixels = None
    if images:
        require("images")
        if len(features) > 1:
            raise ValueError(
                f"column {images[0]!r} holds images, so no other may be a feature: name it as x, "
                f"of the columns {', '.join(features)}"
            )
        places = [f"column {images[0]!r}, row {number}" for number in range(1, len(dataset) + 1)]
        pixels = stack_images(dataset[images[0]], places, resize, center_crop)
        dataset = dataset.remove_columns(images)
        roles = dataclasses.replace(roles, x=None)
    table: Any = dataset.with_format("arrow")[:]
    # Other classes than the target become text again, such as the names of clients.
    for place, name in enumerate(table.column_names):
        if isinstance(kinds[name], datasets.ClassLabel) and name != roles.target:
            classes = np.array([*kinds[name].names, None], object)  # -1 is no class
            table = table.set_column(place, name, [classes[table[name].to_numpy()]])
    source = source_of(table, roles, pixels)
    if split is not None:
        source = dataclasses.replace(source, split=split)
    [target] = roles.targets
    if isinstance(kind := kinds[target], datasets.ClassLabel):
        if missing := int((source.fields["y"] < 0).sum()):
            raise ValueError(f"the target {target!r} has {missing} rows without a class (-1)")
        names = {**source.about["categories"], "y": (*kind.names,)}
        source = dataclasses.replace(source, about={**source.about, "categories": names})
    return source
