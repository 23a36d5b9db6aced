"""Names of keys, their values and data in figures and tables."""

import math
from collections.abc import Sequence
from typing import Any

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.data.readers import DataSpec
from fedjaxsim.privacy.entries import epsilon_text
from fedjaxsim.report.progress import number

Combination = tuple[Any, ...]
"""Values of several keys; None where a run's table does not set one."""
NOISE = ("noise_multiplier", "target_epsilon")
"""Columns that set the noise of a run."""
_LISTED = 3
"""Values of a list that a label shows."""


def algorithm_title(name: str) -> str:
    """Return the title of a system; of `module:factory`, the factory; of other text, the text."""
    if name in SYSTEMS:
        return SYSTEMS[name].title
    return name if ": " in name else short_name(name)


def short_name(part: str) -> str:
    """Return the name of a part; of `module:factory`, the factory unless a system has its name."""
    name = part.rpartition(":")[2]
    return part if name in SYSTEMS else name


def data_label(data: str, clients: int | None) -> str:
    """Return the name of a data set with the number of its clients, if that is known."""
    return DataSpec(data).short_name + (f", {clients} clients" if clients else "")


def epsilon_label(epsilon: float | None) -> str:
    """Format the ε spent, rounded up; None is ∞."""
    if not epsilon or math.isinf(epsilon):
        return "ε = 0" if epsilon == 0 else "ε = ∞"
    return f"ε ≤ {epsilon_text(epsilon)}"


def value_label(key: str, value: Any) -> str:
    """Format a value; infinite noise is followed by its meaning.

    Clients' numbers have their least and largest, a long list its first values and its length.
    """
    if isinstance(value, list):
        if value and all(isinstance(x, float) for x in value):
            return f"{number(min(value))} to {number(max(value))}"
        more = f", … ({len(value)})" if len(value) > _LISTED else ""
        return ", ".join(map(str, value[: 2 if more else _LISTED])) + more
    if value is None:
        return "not set"
    if key == "algorithm":
        return short_name(str(value))
    if isinstance(value, float):
        none = value == (math.inf if key_label(key) == "ε" else 0 if key == NOISE[0] else None)
        return ("∞" if math.isinf(value) else f"{value:.6g}") + " (no noise)" * none
    return str(value)


def setting_label(key: str, value: Any) -> str:
    """Return a setting in a label, as in `ε = 1` or `message update`."""
    sign = " " if isinstance(value, str | None) else " = "
    return f"{key_label(key)}{sign}{value_label(key, value)}"


def combination_label(keys: Sequence[str], values: Sequence[Any]) -> str:
    """Format values with their keys, without unset ones; a word needs no key."""
    parts = [
        algorithm_title(value) if isinstance(value, str) else setting_label(key, value)
        for key, value in zip(keys, values, strict=True)
        if value is not None
    ]
    if parts or not keys:
        return ", ".join(parts)
    return f"{' and '.join(map(key_label, keys))} not set"


def key_label(key: str) -> str:
    """Return the name of a key in axes, legends and tables."""
    return "ε" if key == NOISE[1] else key.replace("_", " ").replace("epsilon", "ε")
