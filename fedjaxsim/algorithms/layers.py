"""Splitting parameters by path: the personal part of a model and the rest that is shared."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

PyTree = Any
Selection = str | Sequence[str] | Callable[[str], bool] | None
"""Parameters by the paths of leaves, such as "Dense_1/kernel": a path or the first keys of paths,
such as "Dense_1"; several of them; a predicate on paths; or None for all parameters."""
_NAME = "a name must be a path, or the beginning of paths up to a '/'"


def split(params: PyTree, selection: Selection) -> tuple[PyTree, PyTree]:
    """Split parameters in two by path.

    Args:
      params: a pytree of arrays without None.
      selection: the leaves of the first part.

    Returns:
      The selected part and the rest: two pytrees like `params` with None, which is no leaf for JAX,
      in place of the leaves of the other part.

    Raises:
      ValueError: if a name or the predicate selects nothing, or the selection has another type.
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
    if selection is None:
        return None
    if callable(selection):
        return lambda path: selection(path) or _under(path, name)
    return (selection, name) if isinstance(selection, str) else (*selection, name)


def paths_of(params: PyTree) -> list[str]:
    """Return the paths of all leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def _chosen(selection: Selection, paths: list[str]) -> list[bool]:
    if selection is None:
        return [True] * len(paths)
    if callable(selection):
        chosen = [bool(selection(path)) for path in paths]
        if not any(chosen):
            raise ValueError(f"the predicate selects none of the parameters, which are {paths}")
        return chosen
    names = [selection] if isinstance(selection, str) else selection
    listed = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not listed or not names:
        raise ValueError(
            "a selection of parameters must be a name, names, a predicate on paths, or None for "
            f"all; got {selection!r}, of parameters {paths}"
        )
    for name in names:
        if not any(_under(path, name) for path in paths):
            raise ValueError(f"{name!r} selects none of the parameters, which are {paths}; {_NAME}")
    return [any(_under(path, name) for name in names) for path in paths]


def _under(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}/")
