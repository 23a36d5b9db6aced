"""Images as people keep them: in folders of classes, in a table of files, as a sequence of pairs.

Images become (N, height, width, channels) float32 in [0, 1], with one channel if they are grey and
three otherwise.
"""

import dataclasses
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from fedjaxsim.data.arrays import split_called, unit_pixels
from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.source import Source, listed, numbered, splits_of
from fedjaxsim.extras import importing

if TYPE_CHECKING:
    from PIL.Image import Image

_GREY = ("1", "L", "LA")
_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_CLASSES = "Which classes there are is read from all clients' rows and taken as public."
_PIXELS = range(1, 2**15)
Resize = Annotated[int | None, "Pixels to which the shorter side of images is resized.", _PIXELS]
CenterCrop = Annotated[int | None, "Pixels of the square cut from the centre of images.", _PIXELS]


def read_images(
    path: str | os.PathLike[str],
    *,
    client: Annotated[str | None, "Column of a table with the client of each image."] = None,
    target: Annotated[str | None, "Column of a table with the class of each image."] = None,
    x: Annotated[str, "Column of a table with the files, relative to its folder."] = "file_name",
    resize: Resize = None,
    center_crop: CenterCrop = None,
) -> Source:
    """Read a folder of images by client and class, or a CSV or Parquet table of their files.

    In a folder the last folder of a path is the class. Of the folders above it, such as
    client/class, split/class or split/client/class, one whose names are all train, validation or
    test is the split. Without clients the rows need a partition. A table's column `split` is used
    as other readers use it.
    """
    place = Path(path)
    if place.is_file():
        with in_file(path):
            if target is None:
                raise ValueError("a table of images needs --target, the column with their classes")
            files, labels, owners, split = _listed_in(place, client, target, x)
    else:
        if client is not None or target is not None:
            raise ValueError(
                f"client and target are columns of a table of files, but {path} is none"
            )
        with in_file(existing(path, "folder or table of images", folder=True)):
            files, labels, owners, split = _found_below(place)
    pictures = _read(files, resize, center_crop)
    return _source(pictures, np.array(labels, object), owners, split)


def _read(files: Sequence[Path], resize: int | None, center_crop: int | None) -> np.ndarray:
    """Read the images of files."""
    with importing("images"):
        from PIL import Image

    def opened() -> Iterable["Image"]:
        for file in files:
            with in_file(file), reading("image"), Image.open(file) as image:
                image.load()
                yield image

    return stack_images(opened(), files, resize, center_crop)


def read_new_images(
    path: str | os.PathLike[str],
    clients: Collection[str] = (),
    *,
    client: str | None = None,
    x: str = "file_name",
    resize: int | None = None,
    center_crop: int | None = None,
) -> Source:
    """Read images to predict, which need no classes, as the field "x".

    They are in a table of files, in one folder, or in folders named after `clients`. In other
    folders they lie as for `read_images`, whose settings these are.
    """
    place = Path(path)
    if place.is_file():
        with in_file(path):
            files, _, owners, _ = _listed_in(place, client, None, x)
    else:
        with in_file(existing(path, "folder or table of images", folder=True)):
            below = images_below(place)
            folders = {file.parts[0] for file in below if len(file.parts) == 2}
            if below and all(len(file.parts) == 1 for file in below):
                files, owners = [place / file for file in below], None
            elif folders and folders <= {*clients}:
                files, owners = [place / file for file in below], [file.parts[0] for file in below]
            else:
                files, _, owners, _ = _found_below(place)
    source = _source(_read(files, resize, center_crop), np.zeros(len(files)), owners, None)
    return dataclasses.replace(source, fields={"x": source.fields["x"]})


def from_sequence(items: Any, *, split: Sequence[Any] | None = None) -> Any:
    """Make a `Population` of (x, y, client) triples, or fields x and y of pairs to partition.

    Args:
      items: pairs or triples, such as a torch `Dataset`. x is an array, or an image of Pillow; y a
        number or the name of a class. Arrays of bytes (height, width, …) become [0, 1], and other
        arrays stay as they are: models take channels last.
      split: train, validation or test, or 0, 1 or 2, for each item; by default all are training
        rows. It needs clients.

    Raises:
      ValueError: names the item whose shape or number of parts differs from the first one's.
    """
    sized = hasattr(items, "__getitem__") and hasattr(items, "__len__")
    rows = [items[k] for k in range(len(items))] if sized else [*items]
    lengths = [len(row) if isinstance(row, tuple | list) else 0 for row in rows]
    wrong = next((k for k, n in enumerate(lengths) if n not in (2, 3) or n != lengths[0]), None)
    if not rows or wrong is not None:
        raise ValueError(
            "items must be pairs (x, y), or triples (x, y, client), all of one kind, got "
            f"{'none' if wrong is None else f'{lengths[wrong]} parts in item {wrong}'}"
        )
    x = [row[0] for row in rows]
    names = [f"item {k}" for k in range(len(rows))]
    images = hasattr(x[0], "getbands")
    arrays = stack_images(x, names) if images else _stacked([*map(np.asarray, x)], names)
    labels = np.array([np.asarray(row[1]).item() for row in rows])
    owners = [str(np.asarray(row[2]).item()) for row in rows] if lengths[0] == 3 else None
    splits = None if split is None else splits_of(np.array(split), "split")
    source = _source(unit_pixels(arrays), labels, owners, splits)
    return dict(source.fields) if owners is None else source.population()


def stack_images(
    images: Iterable["Image | None"],
    names: Sequence[Any],
    resize: int | None = None,
    center_crop: int | None = None,
) -> np.ndarray:
    """Stack images of one size, (N, height, width, channels) float32 in [0, 1].

    Errors name the image that is refused.
    """
    pixels: list[np.ndarray] = []
    for name, image in zip(names, images, strict=True):
        with in_file(str(name)):
            if image is None:
                raise ValueError("there is no image: leave out such rows")
            pixels.append(_pixels_of(_resized(image, resize, center_crop)))
    stacked = _stacked(pixels, names)
    pixels.clear()  # they are in memory once as bytes, and once as float32
    return unit_pixels(stacked)


def _stacked(arrays: list[np.ndarray], names: Sequence[Any]) -> np.ndarray:
    """Stack arrays of one shape; an error names the first that differs."""
    for name, array in zip(names, arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise ValueError(
                f"{name}: all must have one size and colour, but its shape is {array.shape}, and "
                f"{names[0]} has {arrays[0].shape}: resize and crop images (center-crop)"
            )
    return np.stack(arrays)


def _resized(image: "Image", resize: int | None, center_crop: int | None) -> "Image":
    """Return an image whose shorter side has `resize` pixels, cut to a centred square."""
    width, height = image.size
    if resize is not None:
        scale = resize / min(width, height)
        width, height = max(resize, round(width * scale)), max(resize, round(height * scale))
        image = image.resize((width, height), 2)  # bilinear
    if center_crop is None:
        return image
    if center_crop > min(width, height):
        raise ValueError(f"an image of {width} × {height} is too small to crop to {center_crop}")
    left, top = (width - center_crop) // 2, (height - center_crop) // 2
    return image.crop((left, top, left + center_crop, top + center_crop))


def _pixels_of(image: "Image") -> np.ndarray:
    """Return a Pillow image as (height, width, 1) or (height, width, 3) uint8."""
    if image.mode.startswith(("I", "F")):
        bits = 16 if ";16" in image.mode else 32
        raise ValueError(f"it must have 8 bits a channel, got {bits} (mode {image.mode})")
    if image.mode in _GREY:
        return np.asarray(image.convert("L"))[:, :, None]
    return np.asarray(image.convert("RGB"))


Rows = tuple[list[Path], list[str], list[str] | None, np.ndarray | None]
"""The files, the classes, the clients and the splits of images."""


def _found_below(folder: Path) -> Rows:
    """Find images in folders of clients, splits and classes."""
    below = images_below(folder)
    if not below:
        raise ValueError("it holds no images")
    depths = {len(path.parts) for path in below}
    if len(depths) != 1 or not 2 <= max(depths) <= 4:
        raise ValueError(
            "images must lie in folders of one depth, as client/class/1.png, split/class/1.png, "
            f"split/client/class/1.png or class/1.png, got {listed([str(p) for p in below[:3]])}"
        )
    *above, labels = zip(*(path.parts[:-1] for path in below), strict=True)
    are_splits = [all(split_called(name) is not None for name in {*level}) for level in above]
    split = next(
        (level for level, is_split in zip(above, are_splits, strict=True) if is_split), None
    )
    owners = [level for level in above if level is not split]
    if len(owners) > 1:
        raise ValueError("of three folders above images, one must hold train, validation or test")
    files = [folder / path for path in below]
    places = None if split is None else splits_of(np.array(split), "the folders of splits")
    return files, [*labels], [*owners[0]] if owners else None, places


def images_below(folder: Path) -> list[Path]:
    """Return the images in a folder and its folders, relative to it, sorted."""
    return sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() in _ENDINGS and not path.name.startswith(".")
    )


def _listed_in(table: Path, client: str | None, target: str | None, x: str) -> Rows:
    """Read the files, clients and splits of images from a table, and their classes if any."""
    from fedjaxsim.data.tables.table import (
        Roles,
        check_names,
        read_table,
        require_complete,
        table_of,
        texts,
    )

    rows = table_of(read_table(table, client))
    roles = Roles(target, client, x=x).with_split(rows.column_names, lambda name: texts(rows[name]))
    check_names(rows.column_names, len(rows), roles)
    for name in (*roles.taken, x):
        require_complete(name, rows[name])
    folder = table.parent.resolve()
    files = [folder / name for name in texts(rows[x]).tolist()]
    for file in files:
        if not file.resolve().is_relative_to(folder):
            raise ValueError(f"column {x!r} leads out of the folder of the table: {file}")
    owners = None if client is None else texts(rows[client]).tolist()
    split = None
    if roles.split is not None:
        split = splits_of(texts(rows[roles.split]), f"the split {roles.split!r}")
    labels = [] if target is None else texts(rows[target]).tolist()
    return files, labels, owners, split


def _source(
    x: np.ndarray, labels: np.ndarray, owners: list[str] | None, split: np.ndarray | None
) -> Source:
    """Return rows with the names of classes, or with numbers."""
    about: dict[str, Any] = {}
    if labels.dtype.kind in "OU":
        classes, y = numbered(labels, by_number=True)
        about = {"categories": {"y": tuple(classes.tolist())}, "public": (_CLASSES,)}
        labels = y.astype(np.int32)
    names, client = None, None
    if owners is not None:
        names, client = numbered(np.array(owners, object), by_number=True)
    return Source({"x": x, "y": labels}, client, names, split, about)
