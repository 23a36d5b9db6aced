"""The seed of a run: a number that others may know, or one that the operating system draws."""

import secrets
from typing import Any

from fedjaxsim.factories import CommandLineText, Setting

SECRET = "secret"
_SAVED = f"{SECRET}:"
_LEAST, _BEYOND = 2**32, 2**63
"""A secret seed lies between them: nobody tries them all, and TOML's integers hold them."""


class SecretSeed(int):
    """A seed that the operating system drew, and that a run's private files alone hold."""

    @property
    def saved(self) -> str:
        """Its spelling in the settings of a run."""
        return f"{_SAVED}{int(self)}"


class SeedSetting(Setting):
    """The setting of a seed: a whole number, or "secret" to draw one."""

    def convert(self, value: Any, called: str | None = None) -> Any:
        """Convert a seed; a secret one is drawn, or was saved by the run that drew it."""
        if isinstance(value, SecretSeed):
            return value
        if isinstance(value, str) and value == SECRET:
            return SecretSeed(_LEAST + secrets.randbelow(_BEYOND - _LEAST))
        if (
            isinstance(value, str)
            and value.startswith(_SAVED)
            and not isinstance(value, CommandLineText)
        ):
            number = number_of(value)
            if not _LEAST <= number < _BEYOND:
                raise ValueError(f"seed {value} was not drawn: give seed secret to draw one")
            return SecretSeed(number)
        return super().convert(value, called)


def number_of(seed: int | str) -> int:
    """Return the number of a seed in the settings of a run."""
    return int(str(seed).removeprefix(_SAVED))
