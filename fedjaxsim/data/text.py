"""Text and lists of numbers as arrays: characters of strings, names of classes, padded tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjaxsim.data.arrays import join

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of Shakespeare, in the order of LEAF (`models/utils/language_utils.py`)."""
_PADDED = -1
_LARGEST_CODE = 0x10FFFF
_MOST_TOKENS = 1 << 17


def encode(
    fields: Mapping[str, list[np.ndarray]], owners: list[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Join the clients' parts of the fields x and y, with text replaced by integers.

    Strings in x, (n,), become their characters, (n, L), in which one more integer, with an empty
    name, pads shorter ones. Labels that are single characters, (n,), or strings as long as x,
    (n, L), padded with −1, use the same integers; any other text in y names classes, in sorted
    order. Characters have the numbers of LEAF's Shakespeare if no others occur; otherwise they are
    numbered in sorted order. Lists of numbers are filled up, see `with_padding`.

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
        elif len({part.dtype.kind == "U" for part in parts}) > 1:
            raise ValueError(f"{name!r} must be text or numbers, alike for all clients")
        elif parts[0].dtype.kind == "U":
            texts[name] = parts
        else:
            arrays[name] = join(name, parts, owners)
    if "x" in texts:
        of_characters = {"x": texts.pop("x")}
        if "y" in texts and _width(texts["y"]) in (1, _width(of_characters["x"])):
            of_characters["y"] = texts.pop("y")
        arrays |= (found := _characters(of_characters))
        if "".join(found["categories.x"]) != CHARACTERS:
            public.append("Which characters there are")
    if "y" in texts:
        names, arrays["y"] = np.unique(np.concatenate(texts["y"]), return_inverse=True)
        arrays["categories.y"] = names
        public.append("Which classes there are, by name,")
    return arrays, [f"{what} is read from all clients' rows" for what in public]


def _characters(texts: Mapping[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
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
    arrays: dict[str, np.ndarray] = {}
    for name, parts in texts.items():
        width = _width(parts)
        found = np.concatenate([number[_codes(part, width)] for part in parts])
        padded = bool((found == padding).any())
        if name == "y":
            labels = found.astype(np.int32)
            found = np.where(labels == padding, _PADDED, labels)
            found = found[:, 0] if width == 1 else found
        arrays[name] = found
        arrays[f"categories.{name}"] = np.array(symbols + [""] * (padded and name == "x"), str)
    return arrays


def _width(texts: list[np.ndarray]) -> int:
    """Return the number of characters in the longest string."""
    return max(text.dtype.itemsize for text in texts) // np.dtype("U1").itemsize


def _codes(text: np.ndarray, width: int) -> np.ndarray:
    """Return the characters of strings, (n, width) uint32, padded with 0."""
    return text.astype(f"U{width}").view(np.uint32).reshape(len(text), width)


def with_padding(
    values: Sequence[Any] | np.ndarray, where: str, field: str
) -> dict[str, np.ndarray]:
    """Stack N lists of numbers as a field, (N, L, ...); those of different lengths are filled up.

    Floats become float32. Features x get the field "mask" beside them, (N, L) float32, which is 0
    at padding; it is 0 for floats, and for integers, which are tokens from 0 on, one more than the
    largest, with an empty name. Labels y are filled up with −1.
    """
    rows = []
    for number, value in enumerate(values, 1):
        try:
            row = _rectangular(value)
        except ValueError:
            row = np.array(None)
        if (row.dtype.kind not in "fiub" and row.size) or not row.ndim:
            raise ValueError(
                f"{where} must hold lists of numbers, got {str(value)[:40]} in row {number}"
            )
        if row.size and row.shape[1:] != next((r for r in rows if r.size), row).shape[1:]:
            raise ValueError(
                f"{where} must hold arrays of one shape, or lists of numbers, got {row.shape} in "
                f"row {number}, other than before"
            )
        rows.append(row)
    full = [row for row in rows if row.size]
    lengths = np.array([len(row) for row in rows])
    kind = np.result_type(*{row.dtype for row in full} or {np.dtype(np.float32)})
    floating = kind.kind == "f"
    kind = np.dtype(np.float32) if floating else kind
    with np.errstate(over="ignore"):
        if lengths.min() == lengths.max():
            return {field: np.stack(rows).astype(kind, copy=False)}
        joined = np.concatenate(full).astype(kind)
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
    shape = (len(rows), lengths.max(), *full[0].shape[1:])
    found = np.full(shape, tokens if field == "x" else _PADDED, kind if floating else np.int64)
    mask = np.arange(lengths.max()) < lengths[:, None]
    found[mask] = joined
    if field == "y":
        return {"y": found}
    names = {} if floating else {"categories.x": np.array([*map(str, range(tokens)), ""])}
    return {"x": found, "mask": mask.astype(np.float32), **names}


def _rectangular(value: Any) -> np.ndarray:
    """Return a list of numbers, or of lists of one length, as an array."""
    array = np.asarray(value)
    nested = array.dtype == object and array.ndim and array.size
    return np.array([_rectangular(each) for each in array]) if nested else array
