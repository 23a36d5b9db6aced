"""Text as integers: characters of strings, words of lists, and names of classes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of Shakespeare, in the order of LEAF (`models/utils/language_utils.py`)."""
_PADDED = -1
_LARGEST_CODE = 0x10FFFF

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
    for name, arrays in fields.items():
        if len({(array.dtype.kind == "U", array.ndim) for array in arrays}) > 1:
            raise ValueError(f"{name!r} must be text of one form or numbers, alike for all clients")
    categories: dict[str, tuple[str, ...]] = {}
    public = []
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
        [{"x": x, "y": y} for x, y in zip(fields["x"], fields["y"], strict=True)],
        categories,
        tuple(f"{what} is read from all clients' rows and taken as public." for what in public),
    )


def characters(texts: Sequence[str], length: int | None) -> tuple[dict[str, np.ndarray], list[str]]:
    """Encode the texts of a column as `encode` does.

    Args:
      texts: N texts.
      length: characters to keep of each, the first ones; None keeps all.

    Returns:
      The arrays x, (N, L) integers, and categories.x; and sentences on what is public.
    """
    if length is not None and length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
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
