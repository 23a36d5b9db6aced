"""Means over seeds, with standard errors."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.kernels import backend

PyTree = Any


class Estimate(NamedTuple):
    """A mean over S seeds, and the sample standard deviation divided by √S."""

    mean: PyTree
    standard_error: PyTree


def map_seeds(function: Callable[[jax.Array], PyTree], keys: jax.Array) -> PyTree:
    """Apply a function to each of keys (S,), leaves (S, ...).

    One after another on a CPU, where a batch of whole runs takes S times the memory for no gain.
    """
    on_cpu = backend.platform() == "cpu"
    return jax.lax.map(function, keys) if on_cpu else jax.vmap(function)(keys)


def over_seeds(function: Callable[..., PyTree]) -> Callable[..., Estimate]:
    """Return the mean of a function over seeds, with its standard error.

    One key gives the value and gradient of one realization of cohorts, minibatches and noise. Their
    means are unbiased estimates of the mean over all runs and of its gradient.

    Args:
      function: `(key, hparams, ...) -> pytree`, from `hypergradient` or `price_of_privacy`.

    Returns:
      A compiled function `(keys, hparams, ...) -> Estimate` of keys (S,), S ≥ 2. It raises
      ValueError if `function` does, or if the keys are not (S,).
    """

    @jax.jit
    def mapped(keys, *arguments):
        values = map_seeds(lambda key: function(key, *arguments), keys)

        def error(v):
            return jnp.std(v, axis=0, ddof=1) / math.sqrt(keys.shape[0])

        mean = jax.tree.map(lambda v: jnp.mean(v, axis=0), values)
        return Estimate(mean, jax.tree.map(error, values))

    def averaged(keys, hparams, *arguments):
        if keys.ndim != 1 or keys.shape[0] < 2:
            raise ValueError(
                f"a mean over seeds needs keys of shape (S,) with S at least 2, got {keys.shape}"
            )
        # Values can be checked only before they are traced.
        jax.eval_shape(lambda key: function(key, hparams, *arguments), keys[0])
        return mapped(keys, hparams.as_arrays(), *arguments)

    return averaged
