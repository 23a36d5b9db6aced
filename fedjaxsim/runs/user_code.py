"""Import and call a user's parts, named as "module:factory"."""

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

_TAKES = {
    "algorithm": "task", "model": "shape, outputs", "loss": "model, outputs", "mechanism": "",
    "sampling": "", "availability": "", "compression": "",
}  # fmt: skip
"""Positional arguments of factories."""
_PACKAGES: set[str] = set()
"""Packages with the parts of users."""


def is_own(name: str) -> bool:
    """Return whether a name stands for a user's part: "module:factory"."""
    module, _, factory = name.partition(":")
    return bool(module and factory)


def find_own(role: str, path: str) -> Callable[..., Any]:
    """Import the factory "module:factory" of a user's part; it may be in the current folder.

    "folder/file.py:factory" is the same as "folder.file:factory".

    Raises:
      ValueError: in one line, if there is no such module or function, or importing it fails.
    """
    name = f"{role} {path}"
    module_name, _, function = path.partition(":")
    if module_name.endswith(".py"):
        inside = os.path.relpath(module_name)
        if inside.startswith(os.pardir):
            raise ValueError(f"{name}: the file must be in or below {os.getcwd()}")
        module_name = inside.removesuffix(".py").replace(os.sep, ".")
    package = module_name.partition(".")[0]
    if package != __name__.partition(".")[0]:
        _PACKAGES.add(package)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = calling(name, lambda: importlib.import_module(module_name))
    except ValueError as error:
        missing = getattr(error.__cause__, "name", None)
        absent = isinstance(error.__cause__, ModuleNotFoundError) and missing is not None
        if absent and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(
                f"{name}: there is no module {missing!r} in {os.getcwd()} or installed"
            ) from error
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


def make_own(
    role: str, path: str, kind: type, supplied: Mapping[str, Any], /, *args: Any, **settings: Any
) -> Any:
    """Call the factory "module:factory" of a user's part, which must return a `kind`.

    The factory gets those of the `supplied` arguments that it takes.

    Raises:
      ValueError: in one line, if there is no such module or function, if either fails, or if the
        function takes or returns something else.
    """
    name = f"{role} {path}"
    factory = find_own(role, path)
    signature = inspect.signature(factory)
    given = {name: value for name, value in supplied.items() if name in signature.parameters}
    try:
        signature.bind(*args, **given, **settings)
    except TypeError:
        takes = str(signature.replace(return_annotation=signature.empty))
        raise ValueError(
            f"{name} must take ({_TAKES[role]}) and settings after *, but takes {takes}"
        ) from None
    made = calling(name, lambda: factory(*args, **given, **settings))
    if role == "model":
        from fedjaxsim.models.check_kinds import require_model  # needs JAX, as the factory does

        return require_model(f"{name} must return", made)
    if not isinstance(made, kind):
        raise ValueError(f"{name} must return {kind.__name__}, got {type(made).__name__}")
    return made


def calling(name: str, function: Callable[[], Any]) -> Any:
    """Call a user's code; an error names its line."""
    try:
        return function()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = own_line(error) or f"{last.filename}:{last.lineno}"
        raise ValueError(f"{name} fails at {place}: {type(error).__name__}: {error}") from error


def own_line(error: BaseException) -> str | None:
    """Return the last line of a user's code that an error passed, as FILE:LINE; else None."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
            return f"{frame.f_code.co_filename}:{line}"
    return None
