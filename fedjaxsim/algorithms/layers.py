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
        part_leaves = [
            leaf if c == wanted else None for leaf, c in zip(leaves, chosen, strict=True)
        ]
        return jax.tree.unflatten(structure, part_leaves)

    return part(True), part(False)


def merge(selected: PyTree, unselected: PyTree) -> PyTree:
    """Merge the two parts of `split`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, selected, unselected, is_leaf=lambda leaf: leaf is None
    )


def either(selection: Selection, name: str) -> Selection:
    """Return a selection that also selects the parameters under a name."""
    return None if selection is None else (*_each(selection), name)


def _each(selection: Any) -> Any:
    return (selection,) if isinstance(selection, str) or callable(selection) else selection


def _chosen(selection: Selection, paths: list[str]) -> list[bool]:
    if selection is None:
        return [True] * len(paths)
    criteria = _each(selection)
    listed = isinstance(criteria, Sequence) and all(
        isinstance(criterion, str) or callable(criterion) for criterion in criteria
    )
    if not listed or not criteria:
        raise ValueError(
            "a selection of parameters must be a name, names, a predicate on paths, or None for "
            f"all; got {selection!r}, of parameters {paths}"
        )
    matches = [
        [
            criterion(path) if callable(criterion) else f"{path}/".startswith(f"{criterion}/")
            for path in paths
        ]
        for criterion in criteria
    ]
    for criterion, selected in zip(criteria, matches, strict=True):
        if not any(selected):
            raise ValueError(
                f"{'the predicate' if callable(criterion) else repr(criterion)} selects none of "
                f"the parameters, which are {paths}; a name must be a path, or the beginning of "
                "paths up to a '/'"
            )
    return [any(selected) for selected in zip(*matches, strict=True)]
