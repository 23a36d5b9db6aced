"""Range checks of keyword arguments: each raises ValueError at the first bad one.

The message has the name, what is allowed, and the value. An array passes if all its numbers do.
"""

import difflib
import inspect
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any


class Name(str):
    """The name of a setting, or of a part as `no_release()`, in a message; or `name="value"`."""


class Spelled(Exception):  # noqa: N818 - of errors and warnings
    """Message that knows the names in it: Python, flags and files spell them differently.

    Attributes:
      parts: the message in pieces; those that are a `Name` are names.
    """

    def __init__(self, *parts: str):
        super().__init__(*parts)
        self.parts = parts

    def __str__(self) -> str:
        return self.spelled(str)

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the message with each name as `spell` spells it."""
        return "".join(spell(part) if isinstance(part, Name) else part for part in self.parts)


class SettingError(Spelled, ValueError):
    """Error of settings that knows their names."""


class SettingWarning(Spelled, UserWarning):
    """Warning of settings that knows their names."""


def prefixed(prefix: str, error: ValueError) -> ValueError:
    """Return the error with words in front of its message; its names stay names."""
    if isinstance(error, SettingError):
        return SettingError(prefix, *error.parts)
    return ValueError(f"{prefix}{error}")


def positive(**values: Any) -> None:
    """Require finite numbers above 0."""
    _require(lambda value: (value > 0) & (value < math.inf), "positive and finite", values)


def non_negative(**values: Any) -> None:
    """Require finite numbers of at least 0."""
    _require(lambda value: (value >= 0) & (value < math.inf), "non-negative and finite", values)


def in_range(interval: str, /, **values: Any) -> None:
    """Require numbers in an interval, such as "(0, 1]" or "[0, inf]"."""
    low, high = map(float, interval[1:-1].split(","))
    above = operator.ge if interval[0] == "[" else operator.gt
    below = operator.le if interval[-1] == "]" else operator.lt
    _require(lambda value: above(value, low) & below(value, high), interval, values, "lie in")


def count(least: int = 1, most: float = math.inf, /, **values: Any) -> None:
    """Require integers of at least `least` and at most `most`; a bool is none."""
    limits = f"of at least {least}" if most == math.inf else f"in [{least}, {most}]"

    def allowed(value: Any) -> bool:
        return not isinstance(value, bool) and least <= operator.index(value) <= most

    _require(allowed, f"an integer {limits}", values)


def one_of(allowed: Iterable[Any], /, **values: Any) -> None:
    """Require values among the allowed ones."""
    choices = list(allowed)
    for name, value in values.items():
        if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
            listed, hint = ", ".join(map(str, choices)), did_you_mean(str(value), choices)
            raise SettingError(Name(name), f" must be one of {listed}, got {value!r}{hint}")


def did_you_mean(word: str, names: Iterable[Any], cutoff: float = 0.6) -> str:
    """Return the end of a message with the nearest name; "" if none is near."""
    spellings = {name.lower(): name for name in sorted(map(str, names), reverse=True)}
    near = difflib.get_close_matches(word.lower(), sorted(spellings), n=1, cutoff=cutoff)
    return f" (did you mean {spellings[near[0]]!r}?)" if near else ""


def described(value: Any) -> str:
    """Return a value in a few words, for messages."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {value.dtype}{list(value.shape)}"
    if inspect.isfunction(value):
        return f"the function {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"


def _require(
    allowed: Callable[[Any], Any], what: str, values: dict[str, Any], verb: str = "be"
) -> None:
    for name, value in values.items():
        try:
            answer = allowed(value)
            good = bool(answer.all() if hasattr(answer, "all") else answer)
        except TypeError:  # no number at all
            good = False
        if not good:
            raise SettingError(Name(name), f" must {verb} {what}, got {value!r}")
