"""Text as integers: characters of strings, words of lists, and names of classes."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjaxsim import checks
from fedjaxsim.data.arrays import join

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of Shakespeare, in the order of LEAF (`models/utils/language_utils.py`)."""
_PADDED = -1
_LARGEST_CODE = 0x10FFFF

_FILES = (
    ".avi", ".bmp", ".flac", ".gif", ".jpeg", ".jpg", ".mp3", ".mp4", ".npy", ".npz", ".pgm",
    ".png", ".tif", ".tiff", ".wav", ".webp",
)  # fmt: skip
_MOST_TOKENS = 1 << 17


def encode(
    fields: Mapping[str, list[np.ndarray]], owners: list[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Join the clients' parts of the fields x and y, with text replaced by integers.

    Strings in x, (n,), become their characters and lists of words, (n, L), their words: integers
    (n, L), in which one more integer, with an empty name, pads shorter rows. Labels use the symbols
    of x if they are single characters, (n,), strings as long as x, or lists of words, (n, L);
    their padding is −1. Any other text in y names classes, in sorted order. Lists of numbers of
    different lengths are filled up, see `with_padding`.

    Characters have the numbers of LEAF's Shakespeare if no others occur; otherwise characters, like
    words, are numbered in sorted order.

    Returns:
      Arrays of the .npz format, and sentences on what is public.
    """
    arrays: dict[str, np.ndarray] = {}
    texts: dict[str, list[np.ndarray]] = {}
    public = []
    for name, parts in fields.items():
        if any(part.dtype.kind == "O" for part in parts):
            rows = [np.atleast_1d(row) for part in parts for row in part]
            arrays |= with_padding(rows, repr(name), name)
            public.append("The length of the longest row")
        elif len({(part.dtype.kind == "U", part.ndim) for part in parts}) > 1:
            raise ValueError(f"{name!r} must be text of one form or numbers, alike for all clients")
        elif parts[0].dtype.kind == "U":
            texts[name] = parts
        else:
            arrays[name] = join(name, parts, owners)
    if "x" in texts:
        if texts["x"][0].ndim == 1:
            refuse_files((text for part in texts["x"] for text in part.tolist()), "'x'")
        of_x = {"x": texts.pop("x")}
        if "y" in texts and _continue(of_x["x"], texts["y"]):
            of_x["y"] = texts.pop("y")
        symbols, known = _symbols([part for parts in of_x.values() for part in parts])
        for name, parts in of_x.items():
            arrays[name], padded = _numbered(parts, symbols)
            if padded and name == "y":
                labels = arrays[name].astype(np.int32)
                arrays[name] = np.where(labels == len(symbols), _PADDED, labels)
            named = (*symbols, "") if padded and name == "x" else symbols
            arrays[f"categories.{name}"] = np.array(named, str)
        if not known:
            public.append("Which characters or words there are")
    if "y" in texts:
        names, arrays["y"] = np.unique(np.concatenate(texts["y"]), return_inverse=True)
        arrays["categories.y"] = names
        public.append("Which classes there are, by name,")
    return arrays, [f"{what} is read from all clients' rows" for what in public]


def with_padding(
    values: Sequence[Any] | np.ndarray, where: str, field: str
) -> dict[str, np.ndarray]:
    """Stack lists of numbers as a field, (N, L, ...); those of different lengths are filled up.

    Floats become float32. Features get the field "mask" beside them, (N, L) float32, which is 0 at
    padding; it is 0 for floats, and for integers, which are tokens from 0 on, one more than the
    largest, with an empty name. Labels are filled up with −1.

    Args:
      values: N lists of numbers.
      where: their place, for messages.
      field: x or y.
    """

    def row(value: Any) -> np.ndarray:
        array = np.asarray(value)
        nested = array.dtype == object and array.ndim and array.size  # lists of lists
        return np.array([row(each) for each in array]) if nested else array

    rows = []
    for number, value in enumerate(values):
        try:
            rows.append(row(value))
        except ValueError:
            rows.append(np.array(None))
        if (rows[-1].dtype.kind not in "fiub" and rows[-1].size) or not rows[-1].ndim:
            raise ValueError(
                f"{where} must hold lists of numbers, got {str(value)[:40]} in row {number + 1}"
            )
    first = rows[0].shape
    odd = next((k for k, r in enumerate(rows) if r.size and r.shape[1:] != first[1:]), None)
    if odd is not None:
        raise ValueError(
            f"{where} must hold arrays of one shape, or lists of numbers, got {first} in row 1 and "
            f"{rows[odd].shape} in row {odd + 1}"
        )
    lengths = np.array([len(r) for r in rows])
    kind = np.result_type(*{r.dtype for r in rows if r.size} or {np.dtype(np.float32)})
    floating = kind.kind == "f"
    kind = np.dtype(np.float32) if floating else kind
    if lengths.min() == lengths.max():
        with np.errstate(over="ignore"):
            return {field: np.stack(rows).astype(kind, copy=False)}
    joined = np.concatenate([r for r in rows if r.size])
    if field == "y" and floating:
        raise ValueError(f"{where} holds lists of fractions, which must be of one length")
    if not floating and joined.min() < 0:
        raise ValueError(
            f"{where} holds lists of different lengths with negative integers: tokens are 0 or "
            "more, and other numbers floating"
        )
    tokens = 0 if floating else int(joined.max()) + 1
    if field == "x" and tokens >= _MOST_TOKENS:
        raise ValueError(f"{where} holds lists of tokens up to {tokens - 1}: number them from 0")
    filling = tokens if field == "x" else _PADDED
    found = np.full((len(rows), lengths.max(), *first[1:]), filling, kind if floating else np.int64)
    mask = np.arange(lengths.max()) < lengths[:, None]
    with np.errstate(over="ignore"):
        found[mask] = joined
    if field == "y":
        return {"y": found}
    names = {} if floating else {"categories.x": np.array([*map(str, range(tokens)), ""])}
    return {"x": found, "mask": mask.astype(np.float32), **names}


def refuse_files(texts: Iterable[str], where: str) -> None:
    """Raise ValueError if all texts are names of files."""
    first, *_ = found = [*itertools.islice(texts, 1000)]
    if all(text.lower().endswith(_FILES) for text in found):
        raise ValueError(
            f"{where} holds names of files, such as {first!r}, no text: images are read by "
            "data.load_images (images:PATH) from a folder of clients and classes"
        )


def characters(texts: Sequence[str], length: int | None) -> tuple[dict[str, np.ndarray], list[str]]:
    """Encode the texts of a column as `encode` does, the first `length` characters of each."""
    if length is not None:
        checks.count(length=length)
    return encode({"x": [np.array([text[:length] for text in texts])]}, [])


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


def _numbered(texts: list[np.ndarray], symbols: tuple[str, ...]) -> tuple[np.ndarray, bool]:
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
    found = np.concatenate(numbers)
    padded = bool((found == len(symbols)).any())
    return found[:, 0] if texts[0].ndim == 1 and width == 1 and not padded else found, padded
