"""Checks of the parts of a simulation, when it is made."""

import contextlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.samplers import Sampler, Sampling
from fedjaxsim.tasks.task import Task

_PARTS = {
    "algorithm": (Algorithm, "pmtl(task)"),
    "task": (Task, "softmax(model, num_classes)"),
    "warm_start": (WarmStart, "WarmStart(start, published)"),
    "population": (Population, "Population.from_clients(clients)"),
    "sampling": (Sampling, "poisson(0.2)"),
    "sampler": (Sampler, "poisson(0.2).for_clients(m)"),
    "minibatches": (Minibatches, "Minibatches(10, epochs=1)"),
    "mechanism": (Mechanism, "gaussian()"),
}
_ARGUMENTS = {
    "algorithm": {
        "init": "key, hparams[, fields]",
        "client": "shared, personal, data, hparams, context",
        "server": "shared, release, hparams, round",
        "predict": "shared, personal, hparams, client_id",
        "predict_with_data": "shared, personal, data, hparams, client_id",
        "example_epsilon": "hparams",
        "message_bytes": "message",
        "curvature": "loss, hparams",
        "check": "hparams",
    },
    "warm_start": {"published": "shared", "start": "hparams, published, own"},
    "task": {
        "init": "key",
        "loss": "params, batch",
        "metrics": "params, batch",
        "check": "fields",
        "divergence": "params, other, batch",
        "track": "params, moved, batch",
        "targets": "fields",
        "on_model": "model",
        "predict": "params, fields",
        "curvature": "square",
    },
    "sampling": {"for_clients": "num_clients"},
    "sampler": {"draw": "key, round, hparams", "rate": "hparams", "check": "hparams"},
    "mechanism": {
        "init": "hparams",
        "zero": "message, num_clients",
        "add": "accumulator, messages, mask, ids, state, hparams",
        "release": "accumulator, denominator, key, state, hparams, round",
        "check": "hparams",
    },
}
_OPTIONAL = (
    "predict_with_data", "example_epsilon", "message_bytes", "start", "divergence", "targets",
    "track", "on_model", "predict", "curvature",
)  # fmt: skip
"""Functions that a part may lack."""


def check_parts(**parts: Any) -> None:
    """Check the kind of each part of a simulation, by name, and its functions' arguments."""
    for name, part in parts.items():
        kind, example = _PARTS[name]
        if not isinstance(part, kind):
            name = name.replace("_", " ")
            raise ValueError(
                f"{name} must be of type {kind.__name__}, such as {example}, got {described(part)}"
            )
        public = getattr(part, "public", ())
        if not (isinstance(public, tuple) and all(isinstance(text, str) for text in public)):
            raise ValueError(f"the {name}'s public must be a tuple of sentences, got {public!r}")
        for function, arguments in _ARGUMENTS.get(name, {}).items():
            given = getattr(part, function)
            if given is not None or function not in _OPTIONAL:
                check_arguments(f"the {name}'s {function}", given, arguments)


def check_arguments(name: str, function: Any, arguments: str) -> None:
    """Check that a function takes arguments of these names; that in brackets may be missing."""
    if not callable(function):
        raise ValueError(f"{name} must be a function of ({arguments}), got {described(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    required = arguments.partition("[")[0]
    for names in (required, arguments):
        with contextlib.suppress(TypeError):
            signature.bind(*names.split(", "))
            return
    names = str(signature.replace(return_annotation=signature.empty))
    raise ValueError(f"{name} must take ({arguments}), but takes {names}")


def require_state(state: Any) -> None:
    """Check that a simulation can go on from a state."""
    if not isinstance(state, SimulationState):
        raise ValueError(f"state must be one that init or run returned, got {described(state)}")
    known = isinstance(state.round, jax.Array) and not isinstance(state.round, Tracer)
    if known and state.round.is_deleted():
        raise ValueError(
            "the state is used up: run reuses the memory of the state that it starts from; go on "
            "from the state that it returned, or from another of init"
        )


def rounds_done(state: Any) -> int:
    """Return the number of rounds of a state, checked as by `require_state`."""
    require_state(state)
    return int(state.round)


def require_key(key: Any) -> jax.Array:
    """Return a seed as a key, or the key."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return jax.random.key(key, impl="threefry2x32")
    if isinstance(key, jax.Array):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and "fry" in str(key.dtype):
            return key
        # Other generators share one stream under vmap, which breaks noise and sampling.
        raise ValueError(f"key must be a typed threefry key, jax.random.key(seed), got {key}")
    raise ValueError(f"key must be a seed, such as 0, or jax.random.key(0), got {described(key)}")


def described(value: Any) -> str:
    """Return a value in a few words, for messages."""
    if isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return f"an array {value.dtype}{list(value.shape)}"
    if value is None:
        return "None"
    if inspect.isfunction(value):
        return f"the function {value.__name__}"
    return f"a {type(value).__name__}"
