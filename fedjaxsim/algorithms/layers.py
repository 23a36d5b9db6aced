"""Splitting parameters by path: the personal part of a model and the rest that is shared."""

from collections.abc import Callable
from typing import Any

import jax

PyTree = Any
Selection = str | Callable[[str], bool] | None
"""Which parameters: the name of a top-level layer, a predicate on the path of a leaf, whose keys
are joined by "/" as in "Dense_1/kernel", or None for all of them."""


def split(params: PyTree, selection: Selection) -> tuple[PyTree, PyTree]:
    """Splits parameters in two by path.

    Args:
      params: a pytree of arrays without None.
      selection: which leaves go to the first part.

    Returns:
      The selected part and the rest: two pytrees like `params` with None, which for JAX is no leaf,
      in place of the leaves of the other part.

    Raises:
      ValueError: if nothing is selected.
    """

    def chosen(path, leaf):
        del leaf
        if selection is None:
            return True
        if callable(selection):
            return bool(selection(jax.tree_util.keystr(path, simple=True, separator="/")))
        return jax.tree_util.keystr(path[:1], simple=True) == selection

    marks = jax.tree_util.tree_map_with_path(chosen, params)
    if not any(jax.tree.leaves(marks)):
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        what = repr(selection) if isinstance(selection, str) else "the predicate"
        raise ValueError(f"{what} selects none of the parameters, which are {paths}")
    selected = jax.tree.map(lambda mark, leaf: leaf if mark else None, marks, params)
    rest = jax.tree.map(lambda mark, leaf: None if mark else leaf, marks, params)
    return selected, rest


def merge(selected: PyTree, rest: PyTree) -> PyTree:
    """Puts the two parts of `split` together again."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, selected, rest, is_leaf=lambda leaf: leaf is None
    )
