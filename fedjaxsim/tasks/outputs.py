"""The model of a task, with checks of its parameters and outputs by shapes while JAX traces."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.models.check_kinds import require_model
from fedjaxsim.models.model import Model


def with_checks(name: str, model: Any, num_outputs: int, *, per_token: bool = False) -> Model:
    """Return the model of a task, which raises where it is traced with a wrong result.

    Args:
      name: the task.
      model: a `Model`.
      num_outputs: c.
      per_token: whether outputs are (b, L, c), not (b, c).

    Raises:
      ValueError: if it is no model; while it is traced, if a parameter is no floating number, or
        outputs are others.
    """
    model = require_model(f"{name} needs", model)
    wanted = f"(b, {'L, ' if per_token else ''}{num_outputs})"

    def checked(outputs, x):
        shape = getattr(outputs, "shape", None)
        if shape is None or len(shape) != 2 + per_token or shape[::len(shape) - 1] != (
            len(x), num_outputs
        ):  # fmt: skip
            got = f"shape {shape}" if shape is not None else f"a {type(outputs).__name__}"
            raise ValueError(
                f"{name} needs a model with outputs {wanted}, got {got} for {len(x)} rows"
            )
        return outputs

    @functools.wraps(model.init)  # its arguments are checked when a simulation is made
    def init(key):
        params = model.init(key)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            dtype = jnp.result_type(leaf)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"parameters of a model must be floating numbers, got {dtype} at "
                    f"{jax.tree_util.keystr(path, simple=True, separator='/')}: close over "
                    "constants in apply"
                )
        return params

    def apply(params, x):
        return checked(model.apply(params, x), x)

    def train(params, x, weight, keys):
        assert model.train is not None
        outputs, statistics = model.train(params, x, weight, keys)
        return checked(outputs, x), statistics

    dense, training = model.dense, None if model.train is None else train
    if dense is not None:
        dense = dense._replace(of=apply) if dense.of is model.apply else None
    return model._replace(init=init, apply=apply, train=training, dense=dense)
