"""Checks of the arguments of which models are made; each error names the function to call."""

import contextlib
import inspect
from typing import Any

from fedjaxsim.models.model import Model

_READERS = {
    "flax.linen": "from_flax(module, input_shape)",
    "flax.nnx": "from_nnx(lambda rngs: …)",
    "equinox": "from_equinox(lambda key: …)",
}
"""The function that makes a model of a library's modules."""


def require_model(who: str, model: Any) -> Model:
    """Return the model that a function got or returned; `who` is as in "softmax needs"."""
    if isinstance(model, Model):
        return model
    reader = _reader_of(model)
    use = f"fjs.models.{reader}" if reader else "fjs.models.linear or fjs.Model(init, apply)"
    raise ValueError(f"{who} a Model, made by {use}, got {_described(model)}")


def require_module(name: str, module: Any) -> None:
    """Raise ValueError if the argument of `from_flax` is no instance of a module of flax.linen."""
    if _reader_of(module) == _READERS["flax.linen"] and not isinstance(module, type):
        return
    reader = _reader_of(module)
    if reader and not reader.startswith(name):
        raise ValueError(f"{_described(module)} is made a model by fjs.models.{reader}, not {name}")
    raise ValueError(
        f"{name} needs an instance of a flax.linen module, such as nn.Dense(10), "
        f"got {_described(module)}"
    )


def require_maker(name: str, make: Any, example: str) -> None:
    """Raise ValueError unless a function makes a module from one argument, as `example` does."""
    by_class = isinstance(make, type)
    good = callable(make) and (by_class or not _reader_of(make))
    with contextlib.suppress(ValueError):  # some builtins have no signature
        try:
            # The classes of flax.nnx are called by a metaclass that takes any arguments.
            signature = inspect.signature(make.__init__ if by_class else make)
            signature.bind(*[None] * (1 + by_class))
        except TypeError:
            good = False
    if not good:
        raise ValueError(
            f"{name} needs a function that makes the module, such as {example}, "
            f"got {_described(make)}"
        )


def _reader_of(module: Any) -> str | None:
    """Return how to make a model of a module, or of a class of modules."""
    for base in (module if isinstance(module, type) else type(module)).__mro__:
        for library, reader in _READERS.items():
            if f"{base.__module__}.".startswith(f"{library}."):
                return reader
    return None


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isfunction(value):
        return f"the function {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"
