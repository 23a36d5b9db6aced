"""Text as arrays of integers: characters of strings, names of classes."""

from collections.abc import Mapping

import numpy as np

from fedjaxsim.data.arrays import join

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of Shakespeare, in the order of LEAF (`models/utils/language_utils.py`)."""
_PADDED = -1
_LARGEST_CODE = 0x10FFFF


def encode(
    fields: Mapping[str, list[np.ndarray]], owners: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Join the clients' parts of the fields x and y, with text replaced by integers.

    Strings in x, (n,), become their characters, (n, L), in which one more integer, with an empty
    name, pads shorter ones; it has a name whether a string is shorter or not, or a model's shape
    would follow from one string. Labels that are single characters, (n,), or strings as long as x,
    (n, L), padded with −1, use the same integers; any other text in y names classes, in sorted
    order. Characters have the numbers of LEAF's Shakespeare if no others occur; otherwise they are
    numbered in sorted order.

    Returns:
      The fields, the names of their integers, and sentences on what is public.
    """
    texts = {n: parts for n, parts in fields.items() if any(p.dtype.kind == "U" for p in parts)}
    for name, parts in texts.items():
        if any(part.dtype.kind != "U" for part in parts):
            raise ValueError(f"{name!r} must be text or numbers, alike for all clients")
    arrays = {n: join(n, parts, owners) for n, parts in fields.items() if n not in texts}
    categories: dict[str, tuple[str, ...]] = {}
    public = []
    if "x" in texts:
        of_characters = {"x": texts.pop("x")}
        if "y" in texts and _width(texts["y"]) in (1, _width(of_characters["x"])):
            of_characters["y"] = texts.pop("y")
        encoded, categories = _characters(of_characters)
        arrays |= encoded
        if "".join(categories["x"]) != CHARACTERS:
            public.append("Which characters there are")
        public.append("The length of the longest text")
    if "y" in texts:
        names, arrays["y"] = np.unique(np.concatenate(texts["y"]), return_inverse=True)
        categories["y"] = tuple(names.tolist())
        public.append("Which classes there are")
    assumptions = [f"{what} is read from all clients' rows and taken as public." for what in public]
    return arrays, categories, tuple(assumptions)


def _characters(
    texts: Mapping[str, list[np.ndarray]],
) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]]]:
    """Return the characters of x, (N, L), and y, (N, L) or (N,), as integers, with their names."""
    seen = np.zeros(_LARGEST_CODE + 1, bool)
    for parts in texts.values():
        for part in parts:
            seen[_codes(part, _width([part]))] = True
    seen[0] = False  # pads shorter strings
    occurring = [*map(chr, np.flatnonzero(seen))]
    symbols = [*CHARACTERS] if set(occurring) <= set(CHARACTERS) else occurring
    padding = len(symbols)
    number = np.full(_LARGEST_CODE + 1, padding, np.uint8 if padding < 256 else np.int32)
    number[[*map(ord, symbols)]] = np.arange(padding)
    arrays, categories = {}, {}
    for name, parts in texts.items():
        width = _width(parts)
        codes = np.concatenate([number[_codes(part, width)] for part in parts])
        if name == "y":
            labels = codes.astype(np.int32)
            codes = np.where(labels == padding, _PADDED, labels)
            codes = codes[:, 0] if width == 1 else codes
        arrays[name] = codes
        categories[name] = (*symbols, *[""] * (name == "x"))
    return arrays, categories


def _width(texts: list[np.ndarray]) -> int:
    """Return the number of characters in the longest string."""
    return max(text.dtype.itemsize for text in texts) // np.dtype("U1").itemsize


def _codes(text: np.ndarray, width: int) -> np.ndarray:
    """Return the characters of strings, (n, width) uint32, padded with 0."""
    return text.astype(f"U{width}").view(np.uint32).reshape(len(text), width)
