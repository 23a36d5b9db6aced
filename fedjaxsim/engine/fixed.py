"""Objects that stay as they were when they were checked."""

from typing import Any


class Fixed:
    """An object whose public attributes are set once, and whose methods nobody replaces.

    Compiled functions would not follow a change, and a guarantee would name other parts than ran.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_set = name in vars(self) and not name.startswith("_")
        if is_set or callable(getattr(type(self), name, None)):
            kind = type(self).__name__
            raise AttributeError(
                f"{name} of a {kind} stays as it is: make another {kind}, as by dataclasses.replace"
            )
        super().__setattr__(name, value)
