"""The symbols and special values of hyperparameters, as figures and tables name them."""

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
_MEANINGS: dict[tuple[str, Any], str] = {("target_epsilon", math.inf): "no noise"}
_LABELS: dict[str, str] = {}
_SETTINGS: dict[str, str] = {}


def remember(records: Iterable["Hyperparameter"]) -> None:
    """Take over the symbols of hyperparameters that runs have; a later record wins."""
    _remember_package()
    _take(records)


def setting_of(name: str) -> str:
    """Return the name of the flag of a hyperparameter."""
    _remember_package()
    return _SETTINGS.get(name, name)


def key_label(key: str) -> str:
    """Return a key as axes and legends name it."""
    _remember_package()
    return _SYMBOLS.get(key, key.replace("_", " "))


def axis_label(key: str) -> str:
    """Return the label of an axis of a hyperparameter, as in `η (learning rate)`."""
    _remember_package()
    symbol, label = _SYMBOLS.get(key), _LABELS.get(key)
    return f"{symbol} ({label})" if symbol and label else symbol or label or key.replace("_", "-")


def meaning(key: str, value: Any) -> str | None:
    """Return the name of a special value, as `local` for a level of personalization of 0."""
    _remember_package()
    return _MEANINGS.get((key, value))


@functools.cache
def _remember_package() -> None:
    """Take over the symbols of the package's own hyperparameters."""
    from fedjaxsim.hyperparameters import ever_declared_by  # names of parts need no JAX

    factories = [*(system.factory for system in SYSTEMS.values()), *MECHANISMS.values()]
    for factory in (*factories, *SAMPLERS.values()):
        _take(ever_declared_by(resolve(factory)))


def _take(records: Iterable["Hyperparameter"]) -> None:
    for record in records:
        _SETTINGS[record.name] = record.setting
        for key in (record.name, record.setting):
            if record.symbol is not None:
                _SYMBOLS[key] = record.symbol
            if record.label is not None:
                _LABELS[key] = record.label
            _MEANINGS.update({(key, value): text for value, text in record.meanings.items()})
