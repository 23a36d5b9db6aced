"""How figures of a sweep name and colour its keys and their values."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.extras import importing
from fedjaxsim.report.progress import number
from fedjaxsim.report.symbols import key_label, meaning

NOISE = ("noise_multiplier", "target_epsilon")
"""The columns that say how private a run is; several of them where tables differ."""

Combination = tuple[Any, ...]
"""The values of several keys; None where a run's table does not set one."""


class LineStyle(NamedTuple):
    """How one line is drawn.

    Attributes:
      label: in the legend.
      colour: as matplotlib takes it.
      dashes: as matplotlib takes them.
    """

    label: str
    colour: Any
    dashes: str


def value_label(key: str, value: Any) -> str:
    """A value with what it means, as in `0 (local)`."""
    named = meaning(key, value)
    return _text(value) + (f" ({named})" if named else "")


def combination_label(keys: Sequence[str], values: Combination) -> str:
    """Values with their keys, without those that are not set; a word needs no key."""
    parts = [
        _titled(value)
        if isinstance(value, str)
        else f"{key_label(key)} = {value_label(key, value)}"
        for key, value in zip(keys, values, strict=True)
        if value is not None
    ]
    if parts or not keys:
        return ", ".join(parts)
    return f"{' and '.join(map(key_label, keys))} not set"


def legend_title(keys: Sequence[str]) -> str | None:
    """The key whose values a legend lists, where it is only one."""
    return key_label(keys[0]) if len(keys) == 1 else None


def line_styles(
    keys: Sequence[str], combinations: Sequence[Combination]
) -> dict[Combination, LineStyle]:
    """Colours in order of the numbers, from dark to light; dashes tell words apart.

    Args:
      keys: those whose values tell lines apart.
      combinations: their values, in the order of the legend.
    """
    from fedjaxsim.report.plots import COLOURS, DASHES, colour_of  # the names need no matplotlib

    with importing("plots"):
        import matplotlib as mpl
    words = [tuple(v for v in values if isinstance(v, str)) for values in combinations]
    kinds = list(dict.fromkeys(words))
    styles = {}
    for values, kind in zip(combinations, words, strict=True):
        alike = [other for other, of in zip(combinations, words, strict=True) if of == kind]
        dashes = DASHES[kinds.index(kind) % len(DASHES)]
        if len(kinds) == len(combinations):
            known = next((word for word in kind if word in SYSTEMS), None)
            index = kinds.index(kind) if known is None else colour_of(known)
            colour = COLOURS[index % len(COLOURS)]
        elif len(alike) == 1:
            colour = "0.5"
        else:
            # The ends of the map are too faint on white and on the black of what is best.
            rank = alike.index(values) / (len(alike) - 1)
            colour = mpl.colormaps["viridis"](0.2 + 0.72 * rank)
        alone = len(keys) == 1 and not isinstance(values[0], str)
        label = value_label(keys[0], values[0]) if alone else combination_label(keys, values)
        styles[values] = LineStyle(label, colour, dashes)
    return styles


def _titled(word: str) -> str:
    """A system by its name for people."""
    return SYSTEMS[word].title if word in SYSTEMS else word


def _text(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "∞"
    if value is None:
        return "not set"
    return number(value) if isinstance(value, float) else str(value)
