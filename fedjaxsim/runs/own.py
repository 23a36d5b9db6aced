"""What a run takes from a user's own code: an algorithm or a model, named as "module:factory"."""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from fedjaxsim.engine.checks import check_arguments
from fedjaxsim.runs.own_lines import own_line, remember


def make_own(setting: str, path: str, kind: type, **arguments: Any) -> Any:
    """Calls a factory of the user's.

    Its module is looked for where Python looks and, after that, in the current folder.

    Args:
      setting: what it is for, in errors.
      path: "module:factory".
      kind: what it must return.
      **arguments: what it is called with, in this order.

    Raises:
      ValueError: in one line, if there is no such module or function, if either fails, or if the
        function takes or returns something else.
    """
    name = f"{setting} {path}"
    factory = _find(name, path)
    check_arguments(name, factory, ", ".join(arguments))
    made = _calling(name, lambda: factory(*arguments.values()))
    if not isinstance(made, kind):
        raise ValueError(f"{name} must return {kind.__name__}, got {type(made).__name__}")
    return made


def _find(name: str, path: str) -> Callable[..., Any]:
    module_name, _, function = path.partition(":")
    remember(module_name)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = _calling(name, lambda: importlib.import_module(module_name))
    except ValueError as error:
        missing = getattr(error.__cause__, "name", None)
        if isinstance(error.__cause__, ModuleNotFoundError) and missing in _parents(module_name):
            raise ValueError(f"{name}: there is no module {missing!r}") from error
        raise
    if not hasattr(module, function):
        close = difflib.get_close_matches(function, dir(module), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"{name}: {module_name} has no {function!r}{hint}")
    return getattr(module, function)


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _calling(name: str, function: Callable[[], Any]) -> Any:
    """What a user's code gives; where it fails is part of the one line."""
    try:
        return function()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = own_line(error) or f"{last.filename}:{last.lineno}"
        raise ValueError(f"{name} fails at {place}: {type(error).__name__}: {error}") from error
