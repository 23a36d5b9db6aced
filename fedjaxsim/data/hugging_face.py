"""Data sets of Hugging Face's `datasets` library, in memory or by name."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from fedjaxsim.data.arrays import SPLITS, split_called, unit_pixels
from fedjaxsim.data.files import in_file, reading
from fedjaxsim.data.source import Source
from fedjaxsim.data.table import (
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
    from PIL.Image import Image

_GREY = ("1", "L", "LA")


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
    found = _source_of(dataset, Roles(client, target, **others))
    return found.fields if client is None else found.population()


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
) -> Source:
    """Read a data set of Hugging Face by its name on the hub, or a folder of its layout."""
    with importing("hf"):
        import datasets

    if split is None and client is None:
        split = "train"
    with in_file(path):
        with reading("Hugging Face data set"):
            found = datasets.load_dataset(path, subset, split=split)
        return _source_of(found, Roles(client, target, None, one_hot, drop, x))


def _source_of(dataset: Any, roles: Roles) -> Source:
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
    others = (*roles.taken, *roles.drop)
    features = [name for name in names if name not in others]
    images = [name for name in features if isinstance(kinds[name], datasets.Image)]
    pixels = None
    if images:
        require("images")
        if len(features) > 1:
            raise ValueError(
                f"column {images[0]!r} holds images, so no other may be a feature: name it as x, "
                f"of the columns {', '.join(features)}"
            )
        pixels = _stacked(dataset[images[0]], images[0])
        dataset = dataset.remove_columns(images)
        roles = roles._replace(x=None)
    table: Any = dataset.with_format("arrow")[:]
    # Other classes than the target become text again, such as the names of clients.
    for place, name in enumerate(table.column_names):
        if isinstance(kinds[name], datasets.ClassLabel) and name != roles.target:
            classes = np.array([*kinds[name].names, None], object)  # -1 is no class
            table = table.set_column(place, name, [classes[table[name].to_numpy()]])
    found = source_of(table, roles, pixels)
    if split is not None:
        found = dataclasses.replace(found, split=split)
    if isinstance(kind := kinds[roles.target], datasets.ClassLabel):
        if missing := int((found.fields["y"] < 0).sum()):
            raise ValueError(f"the target {roles.target!r} has {missing} rows without a class (-1)")
        names = {**found.about["categories"], "y": (*kind.names,)}
        found = dataclasses.replace(found, about={**found.about, "categories": names})
    return found


def _stacked(images: Iterable["Image | None"], column: str) -> np.ndarray:
    """Stack images of one size, (N, height, width, channels) float32 in [0, 1]."""
    pixels: list[np.ndarray] = []
    for number, image in enumerate(images, 1):
        with in_file(f"column {column!r}, row {number}"):
            if image is None:
                raise ValueError("there is no image: leave out such rows")
            pixels.append(_pixels_of(image))
    for number, picture in enumerate(pixels, 1):
        if picture.shape != pixels[0].shape:
            raise ValueError(
                f"column {column!r}: images must have one size and colour, but row {number} has "
                f"{_size(picture)} and row 1 {_size(pixels[0])}"
            )
    whole = np.stack(pixels)
    pixels.clear()  # they are in memory once as bytes, and once as float32
    return unit_pixels(whole)


def _size(picture: np.ndarray) -> str:
    """Format the size and the colour of an image."""
    height, width, channels = picture.shape
    return f"{width} × {height}, {'grey' if channels == 1 else 'colour'}"


def _pixels_of(image: "Image") -> np.ndarray:
    """Return a Pillow image as (height, width, 1) or (height, width, 3) uint8."""
    if image.mode.startswith(("I", "F")):
        bits = 16 if ";16" in image.mode else 32
        raise ValueError(f"it must have 8 bits a channel, got {bits} (mode {image.mode})")
    if image.mode in _GREY:
        return np.asarray(image.convert("L"))[:, :, None]
    return np.asarray(image.convert("RGB"))
