"""Symbols and special values of hyperparameters in figures and tables."""

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.factories import resolve
from fedjaxsim.privacy.choices import MECHANISMS, SAMPLERS

if TYPE_CHECKING:
    from fedjaxsim.hyperparameters import Hyperparameter

_SYMBOLS = {"target_epsilon": "ε", "batch_size": "b", "delta": "δ"}
_MEANINGS = {("target_epsilon", math.inf): "no noise"}


def remember(records: Iterable["Hyperparameter"]) -> None:
    """Add hyperparameters of runs; a later record wins."""
    _records().extend(records)


def key_label(key: str) -> str:
    """Return the symbol of a key in axes and legends, or its name."""
    return _last(key, "symbol") or _SYMBOLS.get(key, key.replace("_", " "))


def meaning(key: str, value: Any) -> str | None:
    """Return the name of a special value, such as `local` for a level of personalization of 0."""
    if isinstance(value, list):  # as of one-hot columns
        return None
    found = (each.meanings[value] for each in _named(key) if value in each.meanings)
    return next(found, _MEANINGS.get((key, value)))


@functools.cache
def _records() -> list["Hyperparameter"]:
    """Return all known hyperparameters, the package's own first."""
    from fedjaxsim.hyperparameters import ever_declared_by  # names of parts need no JAX

    systems = [system.factory for system in SYSTEMS.values()]
    factories = map(resolve, (*systems, *MECHANISMS.values(), *SAMPLERS.values()))
    return [record for factory in factories for record in ever_declared_by(factory)]


def _named(key: str) -> list["Hyperparameter"]:
    """Return the records with a name, the last one first."""
    return [each for each in reversed(_records()) if key == each.name]


def _last(key: str, attribute: str) -> str | None:
    found = (getattr(each, attribute) for each in _named(key))
    return next((value for value in found if value is not None), None)
