"""Text as integers: characters of strings, words of lists, and names of classes."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim import checks
from fedjaxsim.data.arrays import stacked_lists

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of Shakespeare, in the order of LEAF (`models/utils/language_utils.py`)."""
_PADDED = -1
_LARGEST_CODE = 0x10FFFF

_FILES = (
    ".avi", ".bmp", ".flac", ".gif", ".jpeg", ".jpg", ".mp3", ".mp4", ".npy", ".npz", ".pgm",
    ".png", ".tif", ".tiff", ".wav", ".webp",
)  # fmt: skip
_MOST_TOKENS = 1 << 17

Client = dict[str, np.ndarray]


class Encoded(NamedTuple):
    """Clients with numbers in x and y, and the `categories` and `public` of `Population`."""

    clients: list[Client]
    categories: dict[str, tuple[str, ...]]
    public: tuple[str, ...]


def encode(clients: Sequence[Client]) -> Encoded:
    """Replace text in the clients' fields x and y by integers.

    Strings in x, (n,), become their characters and lists of words, (n, L), their words: integers
    (n, L), in which one more integer, with an empty name, pads shorter rows. Labels use the symbols
    of x if they are single characters, (n,), strings as long as x, or lists of words, (n, L);
    their padding is −1. Any other text in y names classes, in sorted order.

    Characters have the numbers of LEAF's Shakespeare if no others occur; otherwise characters, like
    words, are numbered in sorted order.

    Raises:
      ValueError: some clients have text and others numbers, or a word holds white space.
    """
    if not clients:
        return Encoded([], {}, ())
    fields = {name: [client[name] for client in clients] for name in ("x", "y")}
    more: list[Client] = [{} for _ in clients]
    categories: dict[str, tuple[str, ...]] = {}
    public = []
    for name, arrays in fields.items():
        if any(array.dtype.kind == "O" for array in arrays):
            filled = with_padding(
                [np.atleast_1d(row) for array in arrays for row in array], repr(name), name
            )
            ends = np.cumsum([*map(len, arrays)])[:-1]
            fields[name] = np.split(filled.arrays.pop(name), ends)
            categories |= filled.categories
            public.append("The length of the longest row")
            for field, values in filled.arrays.items():
                for client, part in zip(more, np.split(values, ends), strict=True):
                    client[field] = part
    for name, arrays in fields.items():
        if len({(array.dtype.kind == "U", array.ndim) for array in arrays}) > 1:
            raise ValueError(f"{name!r} must be text of one form or numbers, alike for all clients")
    if fields["x"][0].dtype.kind == "U" and fields["x"][0].ndim == 1:
        refuse_files((text for array in fields["x"] for text in array.tolist()), "'x'")
    if fields["x"][0].dtype.kind == "U":
        texts = ["x", "y"] if _continue(fields["x"], fields["y"]) else ["x"]
        symbols, known = _symbols([array for name in texts for array in fields[name]])
        for name in texts:
            fields[name], padded = _numbered(fields[name], symbols)
            categories[name] = symbols
            if padded and name == "x":
                categories[name] = (*symbols, "")
            elif padded:
                fields[name] = [_marked(array, len(symbols)) for array in fields[name]]
        if not known:
            public.append("Which characters or words there are")
    if fields["y"][0].dtype.kind == "U":
        names, numbers = np.unique(np.concatenate(fields["y"]), return_inverse=True)
        sizes = np.cumsum([len(array) for array in fields["y"]])[:-1]
        fields["y"] = np.split(numbers, sizes)
        categories["y"] = tuple(names.tolist())
        public.append("Which classes there are, by name,")
    return Encoded(
        [{"x": x, "y": y, **m} for x, y, m in zip(fields["x"], fields["y"], more, strict=True)],
        categories,
        tuple(f"{what} is read from all clients' rows and taken as public." for what in public),
    )


class Padded(NamedTuple):
    """The arrays of a field of sequences, and the names of its tokens."""

    arrays: dict[str, np.ndarray]
    categories: dict[str, tuple[str, ...]]


def with_padding(rows: Sequence[Any] | np.ndarray, where: str, field: str) -> Padded:
    """Stack lists of numbers as a field; those of different lengths are filled up.

    Features get the field "mask" beside them, (N, L) float32, which is 0 at padding, and integers
    among them one more token, with an empty name. Labels are filled up with −1.

    Args:
      rows: N lists of numbers.
      where: their place, for messages.
      field: x or y.
    """
    values, mask = stacked_lists(rows, where)
    if mask is None:
        return Padded({field: values}, {})
    integral = values.dtype.kind in "iu"
    if field == "y":
        if not integral:
            raise ValueError(f"{where} holds lists of fractions, which must be of one length")
        return Padded({"y": np.where(mask > 0, values, _PADDED).astype(np.int32)}, {})
    tokens = int(values.max()) if integral else 0
    if tokens >= _MOST_TOKENS:
        raise ValueError(f"{where} holds lists of tokens up to {tokens - 1}: number them from 0")
    names = {"x": (*map(str, range(tokens)), "")} if integral else {}
    return Padded({"x": values.astype(np.int32) if integral else values, "mask": mask}, names)


def refuse_files(texts: Iterable[str], where: str) -> None:
    """Raise ValueError if all texts are names of files."""
    first, *_ = found = [*itertools.islice(texts, 1000)]
    if all(text.lower().endswith(_FILES) for text in found):
        raise ValueError(
            f"{where} holds names of files, such as {first!r}, no text: images are read by "
            "data.load_images (images:PATH) from a folder of clients and classes"
        )


def characters(texts: Sequence[str], length: int | None) -> tuple[dict[str, np.ndarray], list[str]]:
    """Encode the texts of a column as `encode` does.

    Args:
      texts: N texts.
      length: characters to keep of each, the first ones; None keeps all.

    Returns:
      The arrays x, (N, L) integers, and categories.x; and sentences on what is public.
    """
    if length is not None:
        checks.count(length=length)
    kept = [text[:length] for text in texts]
    clients, categories, public = encode([{"x": np.array(kept), "y": np.zeros(len(kept))}])
    found = {"x": clients[0]["x"], "categories.x": np.array(categories["x"])}
    return found, ["Which characters there are is read from all clients' rows"] if public else []


def _filled_up(words: np.ndarray, width: int) -> np.ndarray:
    """Pad rows of words, (n, L), with empty ones, (n, width)."""
    return np.pad(words, ((0, 0), (0, width - words.shape[1])), constant_values="")


def _continue(x: list[np.ndarray], y: list[np.ndarray]) -> bool:
    """Return whether labels use the symbols of x: the next one, or one at each place."""
    if y[0].dtype.kind != "U" or y[0].ndim != x[0].ndim:  # a string beside a list names a class
        return False
    return y[0].ndim == 2 or _width(y) in (1, _width(x))


def _width(texts: list[np.ndarray]) -> int:
    """Return the number of symbols in the longest row."""
    if texts[0].ndim == 2:
        return max(text.shape[1] for text in texts)
    return max(text.dtype.itemsize for text in texts) // np.dtype("U1").itemsize


def _codes(text: np.ndarray, width: int) -> np.ndarray:
    """Return the characters of strings, (n, width) uint32, padded with 0."""
    return np.ascontiguousarray(text.astype(f"U{width}")).view(np.uint32).reshape(-1, width)


def _symbols(texts: list[np.ndarray]) -> tuple[tuple[str, ...], bool]:
    """Return the symbols, and whether they are LEAF's characters instead of the data's."""
    if texts[0].ndim == 1:
        seen = np.zeros(_LARGEST_CODE + 1, bool)
        for text in texts:
            seen[_codes(text, _width([text]))] = True
        seen[0] = False
        found = [chr(code) for code in np.flatnonzero(seen)]
        known = set(found) <= set(CHARACTERS)
        return tuple(CHARACTERS) if known else tuple(found), known
    words = sorted(set().union(*(np.unique(text).tolist() for text in texts)) - {""})
    spaced = next((word for word in words if word.split() != [word]), None)
    if spaced is not None:
        raise ValueError(
            f"rows that are lists of strings must hold words, without white space, got {spaced!r}: "
            "for characters, let each row be one string"
        )
    return tuple(words), False


def _numbered(texts: list[np.ndarray], symbols: tuple[str, ...]) -> tuple[list[np.ndarray], bool]:
    """Return each text as integers, (n, L) or (n,), and whether any is padded."""
    width = _width(texts)
    dtype = np.uint8 if len(symbols) < 256 else np.int32
    if texts[0].ndim == 1:
        number = np.zeros(_LARGEST_CODE + 1, dtype)
        number[[ord(symbol) for symbol in symbols]] = np.arange(len(symbols))
        number[0] = len(symbols)
        numbers = [number[_codes(text, width)] for text in texts]
    else:
        # The empty word comes first in sorted order, and its number last.
        words, order = np.array(["", *symbols]), np.r_[len(symbols), : len(symbols)].astype(dtype)
        numbers = [order[np.searchsorted(words, _filled_up(text, width))] for text in texts]
    padded = any(bool((array == len(symbols)).any()) for array in numbers)
    if texts[0].ndim == 1 and width == 1 and not padded:
        numbers = [array[:, 0] for array in numbers]
    return numbers, padded


def _marked(labels: np.ndarray, padding: int) -> np.ndarray:
    """Replace padding by −1."""
    return np.where(labels == padding, _PADDED, labels.astype(np.int32))
