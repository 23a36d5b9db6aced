"""Import and call a user's parts, named as "module:factory"."""

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from fedjaxsim.runs.user_code_lines import own_line, remember

_TAKES = {"algorithm": "task", "model": "shape, outputs", "mechanism": "", "sampling": ""}
"""Positional arguments of factories."""


def is_own(name: str) -> bool:
    """Return whether a name stands for a user's part: "module:factory"."""
    module, _, factory = name.partition(":")
    return bool(module and factory)


def find_own(role: str, path: str) -> Callable[..., Any]:
    """Import a user's factory; its module may be in the current folder.

    Args:
      role: role of the part, in errors.
      path: "module:factory".

    Raises:
      ValueError: in one line, if there is no such module or function, or importing it fails.
    """
    name = f"{role} {path}"
    module_name, _, function = path.partition(":")
    remember(module_name)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = _calling(name, lambda: importlib.import_module(module_name))
    except ValueError as error:
        missing = getattr(error.__cause__, "name", None)
        absent = isinstance(error.__cause__, ModuleNotFoundError) and missing is not None
        if absent and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(f"{name}: there is no module {missing!r}") from error
        raise
    if not hasattr(module, function):
        close = difflib.get_close_matches(function, dir(module), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"{name}: {module_name} has no {function!r}{hint}")
    found = getattr(module, function)
    if not callable(found):
        raise ValueError(
            f"{name} must be a function of ({_TAKES[role]}), got {type(found).__name__} {found!r}"
        )
    return found


def make_own(role: str, path: str, kind: type, /, *args: Any, **settings: Any) -> Any:
    """Call a user's factory.

    Args:
      role: role of the part, in errors.
      path: "module:factory".
      kind: the type that it must return.
      *args: positional arguments.
      **settings: keyword arguments.

    Raises:
      ValueError: in one line, if there is no such module or function, if either fails, or if the
        function takes or returns something else.
    """
    name = f"{role} {path}"
    factory = find_own(role, path)
    signature = inspect.signature(factory)
    try:
        signature.bind(*args, **settings)
    except TypeError:
        takes = str(signature.replace(return_annotation=signature.empty))
        raise ValueError(f"{name} must take ({_TAKES[role]}), but takes {takes}") from None
    made = _calling(name, lambda: factory(*args, **settings))
    if not isinstance(made, kind):
        raise ValueError(f"{name} must return {kind.__name__}, got {type(made).__name__}")
    return made


def _calling(name: str, function: Callable[[], Any]) -> Any:
    """Call a user's code; an error names its line."""
    try:
        return function()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = own_line(error) or f"{last.filename}:{last.lineno}"
        raise ValueError(f"{name} fails at {place}: {type(error).__name__}: {error}") from error
