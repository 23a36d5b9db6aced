"""Names and colours of swept keys and their values in figures and tables."""

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.extras import importing
from fedjaxsim.report.progress import epsilon_text, number
from fedjaxsim.report.symbols import key_label, meaning

Combination = tuple[Any, ...]
"""Values of several keys; None where a run's table does not set one."""
NOISE = ("noise_multiplier", "target_epsilon")
"""Columns that set the noise of a run."""
MEANING = "zero-out, joint DP"
"""Adjacency and view of ε in figures."""


class LineStyle(NamedTuple):
    """Label in the legend, and colour, dashes and marker in matplotlib's terms."""

    label: str
    colour: Any
    dashes: str
    marker: dict[str, Any]


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


def line_styles(
    keys: Sequence[str], combinations: Sequence[Combination]
) -> dict[Combination, LineStyle]:
    """Style the lines of combinations of values: colours for numbers, dashes for words."""
    from fedjaxsim.report.plots import COLOURS, DASHES, colours_of, marked  # tables need none

    with importing("plots"):
        import matplotlib as mpl
    kinds: dict[Combination, list[Combination]] = {}
    for values in combinations:
        kinds.setdefault(tuple(v for v in values if isinstance(v, str)), []).append(values)
    systems = {kind: next((word for word in kind if word in SYSTEMS), "") for kind in kinds}
    named = colours_of(systems.values())
    styles = {}
    for index, (kind, alike) in enumerate(kinds.items()):
        system = systems[kind]
        for rank, values in enumerate(alike):
            if len(kinds) == len(combinations):
                distinct = len(named) == len(kinds)
                colour = named[system][0] if distinct else COLOURS[index % len(COLOURS)]
            elif len(alike) == 1:
                colour = "0.5"
            else:
                # The ends of the map are too faint, or too close to the black of the best.
                colour = mpl.colormaps["viridis"](0.2 + 0.72 * rank / (len(alike) - 1))
            alone = len(keys) == 1 and not isinstance(values[0], str)
            label = value_label(keys[0], values[0]) if alone else combination_label(keys, values)
            dashes = DASHES[index % len(DASHES)]
            styles[values] = LineStyle(label, colour, dashes, marked(len(styles)))
    return {values: styles[values] for values in combinations}
