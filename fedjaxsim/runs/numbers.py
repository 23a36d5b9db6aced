"""Numbers and lists as settings spell them."""

import contextlib
import decimal

_DIGITS = 100
"""The most digits of whole numbers with exponents: no setting takes more."""


def words(text: str) -> tuple[str, ...]:
    """Split a text at commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def integers(text: str) -> tuple[int, ...]:
    """Read the whole numbers between commas."""
    return tuple(whole(word) for word in words(text))


def whole(text: str) -> int:
    """Read a whole number (1000000, 1_000_000 or 1e6), or raise a ValueError."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(decimal.InvalidOperation):
        found = decimal.Decimal(text)
        if found.is_finite() and found == found.to_integral_value():
            if found.adjusted() >= _DIGITS:
                raise ValueError(f"must have at most {_DIGITS} digits, got {text!r}")
            return int(found)
    raise ValueError(f"must be a whole number, as 1000000 or 1e6, got {text!r}")


def number(text: str) -> float:
    """Read a number, or raise a ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None
