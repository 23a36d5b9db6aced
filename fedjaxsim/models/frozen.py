"""Models with a part that clients train, such as adapters, and a part that stays fixed."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.models.model import STATISTICS, FrozenWeights, Model

PyTree = Any


def trainable(model: Model, params: PyTree, where: Callable[[str], bool]) -> Model:
    """Make a model of which clients train one part, such as adapters or the last layers.

    Running statistics (BatchNorm) are part of the frozen part, and batches normalized by them.
    Only the trained part is kept by clients, sent, bounded and noised. The frozen part exists once,
    whatever the number of clients. Both start from `params`, whatever the seed, and must be made
    without the clients' data: a guarantee states that assumption.

    `jax.jit` and `jax.checkpoint` belong around the apply of the whole model, not of the result:
    they would keep the frozen weights of one program for the next, and JAX raises an error.

    Args:
      model: the whole model.
      params: its parameters, such as pretrained ones.
      where: `(name) -> bool`, whether a parameter is trained, by its path, such as "Dense_1/bias".

    Raises:
      ValueError: if `where` selects nothing, or the model has a frozen part already.
    """
    trained = [name for name, _ in _named(params) if where(name)]

    def init(key):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.array(leaf) if _name(path) in trained else None, params
        )

    return with_frozen(model, params, trained, init)


def with_frozen(
    model: Model, params: PyTree, trained: Collection[str], init: Callable[[jax.Array], PyTree]
) -> Model:
    """Make a model of which some parameters are trained; see `trainable`."""
    if model.frozen is not None:
        raise ValueError("the model has a frozen part already: give the whole model")
    # Running statistics are frozen with the rest: batches are normalized by them, not by their own.
    if any(name.split("/")[0] == STATISTICS for name in trained):
        raise ValueError("running statistics (BatchNorm) of a model with a frozen part stay fixed")
    names, structure = [name for name, _ in _named(params)], jax.tree.structure(params)
    if not trained:
        raise ValueError(f"at least one parameter must be trained, of {', '.join(names)}")
    frozen = FrozenWeights({k: jnp.asarray(v) for k, v in _named(params) if k not in trained})

    def whole(part):
        known = dict(_named(part)) | frozen.current
        return jax.tree.unflatten(structure, [known[name] for name in names])

    def train(part, x, weight, keys):
        assert model.train is not None
        return model.train(whole(part), x, weight, keys)

    def representation(part, x):
        assert model.representation is not None
        return model.representation(whole(part), x)

    layer = model.output_layer
    return Model(
        init,
        lambda part, x: model.apply(whole(part), x),
        None if any(name.split("/")[0] == layer for name in frozen.weights) else layer,
        representation=None if model.representation is None else representation,
        frozen=frozen,
        train=None if model.train is None or model.keeps_statistics else train,
    )


def _named(tree: PyTree) -> list[tuple[str, Any]]:
    return [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
