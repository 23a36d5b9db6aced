"""States as named arrays: the form in which they lie in files."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


def to_arrays(state: Any) -> dict[str, np.ndarray]:
    """The leaves of a pytree as numpy's own kinds of arrays, named by their paths in it."""
    return {name: _raw(leaf) for name, leaf in _leaves(state)}


def from_arrays(saved: Mapping[str, np.ndarray], like: Tree, where: str) -> Tree:
    """The pytree that `to_arrays` took apart.

    Args:
      saved: arrays by name.
      like: a pytree of the same structure, shapes and types.
      where: what held the arrays, for messages.

    Raises:
      ValueError: if the arrays are not those of `like`.
    """
    leaves = _leaves(like)
    if saved.keys() != dict(leaves).keys():
        differing = sorted(saved.keys() ^ dict(leaves).keys())
        raise ValueError(f"{where} holds another kind of state: {', '.join(differing)} differ")
    restored = [_restore(saved[name], leaf, f"{where}: {name}") for name, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def _leaves(tree: Any) -> Sequence[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> np.ndarray:
    """A leaf on the host; of a typed random key its words, of any float type its bits."""
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    # The file format knows numpy's own types only: others (bfloat16) travel as integers.
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _restore(saved: np.ndarray, like: Any, name: str) -> Any:
    expected = _raw(like)
    if saved.shape != expected.shape or saved.dtype != expected.dtype:
        raise ValueError(
            f"{name} must be {expected.dtype}{list(expected.shape)}, "
            f"got {saved.dtype}{list(saved.shape)}"
        )
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(saved), impl=jax.random.key_impl(like))
    return jnp.asarray(saved.view(np.asarray(like).dtype))
