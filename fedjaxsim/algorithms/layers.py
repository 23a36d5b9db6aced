"""Splitting parameters by path: the personal part of a model and the rest that is shared."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedjaxsim.privacy.messages import paths_of as paths_of

PyTree = Any
Selection = str | Sequence[str] | Callable[[str], bool] | None
"""Parameters by the paths of leaves, such as "Dense_1/kernel": a path or the first keys of paths,
such as "Dense_1"; several of them; a predicate on paths; or None for all parameters."""


def split(params: PyTree, selection: Selection) -> tuple[PyTree, PyTree]:
    """Split parameters by path into the selected part and the rest.

    Both are like `params`, with None, which is no leaf for JAX, for the leaves of the other part.
    """
    chosen = _chosen(selection, paths_of(params))
    leaves, structure = jax.tree.flatten(params)

    def part(wanted: bool) -> PyTree:
        kept = [leaf if c == wanted else None for leaf, c in zip(leaves, chosen, strict=True)]
        return jax.tree.unflatten(structure, kept)

    return part(True), part(False)


def merge(selected: PyTree, rest: PyTree) -> PyTree:
    """Merge the two parts of `split`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, selected, rest, is_leaf=lambda leaf: leaf is None
    )


def either(selection: Selection, name: str) -> Selection:
    """Return a selection that also selects the parameters under a name."""
    return None if selection is None else (*_each(selection), name)


def _each(selection: Any) -> Any:
    return (selection,) if isinstance(selection, str) or callable(selection) else selection


def _chosen(selection: Selection, paths: list[str]) -> list[bool]:
    if selection is None:
        return [True] * len(paths)
    each = _each(selection)
    listed = isinstance(each, Sequence) and all(
        isinstance(one, str) or callable(one) for one in each
    )
    if not listed or not each:
        raise ValueError(
            "a selection of parameters must be a name, names, a predicate on paths, or None for "
            f"all; got {selection!r}, of parameters {paths}"
        )
    found = [
        [one(path) if callable(one) else f"{path}/".startswith(f"{one}/") for path in paths]
        for one in each
    ]
    for one, selected in zip(each, found, strict=True):
        if not any(selected):
            raise ValueError(
                f"{'the predicate' if callable(one) else repr(one)} selects none of the "
                f"parameters, which are {paths}; a name must be a path, or the beginning of paths "
                "up to a '/'"
            )
    return [any(selected) for selected in zip(*found, strict=True)]
