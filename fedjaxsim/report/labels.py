"""Names of keys, their values and data in figures and tables."""

import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.factories import resolve
from fedjaxsim.privacy.choices import MECHANISMS, SAMPLERS
from fedjaxsim.report.progress import epsilon_text, number

if TYPE_CHECKING:
    from fedjaxsim.hyperparameters import Hyperparameter

Combination = tuple[Any, ...]
"""Values of several keys; None where a run's table does not set one."""
NOISE = ("noise_multiplier", "target_epsilon")
"""Columns that set the noise of a run."""


def algorithm_title(name: str) -> str:
    """Return the title of a system; of `module:factory`, the factory; of other text, the text."""
    if name in SYSTEMS:
        return SYSTEMS[name].title
    return name if ": " in name else short_name(name)


def short_name(part: str) -> str:
    """Return the name of a part; of `module:factory`, the factory."""
    return part.rpartition(":")[2]


def data_name(data: str) -> str:
    """Return the name of a data set without its folder, as in `patients` of csv:x/patients.csv."""
    kind, _, path = data.partition(":")
    return PurePath(path).stem or kind


def data_label(data: str, clients: int | None) -> str:
    """Return the name of a data set with the number of its clients, if that is known."""
    return data_name(data) + (f", {clients} clients" if clients else "")


def epsilon_label(epsilon: float | None) -> str:
    """Format the ε spent, rounded up; None is ∞."""
    if not epsilon or math.isinf(epsilon):
        return "ε = 0" if epsilon == 0 else "ε = ∞"
    return f"ε ≤ {epsilon_text(epsilon).rstrip('0').rstrip('.')}"


def ends(value: Any) -> Any:
    """Return the least and the largest of clients' numbers in words, and other values unchanged."""
    if not (value and isinstance(value, list) and all(isinstance(x, float) for x in value)):
        return value
    return f"{number(min(value))} to {number(max(value))}"


def value_label(key: str, value: Any) -> str:
    """Format a value with its meaning, as in `0 (local)`, a level of personalization."""
    named: str | None = None
    value = ends(value)
    if not isinstance(value, list):  # as of one-hot columns
        found = (each.meanings[value] for each in _named(key) if value in each.meanings)
        named = next(found, "no noise" if (key, value) == ("target_epsilon", math.inf) else None)
    if value is None:
        text = "not set"
    elif key == "algorithm":
        text = short_name(str(value))
    elif isinstance(value, float):
        text = "∞" if math.isinf(value) else number(value)
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text + (f" ({named})" if named else "")


def combination_label(keys: Sequence[str], values: Sequence[Any]) -> str:
    """Format values with their keys, without unset ones; a word needs no key."""
    parts = [
        algorithm_title(value)
        if isinstance(value, str)
        else f"{key_label(key)} = {value_label(key, value)}"
        for key, value in zip(keys, values, strict=True)
        if value is not None
    ]
    if parts or not keys:
        return ", ".join(parts)
    return f"{' and '.join(map(key_label, keys))} not set"


_SYMBOLS = {"target_epsilon": "ε", "batch_size": "b", "delta": "δ"}


def remember(records: Iterable["Hyperparameter"]) -> None:
    """Add hyperparameters of runs; a later record wins."""
    _records().extend(records)


def key_label(key: str) -> str:
    """Return the symbol of a key in axes and legends, or its name."""
    symbols = (each.symbol for each in _named(key) if each.symbol)
    return next(symbols, _SYMBOLS.get(key, key.replace("_", " ")))


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
