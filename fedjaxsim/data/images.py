"""Folders of images: PATH/client/class/image.png, or PATH/train/client/class/image.png and so on.

Without clients: PATH/class/image.png. And handwritten digits, which come with the package.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedjaxsim.data.arrays import split_called
from fedjaxsim.data.files import entries, existing, in_file, reading
from fedjaxsim.data.npz import owners
from fedjaxsim.extras import importing

if TYPE_CHECKING:
    from PIL.Image import Image

_ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
_FORMATS = ("BMP", "JPEG", "PNG", "WEBP")
_GREY = ("1", "L", "LA")
_CLASSES = "Which classes there are, by name, is read from all clients' rows and taken as public."


def digits() -> dict[str, np.ndarray]:
    """Return the 1,797 images of 8x8 pixels, scaled from 0–16 to [0, 1], as flat fields.

    Source: E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits" (UCI, 1998,
    CC BY 4.0), in the order of `sklearn.datasets.load_digits`.

    Returns:
      x: (1797, 64) float32; y: the digit, (1797,) int32.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        return {"x": (file["x"] / 16).astype(np.float32), "y": file["y"].astype(np.int32)}


def arrays_of_folder(path: str | os.PathLike[str], *, has_clients: bool) -> dict[str, np.ndarray]:
    """Read a folder with a folder for each client, and in it a folder for each class.

    A folder of only splits, such as `train` and `val` or `test`, gives those. Images are .png,
    .jpg, .bmp or .webp; names that start with a dot are skipped, and other files counted in a
    warning.

    Returns:
      Arrays of the .npz format: x (N, height, width, channels) float32 in [0, 1], with one channel
      for grey images and three for others; y the class, in the sorted order of the folders' names.
      Clients are sorted, by number where all are whole numbers, and their images by name.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: names the file that cannot be read or differs from others in size or colour, or
        the folder of another layout.
    """
    top = existing(path, "folder of images", folder=True)
    with in_file(path):
        found = _found(top, has_clients=has_clients)
        splits, clients, classes, files = zip(*found, strict=True)
        names, y = np.unique(classes, return_inverse=True)
        if len(names) == 1:
            raise ValueError(f"all images are of the class {names[0]}: there is nothing to predict")
        arrays = {
            "x": stacked(_read(files)),
            "y": y.astype(np.int32),
            "categories.y": names,
            "public": np.array([_CLASSES]),
        }
    if has_clients:
        arrays |= {"split": np.array(splits), **owners(np.array(clients))}
    return arrays


def _found(top: Path, *, has_clients: bool) -> list[tuple[int, str, str, Path]]:
    """List the images of a folder, each with its split, client and class."""
    parts = [(split_called(folder.name), folder) for folder in _folders(top)]
    are_splits = {split is not None for split, _ in parts}
    if are_splits == {True} and not has_clients:
        raise ValueError(
            "--partition needs one folder without splits, such as PATH/train: rows are dealt to "
            "clients and have no splits"
        )
    if len(are_splits) > 1 and has_clients:
        raise ValueError("some folders name a split: put all clients into folders of splits")
    roots = parts if are_splits == {True} else [(0, top)]
    layout = "PATH/client/class/image.png" if has_clients else "PATH/class/image.png"
    wrong = f"holds no folders of images: the layout must be {layout}"
    found, others = [], []
    for split, root in roots:
        for client in _folders(root) if has_clients else [root]:
            files = [file for one in _folders(client) for file in entries(one)]
            images = [file for file in files if file.suffix.lower() in _ENDINGS]
            if not images:
                other = f"; {root}/class/image.png needs a partition" if has_clients else ""
                raise ValueError(f"{client} {wrong}{other}")
            found += [(split or 0, client.name, file.parent.name, file) for file in images]
            others += [file for file in {*files} - {*images} if file.is_file()]
    if not found:
        raise ValueError(f"{top} {wrong}")
    if others:
        warnings.warn(
            f"{len(others)} files were skipped, such as {min(others)}: images are "
            f"{', '.join(_ENDINGS)}",
            stacklevel=2,
        )
    return found


def _folders(folder: Path) -> list[Path]:
    return [one for one in entries(folder) if one.is_dir()]


def _read(files: Iterable[Path]) -> Iterator[tuple[str, np.ndarray]]:
    with importing("images"):
        from PIL import Image

    for file in files:
        # Other formats could start programs: Pillow asks Ghostscript for the pixels of an EPS.
        with in_file(file), reading("image"), Image.open(file, formats=_FORMATS) as image:
            yield str(file), pixels_of(image)


def stacked(images: Iterable[tuple[str, np.ndarray]]) -> np.ndarray:
    """Stack the `pixels_of` images of one size, (n, height, width, channels) float32 in [0, 1]."""
    found: list[np.ndarray] = []
    first = ""
    for place, pixels in images:
        first = first or place
        if found and pixels.shape != found[0].shape:
            raise ValueError(
                f"images must be of one size and colour: {first} is {found[0].shape} "
                f"(height, width, channels), but {place} is {pixels.shape}"
            )
        found.append(pixels)
    whole = np.stack(found)
    found.clear()  # the pixels are in memory once as bytes, and once as float32
    return np.divide(whole, 255, dtype=np.float32)


def pixels_of(image: "Image") -> np.ndarray:
    """Return a Pillow image as (height, width, 1) or (height, width, 3) uint8."""
    if image.mode.startswith(("I", "F")):
        bits = 16 if ";16" in image.mode else 32
        raise ValueError(f"it must have 8 bits a channel, got {bits} (mode {image.mode})")
    if image.mode in _GREY:
        return np.asarray(image.convert("L"))[:, :, None]
    return np.asarray(image.convert("RGB"))
