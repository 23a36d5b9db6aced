"""Names and colours of swept keys and their values in figures and tables."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.extras import importing
from fedjaxsim.report.envelopes import Combination
from fedjaxsim.report.progress import number
from fedjaxsim.report.symbols import key_label, meaning

NOISE = ("noise_multiplier", "target_epsilon")
"""Columns that set the noise of a run."""


class LineStyle(NamedTuple):
    """Label in the legend, and colour and dashes in matplotlib's terms."""

    label: str
    colour: Any
    dashes: str


def value_label(key: str, value: Any) -> str:
    """Format a value with its meaning, as in `0 (local)`."""
    named = meaning(key, value)
    if value is None:
        text = "not set"
    elif isinstance(value, float):
        text = "∞" if math.isinf(value) else number(value)
    else:
        text = str(value)
    return text + (f" ({named})" if named else "")


def combination_label(keys: Sequence[str], values: Combination) -> str:
    """Format values with their keys, without unset ones; a word needs no key."""
    parts = [
        (SYSTEMS[value].title if value in SYSTEMS else value)
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
    from fedjaxsim.report.plots import COLOURS, DASHES, colour_of  # tables need no matplotlib

    with importing("plots"):
        import matplotlib as mpl
    kinds: dict[Combination, list[Combination]] = {}
    for values in combinations:
        kinds.setdefault(tuple(v for v in values if isinstance(v, str)), []).append(values)
    styles = {}
    for index, (kind, alike) in enumerate(kinds.items()):
        system = next((word for word in kind if word in SYSTEMS), None)
        for rank, values in enumerate(alike):
            if len(kinds) == len(combinations):
                colour = COLOURS[(index if system is None else colour_of(system)) % len(COLOURS)]
            elif len(alike) == 1:
                colour = "0.5"
            else:
                # The ends of the map are too faint, or too close to the black of the best.
                colour = mpl.colormaps["viridis"](0.2 + 0.72 * rank / (len(alike) - 1))
            alone = len(keys) == 1 and not isinstance(values[0], str)
            label = value_label(keys[0], values[0]) if alone else combination_label(keys, values)
            styles[values] = LineStyle(label, colour, DASHES[index % len(DASHES)])
    return {values: styles[values] for values in combinations}
