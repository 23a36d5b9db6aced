"""Methods that move data between the host and devices on purpose."""

import functools
import inspect
from typing import TypeVar

import jax

Class = TypeVar("Class", bound=type)


def moves_data(cls: Class) -> Class:
    """Let a class's public methods, and the making of it, move data under `jax.transfer_guard`.

    A user's guard is about his own loop: ours read seeds and write results on the host.
    """
    for name, method in list(vars(cls).items()):
        public = not name.startswith("_") or name in ("__init__", "__post_init__", "__repr__")
        if public and inspect.isfunction(method):
            setattr(cls, name, _allowed(method))
    return cls


def _allowed(method):
    @functools.wraps(method)
    def called(*args, **kwargs):
        with jax.transfer_guard("allow"):
            return method(*args, **kwargs)

    return called
