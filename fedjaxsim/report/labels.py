"""Names and colours of swept keys and their values in figures and tables."""

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.report.progress import epsilon_text, number
from fedjaxsim.report.symbols import key_label, meaning

Combination = tuple[Any, ...]
"""Values of several keys; None where a run's table does not set one."""
NOISE = ("noise_multiplier", "target_epsilon")
"""Columns that set the noise of a run."""
MEANING = "zero-out, joint DP"
"""Adjacency and view of ε in figures."""


def algorithm_title(name: str) -> str:
    """Return the title of a system; of `module:factory`, the factory; of other text, the text."""
    if name in SYSTEMS:
        return SYSTEMS[name].title
    return name if ": " in name else name.rpartition(":")[2]


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


def value_label(key: str, value: Any) -> str:
    """Format a value with its meaning, as in `0 (local)`."""
    named = meaning(key, value)
    if value is None:
        text = "not set"
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
