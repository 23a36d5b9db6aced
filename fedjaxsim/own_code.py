"""The authors of a part's code: one answer for assumptions, checks and tests of users' code.

A record of functions, such as a mechanism, may hold no code of a user and still be his: he may have
put parts of two records together. Only a record with a stamp is the package's.
"""

import contextlib
import dataclasses
import functools
import itertools
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

_PACKAGES = {
    *sys.stdlib_module_names,
    "fedjaxsim", "jax", "jaxlib", "numpy", "optax", "flax", "equinox", "haiku",
}  # fmt: skip
_STDLIB = (
    sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"),
    str(Path(functools.__file__).parent),
)  # fmt: skip
"""Folders of the standard library: a user's file may have a name of its modules, as `code.py`."""
_INSIDE = (
    "__closure__", "cell_contents", "__defaults__", "__kwdefaults__", "__wrapped__", "__func__",
    "__self__",
)  # fmt: skip
_HOLDS_NOTHING = {bool, int, float, str, bytes, type(None)}
_SESSIONS = "<stdin>", "<console>", "<python-input", "<ipython-input", "<doctest"
"""Names in place of a file of code that a user typed."""
_OF_PARTIAL = "func", "args", "keywords"
"""Names of what a function, its cells and a `functools.partial` hold."""


def own_modules(part: Any) -> list[str]:
    """Return the modules, no libraries, of a part's functions and of all they close over."""
    return sorted({_module_of(value)[0] for value in _own_values(part)})


def is_own(function: Any) -> bool:
    """Return whether a user wrote a function, whatever it closes over."""
    return not all(_is_library(*_module_of(layer)) for layer in layers_of(function))


def layers_of(function: Any) -> Iterator[Any]:
    """Yield a callable, and the ones that partial, bound and compiled ones call in turn."""
    while function is not None:
        yield function
        if isinstance(function, types.FunctionType):  # what it wraps is called by its own code
            return
        if isinstance(function, functools.partial):
            function = function.func
        else:
            function = getattr(function, "__func__", getattr(function, "__wrapped__", None))


def defined_at(part: Any) -> str | None:
    """Return name, file and line of a function of a user in a part, what it wraps first."""
    for value in _own_values(part):
        if isinstance(value, types.FunctionType):
            code = value.__code__
            return f"{value.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return None


def _own_values(part: Any) -> Iterator[Any]:
    """Yield what a part holds, and all that it closes over, that no library defines."""
    seen = set()
    left: list[Any] = [part]
    while left:
        value = left.pop()
        if type(value) in _HOLDS_NOTHING or id(value) in seen:
            continue
        seen.add(id(value))
        if not _is_library(*_module_of(value)):
            yield value
        if isinstance(value, (tuple, list, Set)):
            left += value
        elif isinstance(value, Mapping):
            left += value.values()
        else:
            names = _OF_PARTIAL if isinstance(value, functools.partial) else _INSIDE
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                names = [field.name for field in dataclasses.fields(value)]
            with contextlib.suppress(ValueError):  # an empty cell
                left += [getattr(value, name, None) for name in names]


def _module_of(value: Any) -> tuple[str, str | None]:
    """Return module and file of code: `__module__` may be copied, as by `functools.wraps`."""
    if isinstance(value, types.FunctionType):
        return _module_in(value.__globals__, value.__code__)
    return _module_of_class(value if isinstance(value, type) else type(value))


def _module_in(inside: Mapping[str, Any], code: types.CodeType) -> tuple[str, str | None]:
    """Return module and file of code that runs with these globals, if they are the module's."""
    name, file = inside.get("__name__") or code.co_filename, inside.get("__file__")
    if _is_library(name, file) and getattr(sys.modules.get(name), "__dict__", None) is not inside:
        return code.co_filename, code.co_filename  # the name was given, as to `exec`
    return name, file


@functools.cache
def _module_of_class(kind: type) -> tuple[str, str | None]:
    """Return module and file of a class, or of a method from elsewhere: a class may say any name.

    Methods that a library generates, such as a dataclass's, are nobody's.
    """
    module = str(kind.__module__)
    named = module, getattr(sys.modules.get(module), "__file__", None)
    if not _is_library(*named):
        return named
    for held in itertools.chain.from_iterable(vars(base).values() for base in kind.__mro__):
        function = getattr(held, "__func__", getattr(held, "fget", held))
        if isinstance(function, types.FunctionType) and _is_written(function.__code__):
            of_function = _module_of(function)
            if not _is_library(*of_function):
                return of_function
    return named


def _is_written(code: types.CodeType) -> bool:
    """Return whether somebody wrote the code, in a file or a session; others are generated."""
    file = code.co_filename
    if file == "<string>":  # of `python -c` and `exec`, and of what Python generates for classes
        of_dataclass = code.co_qualname.startswith("__create_fn__.<locals>.")
        return not of_dataclass and code.co_names != ("_tuple_new",)
    return file.startswith(_SESSIONS) or not file.startswith("<")


def code_run_by(function: Callable[[], Any]) -> str | None:
    """Return name, file and line of the first code of a user that a call runs; None without any."""
    run: list[str] = []

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_new = event == "call" and _is_written(code) and not run
        if is_new and not _is_library(*_module_in(frame.f_globals, code)):
            run.append(f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})")

    before: Any = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        if hasattr(before, "enable"):  # cProfile's, which `setprofile` does not take back
            sys.setprofile(None)
            before.enable()
        else:
            sys.setprofile(before)
    return run[0] if run else None


def _is_library(module: str, file: str | None) -> bool:
    name = module.partition(".")[0]
    if name not in _PACKAGES:
        return False
    return file is None or name not in sys.stdlib_module_names or file.startswith(_STDLIB)


def stamp(record: Any, allows: Callable[[Any, Any], bool] | None = None) -> Any:
    """Return a named tuple of the package with a stamp: its parts were made for each other.

    All that makes another tuple of its parts loses the stamp. `_replace` keeps it if
    `allows(before, after)`.
    """
    return tuple.__new__(_stamped(kind_of(record), allows), record)


def kind_of(record: Any) -> type:
    """Return the type of a record, without a stamp."""
    kind = type(record)
    return vars(kind).get("_unstamped", kind)


def is_stamped(record: Any) -> bool:
    """Return whether the package made a record, and nothing in it was exchanged."""
    return "_unstamped" in vars(type(record))


@functools.cache
def _stamped(kind: Any, allows: Callable[[Any, Any], bool] | None) -> type:
    def without(_, *args, **kwargs):
        return kind(*args, **kwargs)

    def replaced(self, /, **changes):
        after = kind._replace(self, **changes)
        return stamp(after, allows) if allows is not None and allows(self, after) else after

    inside = {
        "__slots__": (), "__module__": kind.__module__, "__new__": without, "_make": kind._make,
        "_replace": replaced, "__replace__": replaced, "_unstamped": kind,
    }  # fmt: skip
    return type(kind.__name__, (kind,), inside)
